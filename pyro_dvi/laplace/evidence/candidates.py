# SPDX-License-Identifier: Apache-2.0
"""Scales of priors and noise to tune after training, and quantities that depend on their values."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, distributions as td

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.core.densities import is_of, untransformed
from pyro_dvi.errors import ArgumentError, ModelError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy, diagonal_of
from pyro_dvi.laplace.energy.precision import common_ratio
from pyro_dvi.laplace.evidence.evidence import free_terms
from pyro_dvi.laplace.fitted import rescaled_model
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method
from pyro_dvi.runs.log_joint import scale_name


class Scale(ABC):
    """A positive multiplier in the model, to be tuned.

    Attributes:
        exponent: the scale of the sites' distributions is multiplied by the value to this power.
        of_prior: whether the value changes the contribution of the prior to P, not that of the likelihood.
        grid: default values to try.
    """

    exponent: ClassVar[float]
    of_prior: ClassVar[bool]
    grid: ClassVar[Tensor]

    @abstractmethod
    def sites(self, energy: Energy) -> list[str]:
        """Return the sites whose distributions change; :func:`~pyro_dvi.runs.log_joint.rescaled` must support them."""

    def factor(self, value: float) -> float:
        """Return the factor of the scales of these sites."""
        return value**self.exponent

    def proportions(self, value: float) -> tuple[float, float]:
        """Return the factors of the likelihood's and the prior's contributions to P, if all sites of a kind change."""
        precision = value ** (-2 * self.exponent)
        return (1.0, precision) if self.of_prior else (precision, 1.0)


@dataclass(frozen=True)
class PriorPrecision(Scale):
    """A factor of the prior precision, shared by several sites.

    Args:
        names: the sites, by name or pattern (``"net.0.*"``). None means all sites of the fit whose prior is Normal,
            MultivariateNormal, StudentT, Laplace or Cauchy.
    """

    names: str | None = None

    exponent, of_prior, grid = -0.5, True, torch.logspace(-3, 3, 25, dtype=torch.float64)

    def sites(self, energy: Energy) -> list[str]:
        """Return the latent sites.

        Raises:
            ArgumentError: the pattern matches no such site.
        """
        nodes, varying = energy.at(energy.start).first.run.trace.nodes, energy.layout.names
        scalable = [name for name in varying if scale_name(nodes[name]["fn"]) is not None]
        chosen = scalable if self.names is None else [n for n in varying if fnmatchcase(n, self.names)]
        if not chosen:
            raise ArgumentError(f"{self} matches no prior with a scale; the sites of the fit are {varying}")
        return chosen


@dataclass(frozen=True)
class NoiseScale(Scale):
    """A factor of the scale of the observation noise.

    Args:
        site: name of the observed site, whose distribution is Normal, MultivariateNormal, StudentT, Laplace or Cauchy;
            None for the only observed site.
    """

    site: str | None = None

    exponent, of_prior, grid = 1.0, False, torch.logspace(-1, 1, 17, dtype=torch.float64)

    def sites(self, energy: Energy) -> list[str]:
        """Return the observed site.

        Raises:
            ModelError: the model has no such site, or has several and ``site`` is None.
        """
        found = energy.at(energy.start).first.run.sites
        observed = [site.name for site in found if self.site in (None, site.name)]
        if len(observed) != 1:
            raise ModelError(
                f"NoiseScale(site) needs one observed site whose distribution has a scale, got {observed or None}"
            )
        return observed


def check_scales(name: str, scales: Sequence[object]) -> None:
    """Raise an error for objects that are not scales."""
    for scale in scales:
        check_choice(name, scale, Scale, "PriorPrecision('net.0.*') or NoiseScale()")


_ANOTHER = 4.0  # an arbitrary value to compare with 1


@dataclass(frozen=True)
class Candidates:
    r"""Quantities at a fixed mode that depend on the tuned value, for criteria.

    For independent Normal priors, one run of the model serves all values. For other priors, the model is run on the
    first batch for each value. The method is fitted only once if its Gaussian with precision :math:`G + \Pi` can be
    converted to the Gaussian with precision :math:`a G + \Pi_c`. Otherwise, it is fitted for each value.

    Attributes:
        energy: U at value 1.
        scale: the scale that is tuned.
        sites: the sites that change.
        method: representation of the Gaussian.
        seed: random seed.
    """

    energy: Energy
    scale: Scale
    sites: Sequence[str]
    method: Method
    seed: int

    def local(self, value: float) -> LocalEnergy:
        """Return U at the same mode for another value of the scale."""
        factors = dict.fromkeys(self.sites, self.scale.factor(value))
        energy = self.energy.with_model(rescaled_model(self.energy.model, factors))
        return energy.at(energy.start)

    @cached_property
    def here(self) -> LocalEnergy:
        """U at value 1."""
        return self.energy.at(self.energy.start)

    def log_prior(self, value: float) -> float:
        """Return the log prior of the latents that vary."""
        changes = value != 1 and self.scale.of_prior
        if changes and self.here.prior_diagonal is not None and self._normal is not None:
            _, squares, count = self._normal
            return self.log_prior(1.0) + 0.5 * count * math.log(value) - 0.5 * (value - 1) * squares
        graph = (self.local(value) if changes else self.here).first
        return free_terms(graph.values, graph.run, self.energy.layout).item()

    @property
    def prior_is_proportional(self) -> bool:
        """Whether another value multiplies the whole prior precision by one factor."""
        before, after = self.prior_diagonal(1.0), self.prior_diagonal(_ANOTHER)
        return before is not None and after is not None and common_ratio(after, before) is not None

    def prior_diagonal(self, value: float) -> Tensor | None:
        """Return the prior precision [D]; None unless it is diagonal and positive."""
        known = self.here.prior_diagonal
        if value == 1 or not self.scale.of_prior:
            return known
        if known is not None and self._normal is not None:
            return known + (value - 1) * self.energy.prior_weight * self._normal[0]
        return diagonal_of(self.local(value).first.prior_hessian, self.energy.start)

    @cached_property
    def _normal(self) -> tuple[Tensor, float, float] | None:
        """The changing part of the prior precision, and the sums of :math:`z^2` and 1 over its standardised latents z.

        These exist only for independent Normal priors, whose log density depends on the value in closed form.
        """
        layout, nodes = self.energy.layout, self.here.first.run.trace.nodes
        parts = [{name: torch.zeros_like(loc) for name, loc in self.energy.locs.items()} for _ in range(3)]
        for name in self.sites:
            node, base = nodes[name], untransformed(nodes[name]["fn"])
            if not is_of(base, td.Normal) or node["mask"] is not None:
                return None
            weight, z = node["scale"], (node["value"] - base.loc) / base.scale
            for part, found in zip(parts, (weight / base.scale**2, weight * z**2, weight), strict=True):
                part[name] = part[name] + found
        precision, squares, count = (layout.flatten(layout.pieces(part)).detach() for part in parts)
        return precision, float(squares.cpu().double().sum()), float(count.cpu().double().sum())

    @cached_property
    def likelihood_is_proportional(self) -> bool:
        """Whether another value multiplies the likelihood's contribution to P by one factor."""
        if self.scale.of_prior:
            return True
        factor = self.scale.proportions(_ANOTHER)[0]
        found, expected = self._likelihood_product(_ANOTHER), factor * self._likelihood_product(1.0)
        return bool((found - expected).norm() <= math.sqrt(torch.finfo(found.dtype).eps) * expected.norm())

    def posterior(self, value: float) -> LaplacePosterior:
        """Return the Gaussian.

        Raises:
            NotPositiveDefiniteError: the precision is not positive definite.
        """
        return self.reweighted(value) or self.method.fit(self.local(value), seed=self.seed)

    def reweighted(self, value: float) -> LaplacePosterior | None:
        """Return the Gaussian, converted from the fit at value 1; None if it needs a fit of its own.

        Raises:
            NotPositiveDefiniteError: the precision is not positive definite.
        """
        if self.fitted is None or not self.likelihood_is_proportional:
            return None
        prior = self.prior_diagonal(value)
        return None if prior is None else self.fitted.reweighted(self.scale.proportions(value)[0], prior)

    @cached_property
    def fitted(self) -> LaplacePosterior | None:
        """The Gaussian at value 1, if it exists and can be reweighted for other values."""
        if not self.method.reweights:
            return None
        try:
            return self.method.fit(self.here, seed=self.seed)
        except NotPositiveDefiniteError:
            return None

    def _likelihood_product(self, value: float) -> Tensor:
        local = self.local(value)
        probe = torch.randn(1, len(local.point), generator=torch.Generator().manual_seed(0)).to(local.point)
        return self.method.precision.product(local, probe) - local.prior_hessian(probe)
