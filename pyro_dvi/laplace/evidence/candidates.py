# SPDX-License-Identifier: Apache-2.0
"""Scales of priors and noise that are tuned after training, and quantities that depend on their values."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import ClassVar

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_dvi.errors import ArgumentError, ModelError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.batch_graph import BatchGraph
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy, diagonal_of
from pyro_dvi.laplace.energy.precision import common_ratio
from pyro_dvi.laplace.evidence.evidence import free_terms
from pyro_dvi.laplace.fitted import rescaled_model
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method
from pyro_dvi.runs.log_joint import JointRun, rescaled, scale_name


class Scale(ABC):
    """A positive number that multiplies something in the model, to be tuned.

    Attributes:
        exponent: power of the number that multiplies the scale of the sites' distributions.
        of_prior: the number changes the prior's part of P, not the likelihood's.
        grid: the values to try by default.
    """

    exponent: ClassVar[float]
    of_prior: ClassVar[bool]
    grid: ClassVar[Tensor]

    @abstractmethod
    def sites(self, energy: Energy) -> list[str]:
        """Return the sites whose distributions change; :func:`~pyro_dvi.runs.log_joint.rescaled` refuses others."""

    def factor(self, value: float) -> float:
        """Return the factor of the scale of these sites."""
        return value**self.exponent

    def proportions(self, value: float) -> tuple[float, float]:
        """Return the factors of the likelihood's and the prior's part of P, if all sites of a kind change."""
        precision = value ** (-2 * self.exponent)
        return (1.0, precision) if self.of_prior else (precision, 1.0)


@dataclass(frozen=True)
class PriorPrecision(Scale):
    """The precision of the prior, times one number for several sites.

    Args:
        names: the sites, by name or pattern (``"net.0.*"``); None: all uncertain sites whose prior is Normal,
            MultivariateNormal, StudentT, Laplace or Cauchy.
    """

    names: str | None = None

    exponent, of_prior, grid = -0.5, True, torch.logspace(-3, 3, 25, dtype=torch.float64)

    def sites(self, energy: Energy) -> list[str]:
        """Return the latent sites.

        Raises:
            ArgumentError: the pattern fits no site that is uncertain.
        """
        nodes, varying = energy.first_run(energy.start)[1].trace.nodes, energy.layout.names
        scalable = [name for name in varying if scale_name(nodes[name]["fn"]) is not None]
        chosen = scalable if self.names is None else [n for n in varying if fnmatchcase(n, self.names)]
        if not chosen:
            raise ArgumentError(
                f"{self} matches no uncertain site whose prior has a scale; the uncertain sites are {varying}"
            )
        return chosen


@dataclass(frozen=True)
class NoiseScale(Scale):
    """The scale of the observation noise, times a number.

    Args:
        site: the observed site, a Normal, MultivariateNormal, StudentT, Laplace or Cauchy; None for the only
            observed site.
    """

    site: str | None = None

    exponent, of_prior, grid = 1.0, False, torch.logspace(-1, 1, 17, dtype=torch.float64)

    def sites(self, energy: Energy) -> list[str]:
        """Return the observed site.

        Raises:
            ModelError: there is no such site, or several to choose from.
        """
        found = energy.first_run(energy.start)[1].sites
        observed = [site.name for site in found if self.site in (None, site.name)]
        if len(observed) != 1:
            raise ModelError(
                f"NoiseScale(site) needs one observed site with a scale; there is {observed or 'none'}"
            )
        return observed


_ANOTHER = 4.0  # a value to compare with 1


@dataclass(frozen=True)
class Candidates:
    r"""Quantities that depend on the tuned value, around a fixed mode; criteria compare values by these.

    The model runs once for the priors of all values. The method fits once where its Gaussian of precision
    :math:`G + \Pi` can be turned into the Gaussian of :math:`a G + \Pi_c`, and for each value otherwise.

    Attributes:
        energy: U with value 1.
        scale: the scale that is tuned.
        sites: the sites that change.
        method: how the Gaussian is represented.
        seed: of random numbers.
    """

    energy: Energy
    scale: Scale
    sites: Sequence[str]
    method: Method
    seed: int

    def local(self, value: float) -> LocalEnergy:
        """Return U with another value of the scale around the same mode."""
        factors = dict.fromkeys(self.sites, self.scale.factor(value))
        energy = self.energy.with_model(rescaled_model(self.energy.model, factors))
        return energy.at(energy.start)

    def log_prior(self, value: float) -> float:
        """Return the log prior of the sites that vary."""
        with torch.enable_grad():
            return free_terms(self._first[0], self._prior_run(value), self.energy.layout)

    @property
    def prior_is_proportional(self) -> bool:
        """Another value multiplies the whole prior precision by one number."""
        before, after = self.prior_diagonal(1.0), self.prior_diagonal(_ANOTHER)
        return before is not None and after is not None and common_ratio(after, before) is not None

    def prior_diagonal(self, value: float) -> Tensor | None:
        """Return the prior precision [D]; None unless it is diagonal and positive."""
        with torch.enable_grad():
            graph = BatchGraph(self.energy.layout, self._first[0], self._prior_run(value))
            return diagonal_of(graph.prior_hessian, self.energy.start)

    @cached_property
    def likelihood_is_proportional(self) -> bool:
        """Another value multiplies the likelihood's part of P by one number, as one product shows."""
        if self.scale.of_prior:
            return True
        factor = self.scale.proportions(_ANOTHER)[0]
        found, expected = self._likelihood_product(_ANOTHER), factor * self._likelihood_product(1.0)
        return bool((found - expected).norm() <= math.sqrt(torch.finfo(found.dtype).eps) * expected.norm())

    def posterior(self, value: float) -> LaplacePosterior:
        """Return the Gaussian.

        Raises:
            NotPositiveDefiniteError: there is none.
        """
        return self.reweighted(value) or self.method.fit(self.local(value), seed=self.seed)

    def reweighted(self, value: float) -> LaplacePosterior | None:
        """Return the Gaussian, made from the fit at value 1; None where it needs a fit of its own.

        Raises:
            NotPositiveDefiniteError: there is none.
        """
        if self.fitted is None or not self.likelihood_is_proportional:
            return None
        prior = self.prior_diagonal(value)
        return None if prior is None else self.fitted.reweighted(self.scale.proportions(value)[0], prior)

    @cached_property
    def _first(self) -> tuple[list[Tensor], JointRun]:
        with torch.enable_grad():
            return self.energy.first_run(self.energy.start)

    @cached_property
    def fitted(self) -> LaplacePosterior | None:
        """The Gaussian of value 1, if it exists and can be reweighted for other values."""
        if not self.method.reweights:
            return None
        try:
            return self.method.fit(self.energy.at(self.energy.start), seed=self.seed)
        except NotPositiveDefiniteError:
            return None

    def _prior_run(self, value: float) -> JointRun:
        """Return the run with other scales; the values of sites are given, so that only their own densities change."""
        _, run = self._first
        terms, trace = dict(run.log_priors), run.trace.copy()
        factor = self.scale.factor(value)
        for name in self.sites:
            if factor != 1 and name in terms:
                node = run.trace.nodes[name]
                trace.nodes[name] = {**node, "fn": rescaled(name, node["fn"], factor)}
                log_prob = trace.nodes[name]["fn"].log_prob(node["value"])
                # Sites with a scale are real and need no transform.
                terms[name] = scale_and_mask(log_prob, node["scale"], node["mask"]).sum()
        return replace(run, log_priors=terms, trace=trace)

    def _likelihood_product(self, value: float) -> Tensor:
        local = self.local(value)
        probe = torch.randn(1, len(local.point), generator=torch.Generator().manual_seed(0)).to(local.point)
        return self.method.precision.product(local, probe) - local.prior_hessian(probe)
