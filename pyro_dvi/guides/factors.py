# SPDX-License-Identifier: Apache-2.0
"""The posterior of one site: its factor, the family of its scales, and where its parameters are stored."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import sqrt
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.distribution import Distribution
from pyro.distributions.util import sum_rightmost
from pyro.nn import PyroModule
from torch import Tensor, distributions as td
from torch.distributions import ExpTransform, constraints, transform_to

from pyro_dvi.core.arguments import check_choice, check_count, check_positive
from pyro_dvi.errors import ArgumentError, GuideError


class _ExpPositive(constraints.greater_than):  # type: ignore[misc]
    """Positive numbers, of which an optimizer sees the logarithm.

    Torch's own transform to positive numbers adds zero and multiplies by one after the exponential: two passes over all
    weights in every step, and a third one backwards.
    """


exp_positive = _ExpPositive(0.0)
_EXP = ExpTransform()


@transform_to.register(_ExpPositive)
def _to_exp_positive(constraint: _ExpPositive) -> ExpTransform:
    return _EXP


class ScaleFamily(ABC):
    """A way to parameterise posterior standard deviations.

    To add a family, say in which shape the learned scales of a site are stored, or that they are fixed.
    """

    learned: ClassVar[bool] = True

    @abstractmethod
    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        """Return the scales of a site at the start, in the shape in which they are stored.

        Args:
            loc: the site's initial mean, in unconstrained space.
            prior_scale: standard deviation of its prior, broadcastable to ``loc``.
            event_dim: number of event dimensions of ``loc``; those to their left belong to plates.
        """


@dataclass(frozen=True)
class PerWeight(ScaleFamily):
    r"""One standard deviation per weight, :math:`\log\sigma = \log s - 3` at the start.

    Args:
        log_offset: initial :math:`\log(\sigma/s)` with the prior's standard deviation s.

    Source: Unlu & Aitchison (2021), section 4.
    """

    log_offset: float = -3.0

    def __post_init__(self) -> None:
        if not -20 <= self.log_offset <= 5:
            raise ArgumentError(
                f"log_offset is log(posterior scale / prior scale) at the start, got {self.log_offset}: try -3"
            )

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        return (prior_scale * torch.full_like(loc, self.log_offset).exp()).contiguous()


class PerSite(PerWeight):
    r"""One standard deviation shared by all weights of a site (per plate element for local latents).

    Args:
        log_offset: initial :math:`\log(\sigma/s)` with the prior's standard deviation s (its mean over the site).
    """

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        axes = tuple(range(loc.dim() - event_dim, loc.dim()))
        scales = super().initial(loc, prior_scale, event_dim)
        return scales.mean(axes, keepdim=True) if axes else scales


@dataclass(frozen=True)
class SGDStepSize(ScaleFamily):
    r"""One fixed variance for every weight, as of SGD with this step size: :math:`\sigma^2 = \eta / 2M`.

    Together with ``TaylorELBO(curvature=MinibatchGradient())`` only the means are learned, on the objective
    :math:`\tfrac NM[\log p - \tfrac{\eta}{4M}\sum_\lambda g_\lambda^2] - \beta\,\mathrm{(weight\ decay)}` with the
    summed minibatch gradient g.

    Args:
        lr: step size :math:`\eta` of SGD on the mean loss.
        batch_size: :math:`M`.

    Source: Unlu & Aitchison (2021), Eq. 29 (arXiv), there with the mean gradient :math:`g / M`, which is the same.
    """

    learned: ClassVar[bool] = False

    lr: float
    batch_size: int

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_count("batch_size", self.batch_size)

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        return loc.new_full((), sqrt(self.lr / (2 * self.batch_size)))


class Factor(ABC):
    """The posterior of one site in unconstrained space: a mean, and perhaps a parameter of its spread.

    To add a factor, say where the spread is stored, how it starts, and which distribution follows.
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
        return dist.Normal(loc, scale, validate_args=False)


@dataclass(frozen=True)
class Deterministic(Factor):
    """A point mass: the value is learned, its uncertainty left out. It pays minus its log prior in the ELBO."""

    def distribution(self, loc: Tensor, spread: Tensor | None) -> dist.Delta:
        # One zero, where Pyro would make one for each weight.
        return dist.Delta(loc, loc.new_zeros(()), validate_args=False)


class TransformedValue(dist.Delta):
    """The value of a constrained site: a point mass that carries the Jacobian of its transform as its log density.

    Pyro takes the divergence of a point mass from a prior without its log density, so that ``TraceMeanField_ELBO``
    would leave the Jacobian out.
    """


@td.register_kl(TransformedValue, Distribution)
def _divergence(p: TransformedValue, q: Any) -> Tensor:
    divergence: Tensor = p.log_density - q.log_prob(p.v)
    return divergence


@dataclass(frozen=True, eq=False)
class GuideSite:
    """The posterior of one latent site of the model.

    Attributes:
        name: the model's name of the site.
        prior: its distribution in the first look at the model.
        transform: from unconstrained values to the site's own; None for the identity.
        event_dim: event dimensions of an unconstrained value; those to their left belong to plates.
        plates: names of the plates around the site.
        factor: the family of its posterior.
        means: the module that holds its mean.
        spreads: the module that holds the parameter of its spread; None if nothing but the mean is learned.
    """

    name: str
    prior: Any
    transform: Any
    event_dim: int
    plates: tuple[str, ...]
    factor: Factor
    means: PyroModule
    spreads: PyroModule | None

    @property
    def loc(self) -> Tensor:
        """The mean, read by a statement of Pyro's where a handler is around."""
        value: Tensor = self._read(self.means)
        return value

    @property
    def spread(self) -> Any:
        """The parameter of the spread likewise; None if nothing but the mean is learned."""
        return self._read(self.spreads)

    def _read(self, owner: PyroModule | None) -> Any:
        return None if owner is None else getattr(owner, self.name.rpartition(".")[2])

    def posterior(self) -> Any:
        """Return the posterior in unconstrained space."""
        return self.factor.distribution(self.loc, self.spread).to_event(self.event_dim)

    def sample(self, posterior: Any) -> Tensor:
        """Draw the site from a posterior in unconstrained space, by statements of Pyro's; return its own value."""
        if self.transform is None:
            return pyro.sample(self.name, posterior)
        u = pyro.sample(f"{self.name}_unconstrained", posterior, infer={"is_auxiliary": True})
        value, event_dim = self.transform(u), self.prior.event_dim
        log_density = -self.transform.log_abs_det_jacobian(u, value)
        log_density = sum_rightmost(log_density, log_density.dim() - value.dim() + event_dim)
        return pyro.sample(self.name, TransformedValue(value, log_density=log_density, event_dim=event_dim))

    def constrained(self, u: Tensor) -> Tensor:
        """Return the site's own value, given an unconstrained one."""
        value: Tensor = u if self.transform is None else self.transform(u)
        return value


def owner_of(module: PyroModule, site: str) -> Any:
    """Return the submodule that holds the parameter of a site, or None."""
    *path, leaf = site.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, "_modules", {}).get(part)
    return owner if leaf in getattr(owner, "_pyro_params", {}) else None


def complete_loaded(
    loaded: Mapping[str, Any], site: str, fresh: Mapping[str, Tensor], event_dim: int, guide: str
) -> None:
    """Give loaded parameters the event dimension that only the model knows.

    Args:
        loaded: modules that hold the parameters, by kind (``"locs"``, ``"scales"``).
        site: name of the site.
        fresh: its initial parameters by kind, had none been loaded.
        event_dim: their event dimensions.
        guide: name of its class.

    Raises:
        GuideError: the loaded parameters belong to another posterior of the site.
    """
    leaf = site.rpartition(".")[2]
    # Means have any shape, as of a plate.
    found = {kind: tuple(getattr(owner, leaf).shape) for kind, owner in loaded.items() if kind != "locs"}
    expected = {kind: tuple(value.shape) for kind, value in fresh.items() if kind != "locs"}
    if found != expected:
        raise GuideError(
            f"the loaded state has spreads of shapes {found} for site {site!r}, where this guide has {expected}: build "
            f"{guide} with the options that it was saved with"
        )
    for owner in loaded.values():
        constraint, _ = owner._pyro_params[leaf]
        owner._pyro_params[leaf] = (constraint, event_dim)
