# SPDX-License-Identifier: Apache-2.0
"""A ready Pyro model for regression."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.util import is_validation_enabled
from torch import Tensor, nn

from pyro_dvi.bayesian.likelihood_module import LikelihoodModule, check_target
from pyro_dvi.bayesian.noise import Noise, as_noise, reference_tensor
from pyro_dvi.errors import DataError, ModelError

__all__ = ["Regressor", "regressor"]


class Regressor(LikelihoodModule):
    """The model of :func:`regressor`: ``model(x, y=None)`` samples the site ``obs``."""

    def __init__(self, net: nn.Module, num_data: int, noise: Noise) -> None:
        super().__init__(net, num_data)
        self.noise = noise
        noise.attach(self, reference_tensor(net))

    def forward(self, x: Any, y: Tensor | None = None) -> Tensor:
        """Run the network on ``x`` and observe the targets ``y``, or draw them."""
        outputs = self.outputs(x)
        if outputs.dim() not in (1, 2):
            raise ModelError(
                f"The network's output has the shape {tuple(outputs.shape)}; regression needs [batch] or "
                "[batch, columns]. Flatten other dimensions in the network."
            )
        mean, scale = self.noise.split(self, outputs.unsqueeze(-1) if outputs.dim() == 1 else outputs)
        one_column = mean.shape[-1] == 1
        if one_column:  # [batch, 1] and [batch] mean the same
            mean = mean.squeeze(-1)
            # a tensor, or moments of one, where it has a column
            scale = scale if isinstance(scale, float) or scale.ndim != 2 else scale.squeeze(-1)
            y = y.squeeze(-1) if isinstance(y, Tensor) and y.dim() == 2 and y.shape[-1] == 1 else y
        if y is not None and is_validation_enabled():
            y = check_target(y, mean.shape, outputs.shape, "targets")
            if not bool(torch.isfinite(y).all()):
                raise DataError("y holds NaN or infinite targets; leave these rows out.")
        with self.data_plate(mean.shape[0], observed=y is not None):
            targets = dist.Normal(mean, scale).to_event(0 if one_column else 1)
            drawn: Tensor = pyro.sample("obs", targets, obs=y)
        return drawn


def regressor(net: nn.Module, num_data: int, noise_scale: Any = 1.0) -> Regressor:
    r"""Wrap a network of means into a Pyro model for regression.

    .. math::
        y_i \sim N(f_w(x_i), \sigma^2), \qquad i = 1, \dots, N

    Status: exact.

    Args:
        net: maps ``[batch, ...]`` to means ``[batch]``, ``[batch, 1]`` or ``[batch, columns]``; twice the
            columns with ``Heteroscedastic()``. Its weights are Bayesian after ``to_bayesian_``.
        num_data: :math:`N`, the number of examples in the data set, not of batches.
        noise_scale: :math:`\sigma`, in units of ``y`` (standardise targets, or choose it accordingly): a
            number; a distribution over positive numbers (the latent site ``noise_scale``);
            ``LearnedScale(init)`` (a parameter that is optimised); or ``Heteroscedastic()`` (the network
            predicts a log-variance for each input).

    Returns:
        A model ``model(x, y=None)`` with the observed site ``obs`` in the plate ``data``. ``x`` may be a
        tuple or mapping of inputs; ``y`` is ``[batch]`` or ``[batch, columns]``, and ``[batch, 1]`` counts as
        ``[batch]``.

    Raises:
        ArgumentError: if ``num_data`` is not a positive integer or ``noise_scale`` none of the forms above.
        ModelError: when run, if the network's output has another shape.
        DataError: when run, if targets have the wrong shape or are not finite.

    Example:
        >>> import pyro
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> model = regressor(to_bayesian_(nn.Linear(4, 1)), 100, noise_scale=dist.HalfNormal(1.0))
        >>> trace = pyro.poutine.trace(model).get_trace(torch.zeros(5, 4), torch.zeros(5))
        >>> list(trace.stochastic_nodes), trace.nodes["obs"]["scale"]
        (['net.weight', 'net.bias', 'noise_scale', 'data'], 20.0)
    """
    return Regressor(net, num_data, as_noise(noise_scale))
