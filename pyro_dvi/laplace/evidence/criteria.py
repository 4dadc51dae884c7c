# SPDX-License-Identifier: Apache-2.0
"""What makes one value of a scale better than another: the evidence, or predictions of data that were held out."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_dvi.choice import check_choice
from pyro_dvi.errors import ArgumentError, DataError, NotPositiveDefiniteError, UnsupportedError
from pyro_dvi.handlers.log_joint import JointRun, run_joint
from pyro_dvi.handlers.rescaled import rescaled
from pyro_dvi.laplace.energy.batch_graph import BatchGraph
from pyro_dvi.laplace.energy.energy import Energy, diagonal_of
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.evidence.evidence import Determinant, check_untempered, default_determinant, free_terms
from pyro_dvi.laplace.evidence.tuning import Criterion, Tuning
from pyro_dvi.laplace.methods.posterior import LaplacePosterior
from pyro_dvi.laplace.outputs import GaussianOutputs
from pyro_dvi.links import ClassLink, GaussHermite, NoiseLink, Probit
from pyro_dvi.links.outputs import integrated
from pyro_dvi.undisturbed import evaluating

__all__ = ["ByEvidence", "ByValidation", "Candidates"]


class Candidates:
    r"""What depends on the value that is tuned, around a mode that does not.

    The model runs once for the priors of all values. The method fits once where its Gaussian, of precision
    :math:`G + \Pi`, can be made that of :math:`a G + \Pi_c`, and again for each value elsewhere.

    Args:
        tuning: what varies.
    """

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning
        with torch.enable_grad():
            self._values, self._run = tuning.energy.first_run(tuning.energy.start)

    def energy(self, value: float) -> Energy:
        """Return U."""
        return self.tuning.candidate(value)

    def log_prior(self, value: float) -> float:
        """Return the log prior of the sites that vary."""
        with torch.enable_grad():
            return free_terms(self._values, self._prior_run(value), self.tuning.energy.layout)

    def prior_diagonal(self, value: float) -> Tensor | None:
        """Return the prior precision [D]; None unless it is diagonal and positive."""
        energy = self.tuning.energy
        with torch.enable_grad():
            graph = BatchGraph(self._values, self._prior_run(value))

            def product(vectors: Tensor) -> Tensor:
                return energy.layout.flatten(graph.prior_hessian(energy.layout.split(vectors)))

            return diagonal_of(product, energy.start)

    def prior_is_proportional(self, value: float = 4.0) -> bool:
        """Whether all of the prior precision is multiplied by a number."""
        before, after = self.prior_diagonal(1.0), self.prior_diagonal(value)
        if before is None or after is None:
            return False
        return _close(after, self.tuning.scale.proportions(value)[1] * before)

    @cached_property
    def likelihood_is_proportional(self) -> bool:
        """Whether the likelihood's part of P is multiplied by a number, seen by one product."""
        value = 4.0
        factor = self.tuning.scale.proportions(value)[0]
        if factor == 1:
            return True  # the scale of a prior, which is no part of the likelihood
        before, after = (
            self._likelihood_product(energy) for energy in (self.energy(1.0), self.energy(value))
        )
        return _close(after, factor * before)

    def posterior(self, value: float) -> LaplacePosterior:
        """Return the Gaussian.

        Raises:
            NotPositiveDefiniteError: there is none.
        """
        if self._fitted is not None and self.likelihood_is_proportional:
            prior = self.prior_diagonal(value)
            if prior is not None:
                try:
                    return self._fitted.reweighted(self.tuning.scale.proportions(value)[0], prior)
                except UnsupportedError:
                    pass
        candidate = self.energy(value)
        return self.tuning.method.fit(candidate.at(candidate.start), seed=self.tuning.seed)

    @cached_property
    def _fitted(self) -> LaplacePosterior | None:
        """The Gaussian of value 1, if it exists and can become that of another."""
        method, energy = self.tuning.method, self.tuning.energy
        if not method.reweights:
            return None
        try:
            return method.fit(energy.at(energy.start), seed=self.tuning.seed)
        except NotPositiveDefiniteError:
            return None

    def _prior_run(self, value: float) -> JointRun:
        """The run with other scales: values of sites are given, so that only their own densities change."""
        terms = dict(self._run.log_priors)
        factor = self.tuning.scale.factor(value)
        for name in self.tuning.sites:
            if factor != 1 and name in terms:
                node = self._run.trace.nodes[name]
                log_prob = rescaled(name, node["fn"], factor).log_prob(node["value"])
                # Of real numbers, which need no transform.
                terms[name] = scale_and_mask(log_prob, node["scale"], node["mask"]).sum()
        return replace(self._run, log_priors=terms)

    def _likelihood_product(self, energy: Energy) -> Tensor:
        local = energy.at(energy.start)
        probe = torch.randn(local.point.shape, generator=torch.Generator().manual_seed(0)).to(local.point)[
            None
        ]
        return self.tuning.method.curvature.product(local, probe) - local.prior_hessian(probe)


def _close(found: Tensor, expected: Tensor) -> bool:
    tolerance = math.sqrt(torch.finfo(found.dtype).eps)
    return float((found - expected).norm()) <= tolerance * float(expected.norm())


@dataclass(frozen=True)
class ByEvidence(Criterion):
    r"""The log evidence, with the mode kept fixed.

    .. math:: \log p_c(D) \approx \log p(D \mid \hat u) + \log p_c(\hat u) + \tfrac D2 \log 2\pi
        - \tfrac12 \log\det(G + \Pi_c)

    The determinant is that of the precision which the method predicts with: of the diagonal for ``Diagonal()``, of the
    Kronecker factors for ``KroneckerFactored()``, of the directions that are kept for ``TopEigen(k)``; these fit once
    for all values where their Gaussian allows it. For methods whose precision is the matrix itself, a common multiplier
    of all priors, and the scale of a constant Gaussian noise, need its eigenvalues once; anything else needs them for
    each value.

    Status: Laplace's approximation for the mode as it is, which is no mode for another c; train again, or polish, with
    the scale that was found, and repeat, for a joint optimum.

    Args:
        determinant: ``Exactly()`` or ``ByLanczos(probes, steps)`` of the matrix itself, whatever the method makes of
            it. None: that of the method; where its precision is the matrix itself, exactly up to D = 1,000, and by
            Lanczos beyond.

    Source: MacKay (1992); Immer et al. (2021), "Scalable marginal likelihood estimation".
    """

    determinant: Determinant | None = None

    def score(self, tuning: Tuning) -> Callable[[float], float]:
        """Return the log evidence in nats."""
        energy = tuning.energy
        check_untempered(energy)
        candidates = Candidates(tuning)
        log_determinant = self._log_determinant(candidates)
        likelihood_changes = tuning.scale.proportions(2.0)[0] != 1
        log_likelihood = float(energy.log_joint(energy.start)[0])
        constant = 0.5 * energy.layout.size * math.log(2 * math.pi)

        def score(value: float) -> float:
            fit = log_likelihood
            if likelihood_changes:
                fit = float(candidates.energy(value).log_joint(energy.start)[0])
            return fit + candidates.log_prior(value) + constant - 0.5 * log_determinant(value)

        return score

    def _log_determinant(self, candidates: Candidates) -> Callable[[float], float]:
        tuning = candidates.tuning
        if self.determinant is None and not tuning.method.exact:
            return lambda value: float(candidates.posterior(value).log_determinant())
        energy, curvature = tuning.energy, tuning.method.curvature
        determinant = (
            default_determinant(energy.layout.size) if self.determinant is None else self.determinant
        )
        check_choice("determinant", determinant, Determinant, "Exactly() or ByLanczos()")
        spectrum = determinant.spectrum(energy.at(energy.start), curvature)
        proportional = (
            spectrum.log_prior_determinant is not None
            and candidates.prior_is_proportional()
            and candidates.likelihood_is_proportional
        )

        def of(value: float) -> float:
            if proportional:
                return spectrum.log_determinant(*tuning.scale.proportions(value)).value
            candidate = candidates.energy(value)
            return determinant.spectrum(candidate.at(candidate.start), curvature).log_determinant().value

        return of


@dataclass(frozen=True)
class ByValidation(Criterion):
    r"""The mean log predictive density of data that were held out, for ``guide.tune``.

    .. math:: \frac1M \sum_{j} \log \int p(y_j \mid f)\, \mathcal N\bigl(f; f(x_j; \hat u), J_j P^{-1} J_j^\top\bigr)\,
        \mathrm df

    Each value that is tried costs a prediction, and a fit unless the Gaussian can take another prior or noise:
    ``Diagonal()``, ``KroneckerFactored()`` and ``TopEigen(k)`` fit once for a multiplier of all priors, ``Dense()``
    builds its matrix once and factorises it for each value.

    Status: as :class:`~pyro_dvi.predictive.Linearised`, whose predictions are scored.

    Args:
        batches: held-out data, positional arguments of the model with the observations.
        link: from Gaussian logits to class probabilities.
        noise: from an uncertain noise scale to a predictive.
        num_points: Sobol points where there is no closed form.
        site: the observed site that is predicted; None for the one that the model has.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi.laplace import LaplaceGuide
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.linspace(-2, 2, 5)
        >>> guide = LaplaceGuide(model)
        >>> guide.initialize(x, x)
        >>> _ = guide.polish([(x, x)], progress=False)
        >>> held_out = [(x[[0, 4]], torch.tensor([-2.9, 2.9]))]
        >>> curve = guide.tune([(x, x)], criterion=ByValidation(held_out), values=[1.0, 10.0, 100.0], progress=False)
        >>> round(curve.best, -1)
        10.0
    """

    batches: Iterable[Any] = field(repr=False)
    link: ClassLink = field(default_factory=Probit)
    noise: NoiseLink = field(default_factory=lambda: GaussHermite(20))
    num_points: int = 256
    site: str | None = None

    def score(self, tuning: Tuning) -> Callable[[float], float]:
        """Return the mean log predictive density as a function of the value."""
        passes = Passes(self.batches, tuning.energy.start.device)
        candidates = Candidates(tuning)

        def score(value: float) -> float:
            candidate, posterior = candidates.energy(value), candidates.posterior(value)
            total, count = 0.0, 0
            for args, kwargs in passes:
                if kwargs:
                    raise ArgumentError(
                        "validation batches are tuples of positional arguments, such as (x, y), not mappings"
                    )
                log_density = self._log_density(candidate, args, posterior)
                total, count = total + float(log_density.sum()), count + log_density.numel()
            return total / count

        return score

    @torch.no_grad()
    def _log_density(self, energy: Energy, args: tuple, posterior: LaplacePosterior) -> torch.Tensor:
        """Log predictive density of every observation of a batch that is not masked."""
        query = Query(energy.model, args, energy.locs, energy.layout, site=self.site)
        gaussian = GaussianOutputs.of(posterior, query)
        distribution = integrated(
            gaussian.outputs, gaussian.full_covariance, self.link, self.noise, self.num_points
        )
        with evaluating(energy.model):
            run = run_joint(energy.model, args, {}, energy.locs)
        found = [site for site in run.sites if site.name == gaussian.outputs.site]
        if not found:
            raise DataError("validation batches need the observations as well: (x, y)")
        (site,) = found
        log_density: torch.Tensor = distribution.log_prob(site.value)
        if site.mask is not None and site.mask is not True:
            log_density = log_density[torch.as_tensor(site.mask).expand_as(log_density)]
        return log_density
