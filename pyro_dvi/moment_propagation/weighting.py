# SPDX-License-Identifier: Apache-2.0
"""How much each observation counts in training."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, ModelError


class ExampleWeighting(ABC):
    """Weights of the log-likelihood of single observations, constant in the gradient."""

    @abstractmethod
    def weights(self, fn: Any, step: int) -> Tensor:
        """Return weights of the batch shape of ``fn``.

        Args:
            fn: the distribution of an observed site, with certain parameters.
            step: training steps done.
        """


@dataclass(frozen=True)
class VarianceWeighted(ExampleWeighting):
    r"""Weight each observation by a power of its noise variance, with mean one over the batch.

    .. math:: w_i \propto \sigma_i^{2\gamma_t}

    A network that predicts its own noise learns slowly where it believes the noise to be large, since those gradients
    are divided by :math:`\sigma^2`; it may then settle for noise instead of a fit. The weights undo the division. Let
    the exponent fall to 0, so that training ends on the plain objective.

    Status: with an exponent other than 0 the loss is no bound, only a path to one. The mean counts masked observations.

    Args:
        exponent: :math:`\gamma` (the paper's :math:`\beta`), a number or a schedule of the step: 0 for none, 1 for
            squared errors.
        dim: dimension of the batch over which weights have mean one; None for all of it.

    Source: Seitzer et al. (2022), "On the pitfalls of heteroscedastic uncertainty estimation", Eq. 5.

    Example:
        >>> import pyro.distributions as dist
        >>> noise = dist.Normal(torch.zeros(2), torch.tensor([1.0, 3.0]))
        >>> VarianceWeighted(0.5).weights(noise, step=0)
        tensor([0.5000, 1.5000])
    """

    exponent: float | Callable[[int], float] = 0.5
    dim: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.exponent) and not 0 <= self.exponent <= 1:
            raise ArgumentError(f"the exponent should lie between 0 and 1, got {self.exponent!r}")

    def weights(self, fn: Any, step: int) -> Tensor:
        exponent = self.exponent(step) if callable(self.exponent) else self.exponent
        if exponent == 0:
            return torch.ones(())
        try:
            variance: Tensor = fn.variance.detach()
        except (NotImplementedError, AttributeError) as error:
            raise ModelError(
                f"{type(fn).__name__} has no variance to weight observations by: drop the weighting"
            ) from error
        for _ in fn.event_shape:
            variance = variance.mean(-1)
        weights = variance.pow(exponent)
        mean = weights.mean() if self.dim is None else weights.mean(self.dim, keepdim=True)
        return weights / mean
