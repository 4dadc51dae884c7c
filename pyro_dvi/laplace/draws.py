# SPDX-License-Identifier: Apache-2.0
"""Draws from the Gaussian of a fit as a Pyro distribution."""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.laplace.methods.posterior import LaplacePosterior

__all__ = ["Draws", "draw"]


def draw(posterior: LaplacePosterior, count: int) -> Tensor:
    """Draw flat vectors ``[count, D]`` with random numbers that follow from torch's global generator."""
    generator = torch.Generator(posterior.mode.device).manual_seed(int(torch.randint(2**31 - 1, ())))
    return posterior.draw(count, generator).detach()


class Draws(dist.TorchDistribution):
    """The Gaussian over the flat vector, known by draws.

    Args:
        posterior: the Gaussian.
        batch_shape: of independent copies.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (as in torch)
    support = constraints.real_vector

    def __init__(self, posterior: LaplacePosterior, batch_shape: Any = ()) -> None:
        self.posterior = posterior
        super().__init__(torch.Size(batch_shape), posterior.mode.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Draws":
        """Return as many independent copies."""
        return Draws(self.posterior, batch_shape)

    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw vectors ``[*sample_shape, *batch_shape, D]``."""
        shape = torch.Size(sample_shape) + self.batch_shape
        return draw(self.posterior, shape.numel()).reshape(*shape, -1)

    def log_prob(self, value: Tensor) -> Tensor:
        """Refuse: a method knows draws or covariances, not always the density."""
        raise UnsupportedError(
            "a fitted LaplaceGuide gives draws without gradients, and these have no density for a loss: compute losses "
            "of the mode before guide.fit, or with gradients enabled, as svi.step does"
        )
