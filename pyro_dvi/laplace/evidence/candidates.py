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
from pyro_dvi.core.densities import is_of, mask_of, untransformed
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.errors import ArgumentError, ModelError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy, diagonal_of
from pyro_dvi.laplace.energy.precision import common_ratio
from pyro_dvi.laplace.evidence.evidence import free_terms
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
class FirstFit:
    """The Gaussian with the scales before tuning, from which others are converted.

    Attributes:
        energy: U with these scales.
        method: representation of the Gaussian.
        seed: random seed.
    """

    energy: Energy
    method: Method
    seed: int

    @cached_property
    def posterior(self) -> LaplacePosterior | None:
        """The Gaussian, if it exists and can be reweighted."""
        if not self.method.reweights:
            return None
        try:
            return self.method.fit(self.energy.at(self.energy.start), seed=self.seed)
        except NotPositiveDefiniteError:
            return None

    @cached_property
    def for_tuning(self) -> LaplacePosterior | None:
        """The same Gaussian, in a form that is quick to convert."""
        return None if self.posterior is None else self.posterior.for_tuning()

    @cached_property
    def product(self) -> Tensor:
        """The product of the likelihood's contribution to P with a probe."""
        return self.likelihood_product(self.energy.at(self.energy.start))

    def likelihood_product(self, local: LocalEnergy) -> Tensor:
        """Return the product of the likelihood's contribution to another P with the same probe."""
        probe = torch.randn(1, len(local.point), generator=torch.Generator().manual_seed(0)).to(local.point)
        return self.method.precision.product(local, probe) - local.prior_hessian(probe)

    @cached_property
    def has_constant_noise(self) -> bool:
        """Whether all observations have Normal noise with scales that do not depend on the latents."""
        run = self.energy.at(self.energy.start).first.run
        noise = [untransformed(site.fn) for site in run.sites]
        return not run.factors and all(is_of(fn, td.Normal) and not fn.scale.requires_grad for fn in noise)

    def likelihood_factor(self, local: LocalEnergy) -> float | None:
        """Return the ratio of another contribution of the likelihood to the first one; None if it is no number."""
        if self.has_constant_noise:
            names = [site.name for site in self.energy.at(self.energy.start).first.run.sites]
            before, after = (
                [energy.scale_factors.get(name, 1.0) for name in names]
                for energy in (self.energy, local.energy)
            )
            ratios = [(one / other) ** 2 for one, other in zip(before, after, strict=True)]
            if math.isclose(min(ratios), max(ratios)):
                return ratios[0]
        found = self.likelihood_product(local)
        factor = float((found * self.product).sum() / self.product.square().sum())
        rounding = math.sqrt(torch.finfo(found.dtype).eps)
        same = bool((found - factor * self.product).norm() <= rounding * found.norm())
        return factor if same and factor > 0 else None


@dataclass(frozen=True)
class Candidates:
    r"""Quantities at a fixed mode that depend on the tuned value, for criteria.

    One run of the model serves all values. The method is fitted only once for all scales if its Gaussian with precision
    :math:`G + \Pi` can be converted to the Gaussian with precision :math:`a G + \Pi_c`. Otherwise, it is fitted for
    each value.

    Attributes:
        energy: U at value 1.
        scale: the scale that is tuned.
        sites: the sites that change.
        first: the Gaussian before tuning, with other values of this scale and of other scales.
    """

    energy: Energy
    scale: Scale
    sites: Sequence[str]
    first: FirstFit

    def local(self, value: float) -> LocalEnergy:
        """Return U at the same mode for another value of the scale."""
        factors = dict.fromkeys(self.sites, self.scale.factor(value))
        energy = self.energy.with_factors({**self.energy.scale_factors, **factors})
        return energy.at(energy.start)

    @cached_property
    def here(self) -> LocalEnergy:
        """U at value 1."""
        return self.energy.at(self.energy.start)

    def log_likelihood(self, value: float) -> float:
        """Return the log-likelihood of all data at the mode."""
        if self.scale.of_prior or value == 1:
            return self.here.log_likelihood.item()
        if self._residuals is None:
            return self.local(value).log_likelihood.item()
        squares, count = self._residuals
        return self.log_likelihood(1.0) + 0.5 * (1 - value**-2) * squares - count * math.log(value)

    @cached_property
    def _residuals(self) -> tuple[float, float] | None:
        """The sums of :math:`z^2` and 1 over the standardised residuals z, if the noise is Normal."""
        squares = count = 0.0
        for graph in self.here.graphs():
            for site in graph.run.sites:
                if site.name not in self.sites:
                    continue
                base, weight = untransformed(site.fn), torch.as_tensor(site.scale)
                if not is_of(base, td.Normal) or weight.numel() > 1:
                    return None
                z = ((site.value - base.loc) / base.scale).detach()
                kept = mask_of(site.fn, site.mask)
                z = z.expand(site.fn.batch_shape + site.fn.event_shape)
                z = z if kept is None else z[kept.expand_as(z)]
                squares += float(weight * z.square().sum(dtype=widest(z.device)))
                count += float(weight) * z.numel()
        return squares, count

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
        """Whether another value multiplies the likelihood's contribution to P by the factor of the scale."""
        if self.scale.of_prior:
            return True
        one, other = (self.first.likelihood_factor(self.local(v)) for v in (1.0, _ANOTHER))
        factor = self.scale.proportions(_ANOTHER)[0]
        return one is not None and other is not None and math.isclose(other, factor * one, rel_tol=1e-3)

    @cached_property
    def _likelihood_factor(self) -> float | None:
        """The likelihood's contribution to P at value 1, relative to that before tuning; None if it is no multiple."""
        known = self.energy.scale_factors == self.first.energy.scale_factors
        return 1.0 if known else self.first.likelihood_factor(self.here)

    def posterior(self, value: float) -> LaplacePosterior:
        """Return the Gaussian.

        Raises:
            NotPositiveDefiniteError: the precision is not positive definite.
        """
        return self._converted(self.first.for_tuning, value) or self.chosen(value)

    def chosen(self, value: float) -> LaplacePosterior:
        """Return the Gaussian in the form in which the method fits it.

        Raises:
            NotPositiveDefiniteError: the precision is not positive definite.
        """
        found = self._converted(self.first.posterior, value)
        return found or self.first.method.fit(self.local(value), seed=self.first.seed)

    def _converted(self, fitted: LaplacePosterior | None, value: float) -> LaplacePosterior | None:
        """Return the Gaussian, converted from the first fit; None if it needs a fit of its own."""
        if fitted is None or not self.likelihood_is_proportional or self._likelihood_factor is None:
            return None
        prior = self.prior_diagonal(value)
        factor = self._likelihood_factor * self.scale.proportions(value)[0]
        return None if prior is None else fitted.reweighted(factor, prior)
