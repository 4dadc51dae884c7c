# SPDX-License-Identifier: Apache-2.0
"""What makes one value of a scale better than another: the evidence, or predictions of data that were held out."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask
from torch import Tensor

from pyro_dvi.core.arguments import by_position
from pyro_dvi.core.undisturbed import evaluating
from pyro_dvi.errors import DataError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.batch_graph import BatchGraph
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy, diagonal_of
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.laplace.energy.precision import KnownMatrix, PrecisionMatrix
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.evidence.evidence import Determinant, check_untempered, chosen_determinant, free_terms
from pyro_dvi.laplace.evidence.scales import Scale, rescaled_model
from pyro_dvi.laplace.methods.dense import DensePosterior
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method
from pyro_dvi.laplace.outputs import GaussianOutputs
from pyro_dvi.links import ClassLink, GaussHermite, NoiseLink, Probit
from pyro_dvi.runs.log_joint import JointRun, rescaled, run_joint
from pyro_dvi.runs.predictive_of_outputs import integrated

_ANOTHER = 4.0  # a value to compare with 1


@dataclass(frozen=True)
class Candidates:
    r"""What depends on the value that is tuned, around a mode that does not; a criterion compares values by it.

    The model runs once for the priors of all values. The method fits once where its Gaussian, of precision
    :math:`G + \Pi`, can be made that of :math:`a G + \Pi_c`, and again for each value elsewhere.

    Attributes:
        energy: U with value 1.
        scale: what is tuned.
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
        """Return U with another value around the mode, which stays where it is."""
        factors = dict.fromkeys(self.sites, self.scale.factor(value))
        energy = self.energy.with_model(rescaled_model(self.energy.model, factors))
        return energy.at(energy.start)

    def log_prior(self, value: float) -> float:
        """Return the log prior of the sites that vary."""
        with torch.enable_grad():
            return free_terms(self._first[0], self._prior_run(value), self.energy.layout)

    @property
    def prior_is_proportional(self) -> bool:
        """Whether all of the prior precision is multiplied by a number, seen by another value."""
        before, after = self.prior_diagonal(1.0), self.prior_diagonal(_ANOTHER)
        if before is None or after is None:
            return False
        tolerance = math.sqrt(torch.finfo(before.dtype).eps)
        return torch.allclose(after, self.scale.proportions(_ANOTHER)[1] * before, rtol=tolerance, atol=0)

    def prior_diagonal(self, value: float) -> Tensor | None:
        """Return the prior precision [D]; None unless it is diagonal and positive."""
        layout = self.energy.layout
        with torch.enable_grad():
            graph = BatchGraph(self._first[0], self._prior_run(value))

            def product(vectors: Tensor) -> Tensor:
                return layout.flatten(graph.prior_hessian(layout.split(vectors)))

            return diagonal_of(product, self.energy.start)

    @cached_property
    def likelihood_is_proportional(self) -> bool:
        """Whether the likelihood's part of P is multiplied by a number, seen by one product."""
        factor = self.scale.proportions(_ANOTHER)[0]
        if factor == 1:
            return True  # the scale of a prior, which is no part of the likelihood
        found, expected = self._likelihood_product(_ANOTHER), factor * self._likelihood_product(1.0)
        return bool((found - expected).norm() <= math.sqrt(torch.finfo(found.dtype).eps) * expected.norm())

    def posterior(self, value: float) -> LaplacePosterior:
        """Return the Gaussian.

        Raises:
            NotPositiveDefiniteError: there is none.
        """
        found = self.reweighted(value)
        return self.method.fit(self.local(value), seed=self.seed) if found is None else found

    def reweighted(self, value: float) -> LaplacePosterior | None:
        """Return the Gaussian made of that of value 1; None where it takes a fit.

        Raises:
            NotPositiveDefiniteError: there is none.
        """
        prior = None
        if self.fitted is not None and self.likelihood_is_proportional:
            prior = self.prior_diagonal(value)
        if self.fitted is None or prior is None:
            return None
        return self.fitted.reweighted(self.scale.proportions(value)[0], prior)

    def matrix(self, value: float) -> PrecisionMatrix:
        """Return the precision: of a dense Gaussian, or by its products."""
        posterior = self.posterior(value) if isinstance(self.fitted, DensePosterior) else None
        if isinstance(posterior, DensePosterior):
            return KnownMatrix(posterior.precision)
        return self.method.curvature

    @cached_property
    def _first(self) -> tuple[list[Tensor], JointRun]:
        with torch.enable_grad():
            return self.energy.first_run(self.energy.start)

    @cached_property
    def fitted(self) -> LaplacePosterior | None:
        """The Gaussian of value 1, if it exists and can become that of another."""
        if not self.method.reweights:
            return None
        try:
            return self.method.fit(self.energy.at(self.energy.start), seed=self.seed)
        except NotPositiveDefiniteError:
            return None

    def _prior_run(self, value: float) -> JointRun:
        """The run with other scales: values of sites are given, so that only their own densities change."""
        _, run = self._first
        terms, trace = dict(run.log_priors), run.trace.copy()
        factor = self.scale.factor(value)
        for name in self.sites:
            if factor != 1 and name in terms:
                node = run.trace.nodes[name]
                trace.nodes[name] = {**node, "fn": rescaled(name, node["fn"], factor)}
                log_prob = trace.nodes[name]["fn"].log_prob(node["value"])
                # Of real numbers, which need no transform.
                terms[name] = scale_and_mask(log_prob, node["scale"], node["mask"]).sum()
        return replace(run, log_priors=terms, trace=trace)

    def _likelihood_product(self, value: float) -> Tensor:
        local = self.local(value)
        probe = torch.randn(1, len(local.point), generator=torch.Generator().manual_seed(0)).to(local.point)
        return self.method.curvature.product(local, probe) - local.prior_hessian(probe)


class Criterion(ABC):
    """What makes one value better than another."""

    @abstractmethod
    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return the function of the value that is to be as large as possible.

        It raises ``NotPositiveDefiniteError`` for a value without a Gaussian.
        """


@dataclass(frozen=True)
class ByEvidence(Criterion):
    r"""The log evidence, with the mode kept fixed.

    .. math:: \log p_c(D) \approx \log p(D \mid \hat u) + \log p_c(\hat u) + \tfrac D2 \log 2\pi
        - \tfrac12 \log\det(G + \Pi_c)

    The determinant is that of the precision which the method predicts with: of the diagonal for ``Diagonal()``, of the
    Kronecker factors for ``KroneckerFactored()``, of the directions that are kept for ``TopEigen(k)``, of the kernel,
    which is exact, for ``Functional()``; these fit once for all values where their Gaussian allows it. For the other
    methods, whose precision is the matrix itself, a common multiplier of all priors, and the scale of a constant
    Gaussian noise, need its eigenvalues once; anything else needs them for each value.

    A dense matrix is built once for all values.

    Status: Laplace's approximation for the mode as it is, which is no mode for another c; train again, or polish, with
    the scale that was found, and repeat, for a joint optimum. It judges the model, not its predictions: class
    probabilities are under-confident afterwards, whatever the method (a CNN on digits has a test NLL of .53 to .77,
    its mode .04, and :class:`ByValidation` gives .04 to .05). Tune a classifier by validation data where there are any.

    Args:
        determinant: ``Exactly()`` or ``ByLanczos(probes, steps)`` of the matrix itself, whatever the method makes of
            it. None: that of the method; for ``Dense()`` and the methods that solve or draw, exactly up to D = 1,000,
            and by Lanczos beyond.

    Source: MacKay (1992); Immer et al. (2021), "Scalable marginal likelihood estimation".
    """

    determinant: Determinant | None = None

    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return the log evidence in nats."""
        energy = candidates.energy
        check_untempered(energy)
        log_determinant = self._log_determinant(candidates)
        likelihood_changes = candidates.scale.proportions(2.0)[0] != 1
        log_likelihood = energy.log_joint(energy.start)[0].item()
        constant = 0.5 * energy.layout.size * math.log(2 * math.pi)

        def score(value: float) -> float:
            fit = log_likelihood
            if likelihood_changes:
                fit = candidates.local(value).energy.log_joint(energy.start)[0].item()
            return fit + candidates.log_prior(value) + constant - 0.5 * log_determinant(value)

        return score

    def _log_determinant(self, candidates: Candidates) -> Callable[[float], float]:
        energy, method = candidates.energy, candidates.method
        if self.determinant is None and not method.by_spectrum:
            return lambda value: float(candidates.posterior(value).log_determinant())
        determinant = chosen_determinant(self.determinant, energy.layout.size)
        spectrum = determinant.spectrum(energy.at(energy.start), candidates.matrix(1.0))
        if (
            spectrum.log_prior_determinant is not None
            and candidates.prior_is_proportional
            and candidates.likelihood_is_proportional
        ):
            return lambda value: spectrum.log_determinant(*candidates.scale.proportions(value)).value

        def of_candidate(value: float) -> float:
            matrix = candidates.matrix(value)
            return determinant.spectrum(candidates.local(value), matrix).log_determinant().value

        return of_candidate


@dataclass(frozen=True)
class ByValidation(Criterion):
    r"""The mean log predictive density of data that were held out, for ``guide.tune``.

    .. math:: \frac1M \sum_{j} \log \int p(y_j \mid f)\, \mathcal N\bigl(f; f(x_j; \hat u), J_j P^{-1} J_j^\top\bigr)\,
        \mathrm df

    Each value that is tried costs a prediction, whose gradients are kept for the next prior where memory allows, and a
    fit unless the Gaussian can take another prior or noise:
    ``Diagonal()``, ``KroneckerFactored()`` and ``TopEigen(k)`` fit once for a multiplier of all priors, ``Dense()``
    builds its matrix once and factorises it for each value.

    Status: as :class:`~pyro_dvi.predictive.Linearised`, whose predictions are scored.

    Args:
        batches: held-out data with the observations, in tuples or mappings of the model's arguments.
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
        >>> curve = guide.tune(
        ...     [(x, x)],
        ...     criterion=ByValidation(held_out),
        ...     values=[1.0, 10.0, 100.0],
        ...     progress=False,
        ... )
        >>> round(curve.best, -1)
        10.0
    """

    batches: Iterable[Any] = field(repr=False)
    link: ClassLink = field(default_factory=Probit)
    noise: NoiseLink = field(default_factory=lambda: GaussHermite(20))
    num_points: int = 256
    site: str | None = None

    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return the mean log predictive density as a function of the value."""
        passes = Passes(self.batches, candidates.energy.start.device)
        kept: dict[int, Query] = {}  # the scale of a prior changes no output

        def score(value: float) -> float:
            energy, posterior = candidates.local(value).energy, candidates.posterior(value)
            total, count = 0.0, 0
            for index, batch in enumerate(passes):
                args = by_position(energy.model, *batch)
                query = None if passes.reordered else kept.get(index)
                if query is None:
                    query = Query(energy.model, args, energy.locs, energy.layout, site=self.site)
                log_density = self._log_density(energy, args, GaussianOutputs.of(posterior, query))
                total, count = total + float(log_density.sum()), count + log_density.numel()
                room = energy.memory - sum(known.bytes_held for known in kept.values())
                if candidates.scale.of_prior and query.bytes_held <= room:
                    kept[index] = query
            return total / count

        return score

    @torch.no_grad()
    def _log_density(self, energy: Energy, args: tuple, gaussian: GaussianOutputs) -> torch.Tensor:
        """Log predictive density of every observation of a batch that is not masked."""
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
