# SPDX-License-Identifier: Apache-2.0
"""Where the noise scale of a regression comes from: fixed, inferred, learned, or predicted by the network.

Writing a new one: subclass :class:`Noise` and split the network's outputs into means and scales.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn.module import PyroModule, PyroParam, PyroSample
from torch import Tensor
from torch.distributions import constraints

from pyro_dvi.bayesian.priors import check_no_gradient, positive
from pyro_dvi.bayesian.scales import LearnedScale, ScalePrior, check_positive_support
from pyro_dvi.errors import ArgumentError, ModelError


class Noise(ABC):
    """The scale of the observation noise, in units of the target."""

    def attach(self, model: PyroModule, reference: Tensor) -> None:  # noqa: B027 (not all need something)
        """Add what the noise needs to the model, in the dtype and on the device of ``reference``."""

    @abstractmethod
    def split(self, model: PyroModule, outputs: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the mean and the scale of the observations for the network's outputs ``[batch, columns]``."""


@dataclass(frozen=True, eq=False)
class Homoscedastic(Noise):
    """One scale for all observations, ``noise_scale`` of the model: a number, a latent site or a parameter."""

    scale: float | TorchDistributionMixin | LearnedScale

    def attach(self, model: PyroModule, reference: Tensor) -> None:
        """Add the attribute."""
        scale: Any = self.scale
        if isinstance(scale, LearnedScale):
            start: Any = scale.init
            scale = PyroParam(reference.new_full((), start), constraint=constraints.positive)
        elif isinstance(scale, TorchDistributionMixin):
            model.register_buffer("noise_like", reference.new_ones(()), persistent=False)
            scale = PyroSample(ScalePrior(scale, "noise_like"))
        model.noise_scale = scale

    def split(self, model: PyroModule, outputs: Tensor) -> tuple[Tensor, Tensor | float]:
        """All outputs are means."""
        return outputs, model.noise_scale


@dataclass(frozen=True)
class Heteroscedastic(Noise):
    r"""A noise scale for each input, from a second half of the network's outputs.

    .. math::
        f_w(x) = (\mu, c), \qquad \sigma(x) = e^{c/2}

    The last layer needs twice as many outputs as the target has columns: means first, log-variances after
    them.

    Status: exact.

    Example:
        >>> noise = Heteroscedastic()
        >>> mean, scale = noise.split(PyroModule(), torch.tensor([[1.0, 0.0]]))
        >>> mean, scale
        (tensor([[1.]]), tensor([[1.]]))
    """

    def split(self, model: PyroModule, outputs: Tensor) -> tuple[Tensor, Tensor | float]:
        """Return the first half of the columns, and exp of half the second half."""
        columns = outputs.shape[-1]
        if columns % 2:
            raise ModelError(
                f"The network has {columns} outputs, and Heteroscedastic() needs an even number: a mean and "
                "a log-variance for each column of the target. Double the outputs of the last layer."
            )
        mean, log_variance = outputs[..., : columns // 2], outputs[..., columns // 2 :]
        return mean, torch.exp(0.5 * log_variance)


def as_noise(noise: Any) -> Noise:
    """Turn anything that ``regressor`` accepts as ``noise_scale`` into a :class:`Noise`.

    Raises:
        ArgumentError: if it is none of the accepted forms.

    Example:
        >>> as_noise(0.1)
        Homoscedastic(scale=0.1)
    """
    if isinstance(noise, Noise):
        return noise
    if isinstance(noise, LearnedScale):
        if callable(noise.init):
            raise ArgumentError("noise_scale: the init of LearnedScale is a rule for weights; pass a number.")
    elif isinstance(noise, TorchDistributionMixin):
        check_positive_support(noise, "noise_scale")
        check_no_gradient(noise, "noise_scale")
    elif isinstance(noise, int | float | Tensor):
        noise = positive(noise, "noise_scale")
    else:
        raise ArgumentError(
            f"noise_scale is {noise!r}. Pass a number, a distribution over positive numbers (the scale becomes a "
            "latent), LearnedScale() or Heteroscedastic()."
        )
    return Homoscedastic(noise)
