# SPDX-License-Identifier: Apache-2.0
"""Factors of a posterior: what the Gaussian or point mass of one site is, and which parameters it has."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
from pyro.distributions.distribution import Distribution
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.choice import check_choice
from pyro_dvi.guides.scales import PerWeight, ScaleFamily


class Factor(ABC):
    """The posterior of one site in unconstrained space: a mean, and perhaps a parameter of its spread.

    Adding one: say where the spread is stored, how it starts, and which distribution follows.
    """

    @property
    def store(self) -> str | None:
        """Attribute of the guide that holds the spread of each site; None if nothing but the mean is learned."""
        return None

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        """Return the spread at the start, in the shape in which it is stored.

        Args:
            loc: the initial mean.
            prior_scale: standard deviation of the prior, broadcastable to ``loc``.
            event_dim: number of event dimensions of ``loc``; those to their left belong to plates.
        """
        raise NotImplementedError

    @abstractmethod
    def distribution(self, loc: Tensor, spread: Tensor | None) -> Any:
        """Return the posterior, without event dimensions. Unvalidated: a check of each weight at each step costs."""


@dataclass(frozen=True)
class MeanField(Factor):
    r"""Independent Gaussians with standard deviations of their own, :math:`\mathcal N(\mu_\lambda, \sigma_\lambda^2)`.

    Args:
        scale: the covariance family, as for :class:`~pyro_dvi.MeanFieldGuide`.

    Raises:
        ArgumentError: ``scale`` is no covariance family.
    """

    scale: ScaleFamily = field(default_factory=PerWeight)

    def __post_init__(self) -> None:
        check_choice(
            "scale", self.scale, ScaleFamily, "PerWeight(), PerSite() or SGDStepSize(lr, batch_size)"
        )

    @property
    def store(self) -> str | None:
        """The guide's ``scales``, if they are learned."""
        return "scales" if self.scale.learned else None

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        return self.scale.initial(loc, prior_scale, event_dim)

    def distribution(self, loc: Tensor, spread: Tensor | None) -> dist.Normal:
        scale = self.scale.initial(loc.detach(), loc.detach(), 0) if spread is None else spread
        return ReadyNormal(loc, scale if scale.shape == loc.shape else scale.expand_as(loc))


@dataclass(frozen=True)
class Deterministic(Factor):
    """A point mass: the value is learned, its uncertainty left out. It pays minus its log prior in the ELBO."""

    def distribution(self, loc: Tensor, spread: Tensor | None) -> dist.Delta:
        # One zero, where Pyro would make one for each weight.
        return dist.Delta(loc, loc.new_zeros(()), validate_args=False)


class ReadyNormal(dist.Normal):
    """A Normal whose mean and scale have the same shape: it broadcasts and checks nothing in the steps of training."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        self.loc, self.scale = loc, scale
        td.Distribution.__init__(self, loc.shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "ReadyNormal":
        return ReadyNormal(self.loc.expand(batch_shape), self.scale.expand(batch_shape))


class TransformedValue(dist.Delta):
    """The value of a constrained site: a point mass that carries the Jacobian of its transform as its log density.

    Pyro takes the divergence of a point mass from a prior without its log density, so that ``TraceMeanField_ELBO``
    would leave the Jacobian out.
    """


@td.register_kl(TransformedValue, Distribution)
def _divergence(p: TransformedValue, q: Any) -> Tensor:
    divergence: Tensor = p.log_density - q.log_prob(p.v)
    return divergence
