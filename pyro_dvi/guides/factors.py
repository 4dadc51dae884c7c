# SPDX-License-Identifier: Apache-2.0
"""The posterior of one site: its family, the parameterisation of its scales, and where its parameters are stored."""

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
    """Positive numbers whose logarithm the optimizer updates.

    Torch's own transform to positive numbers adds zero and multiplies by one after the exponential. This costs two
    passes over all weights in every step, and a third one in the backward pass.
    """


exp_positive = _ExpPositive(0.0)
_EXP = ExpTransform()


@transform_to.register(_ExpPositive)
def _to_exp_positive(constraint: _ExpPositive) -> ExpTransform:
    return _EXP


class ScaleFamily(ABC):
    """A parameterisation of posterior standard deviations.

    To add one, define the shape in which the learned scales of a site are stored, or set ``learned`` to False if the
    scales are fixed.
    """

    learned: ClassVar[bool] = True

    @abstractmethod
    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        """Return the initial scales of a site, in the shape in which they are stored.

        Args:
            loc: the site's initial mean, in unconstrained space.
            prior_scale: standard deviation of the site's prior, broadcastable to ``loc``.
            event_dim: number of event dimensions of ``loc``; dimensions to their left belong to plates.
        """


@dataclass(frozen=True)
class PerWeight(ScaleFamily):
    r"""One standard deviation per weight, initially :math:`\log\sigma = \log s - 3`.

    Args:
        log_offset: initial :math:`\log(\sigma/s)`, where s is the standard deviation of the prior.

    Source: Unlu & Aitchison (2021), section 4.
    """

    log_offset: float = -3.0

    def __post_init__(self) -> None:
        if not -20 <= self.log_offset <= 5:
            raise ArgumentError(
                f"log_offset, an initial log ratio of scales, must be between -20 and 5, got {self.log_offset}: try -3"
            )

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        return (prior_scale * torch.full_like(loc, self.log_offset).exp()).contiguous()


class PerSite(PerWeight):
    r"""One standard deviation shared by all weights of a site; for local latents, one per plate element.

    Args:
        log_offset: initial :math:`\log(\sigma/s)`, where s is the mean standard deviation of the prior over the site.
    """

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        axes = tuple(range(loc.dim() - event_dim, loc.dim()))
        scales = super().initial(loc, prior_scale, event_dim)
        return scales.mean(axes, keepdim=True) if axes else scales


@dataclass(frozen=True)
class SGDStepSize(ScaleFamily):
    r"""One fixed variance for all weights, the stationary variance of SGD: :math:`\sigma^2 = \eta / 2M`.

    With this family and ``TaylorELBO(curvature=MinibatchGradient())``, only the means are learned. The objective is
    :math:`\tfrac NM[\log p - \tfrac{\eta}{4M}\sum_\lambda g_\lambda^2] - \beta\,\mathrm{(weight\ decay)}`, where g is
    the gradient summed over the minibatch.

    Args:
        lr: step size :math:`\eta` of SGD on the mean loss.
        batch_size: number of examples M in a minibatch.

    Source: Unlu & Aitchison (2021), Eq. 29 (arXiv), where the objective is written with the mean gradient
    :math:`g / M`.
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
    """The posterior of one site in unconstrained space: a mean and, in most families, a spread parameter.

    To add a factor, define where its spread is stored, the initial value of the spread, and the distribution.
    """

    @property
    def store(self) -> str | None:
        """Attribute of the guide that holds the spread of each site; None if only the mean is learned."""
        return None

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        """Return the initial spread, in the shape in which it is stored.

        Args:
            loc: the initial mean.
            prior_scale: standard deviation of the prior, broadcastable to ``loc``.
            event_dim: number of event dimensions of ``loc``; dimensions to their left belong to plates.
        """
        raise NotImplementedError

    @abstractmethod
    def distribution(self, loc: Tensor, spread: Tensor | None) -> Any:
        """Return the posterior, without event dimensions and, to save time in each step, without validation."""


@dataclass(frozen=True)
class MeanField(Factor):
    r"""Independent Gaussians :math:`\mathcal N(\mu_\lambda, \sigma_\lambda^2)`.

    Args:
        scale: the covariance family, as in :class:`~pyro_dvi.MeanFieldGuide`.

    Raises:
        ArgumentError: ``scale`` is not a covariance family.
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
    """A point mass: only the value is learned. It adds the log prior density of the value to the ELBO."""

    def distribution(self, loc: Tensor, spread: Tensor | None) -> dist.Delta:
        # A single zero; by default, Pyro would make one for each weight.
        return dist.Delta(loc, loc.new_zeros(()), validate_args=False)


class TransformedValue(dist.Delta):
    """The value of a constrained site: a point mass whose log density is the log Jacobian of the transform.

    Pyro's KL divergence of a point mass ignores its log density, so ``TraceMeanField_ELBO`` would omit the Jacobian.
    """


@td.register_kl(TransformedValue, Distribution)
def _divergence(p: TransformedValue, q: Any) -> Tensor:
    divergence: Tensor = p.log_density - q.log_prob(p.v)
    return divergence


@dataclass(frozen=True, eq=False)
class GuideSite:
    """The posterior of one latent site of the model.

    Attributes:
        name: name of the site in the model.
        prior: the prior distribution of the site in the first run of the model.
        transform: transform from unconstrained to constrained values; None for the identity.
        event_dim: number of event dimensions of an unconstrained value; dimensions to their left belong to plates.
        plates: names of the plates around the site.
        factor: the family of the site's posterior.
        means: the module that holds its mean.
        spreads: the module that holds its spread parameter; None if only the mean is learned.
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
        """The mean, read through a Pyro statement if a handler is active."""
        value: Tensor = self._read(self.means)
        return value

    @property
    def spread(self) -> Any:
        """The spread parameter, read like the mean; None if only the mean is learned."""
        return self._read(self.spreads)

    def _read(self, owner: PyroModule | None) -> Any:
        return None if owner is None else getattr(owner, self.name.rpartition(".")[2])

    def posterior(self) -> Any:
        """Return the posterior in unconstrained space."""
        return self.factor.distribution(self.loc, self.spread).to_event(self.event_dim)

    def sample(self, posterior: Any) -> Tensor:
        """Sample the site from an unconstrained posterior with Pyro statements; return the constrained value."""
        if self.transform is None:
            return pyro.sample(self.name, posterior)
        u = pyro.sample(f"{self.name}_unconstrained", posterior, infer={"is_auxiliary": True})
        value, event_dim = self.transform(u), self.prior.event_dim
        log_density = -self.transform.log_abs_det_jacobian(u, value)
        log_density = sum_rightmost(log_density, log_density.dim() - value.dim() + event_dim)
        return pyro.sample(self.name, TransformedValue(value, log_density=log_density, event_dim=event_dim))

    def constrained(self, u: Tensor) -> Tensor:
        """Map an unconstrained value to a constrained one."""
        value: Tensor = u if self.transform is None else self.transform(u)
        return value


def owner_of(module: PyroModule, site: str) -> Any:
    """Return the submodule that holds the parameter of a site; None if there is none."""
    *path, leaf = site.split(".")
    owner: Any = module
    for part in path:
        owner = getattr(owner, "_modules", {}).get(part)
    return owner if leaf in getattr(owner, "_pyro_params", {}) else None


def complete_loaded(
    loaded: Mapping[str, Any], site: str, fresh: Mapping[str, Tensor], event_dim: int, guide: str
) -> None:
    """Give loaded parameters their event dimensions, which only the model knows.

    Args:
        loaded: modules that hold the parameters, by kind of parameter (``"locs"``, ``"scales"``).
        site: name of the site.
        fresh: the parameters that a new guide would start with, by kind.
        event_dim: number of their event dimensions.
        guide: name of the guide's class.

    Raises:
        GuideError: the loaded parameters belong to another kind of posterior.
    """
    leaf = site.rpartition(".")[2]
    # Means may have any shape, for example of another plate size.
    found = {kind: tuple(getattr(owner, leaf).shape) for kind, owner in loaded.items() if kind != "locs"}
    expected = {kind: tuple(value.shape) for kind, value in fresh.items() if kind != "locs"}
    if found != expected:
        raise GuideError(
            f"for the scales of site {site!r}, the loaded state has parameters of shapes {found}, but this guide has "
            f"{expected}: construct {guide} with the same options as when the state was saved"
        )
    for owner in loaded.values():
        constraint, _ = owner._pyro_params[leaf]
        owner._pyro_params[leaf] = (constraint, event_dim)
