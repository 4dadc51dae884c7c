# SPDX-License-Identifier: Apache-2.0
"""Tuning of a scale with the evidence or on held-out data, and the search for its best value."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, distributions as td

from pyro_dvi.core.arguments import by_position
from pyro_dvi.core.densities import untransformed
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import InNotebook
from pyro_dvi.core.undisturbed import evaluating
from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.errors import ArgumentError, DataError, NotPositiveDefiniteError, warn
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.evidence.candidates import Candidates, Scale, check_scales
from pyro_dvi.laplace.evidence.evidence import EXACT_SIZE, ByLanczos, check_options
from pyro_dvi.laplace.methods.full_and_low_rank import Dense
from pyro_dvi.laplace.methods.method import GaussianOutputs, Method
from pyro_dvi.laplace.mode.diagnosis import sound
from pyro_dvi.links import GaussHermite, Probit
from pyro_dvi.links.class_links import ClassLink
from pyro_dvi.runs.log_joint import run_joint
from pyro_dvi.runs.predictive_of_outputs import integrated


class Criterion(ABC):
    """A score of the values of a scale."""

    @abstractmethod
    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return the score as a function of the value; tuning maximises it.

        The function raises ``NotPositiveDefiniteError`` if the precision at a value is not positive definite.
        """


@dataclass(frozen=True)
class ByEvidence(Criterion):
    r"""The log evidence, with the mode kept fixed.

    .. math:: \log p_c(D) \approx \log p(D \mid \hat u) + \log p_c(\hat u) + \tfrac D2 \log 2\pi
        - \tfrac12 \log\det(G + \Pi_c)

    The determinant is computed from the precision that predictions use: the full matrix for ``Dense()`` and
    ``Functional()``, the diagonal for ``Diagonal()``, the factors for ``KroneckerFactored()``, and the retained
    directions for ``TopEigen(rank)``. These methods fit once for all values if possible. Methods based on solves or
    draws use the full matrix up to D = 1,000. For larger D, they compute eigenvalues of the matrix: once if the scale
    is a common multiplier of all priors or the scale of constant Gaussian noise, otherwise for each value.

    Status: Laplace's approximation at the current mode, which is not the mode for another c. For a joint optimum, train
    or polish again with the chosen scale, and repeat. The evidence scores the model, not its predictions: class
    probabilities are under-confident after tuning with any method. For a network on digits, the test NLL was 0.28 to
    0.58, compared with 0.06 at its mode and after tuning with :class:`ByValidation`. If possible, tune a classifier on
    validation data.

    Args:
        determinant: ``ByLanczos(num_probes, steps)`` for the full matrix with any method. None means the determinant of
            the method; for methods based on solves or draws, the full matrix up to D = 1,000, and Lanczos quadrature
            for larger D.

    Source: MacKay (1992); Immer et al. (2021), "Scalable marginal likelihood estimation".
    """

    determinant: ByLanczos | None = None

    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return the log evidence in nats."""
        energy = candidates.energy
        check_options(energy, self.determinant)
        log_determinant = self._log_determinant(candidates)
        log_likelihood = candidates.here.log_likelihood.item()
        constant = 0.5 * energy.layout.size * math.log(2 * math.pi)

        def score(value: float) -> float:
            fit = log_likelihood
            if not candidates.scale.of_prior:
                fit = candidates.local(value).log_likelihood.item()
            return fit + candidates.log_prior(value) + constant - 0.5 * log_determinant(value)

        return score

    def _log_determinant(self, candidates: Candidates) -> Callable[[float], float]:
        energy, method, by = candidates.energy, candidates.method, self.determinant
        if by is None and method.by_spectrum:
            if energy.layout.size > EXACT_SIZE:
                by = ByLanczos()
            else:
                candidates = replace(candidates, method=Dense(method.precision))
        if by is None:
            return lambda value: float(candidates.posterior(value).log_determinant())
        if candidates.prior_is_proportional and candidates.likelihood_is_proportional:
            of_factors = by.log_determinant(candidates.here, method.precision)
            return lambda value: of_factors(*candidates.scale.proportions(value)).value
        return lambda value: by.log_determinant(candidates.local(value), method.precision)(1.0, 1.0).value


@dataclass(frozen=True)
class ByValidation(Criterion):
    r"""The mean log predictive density of held-out data, for ``guide.tune``.

    .. math:: \frac1M \sum_{j} \log \int p(y_j \mid f)\, \mathcal N\bigl(f; f(x_j; \hat u), J_j P^{-1} J_j^\top\bigr)\,
        \mathrm df

    Each value costs a prediction; its gradients are reused for the next prior if memory allows. Each value also costs a
    fit, unless the Gaussian can be converted to the new prior or noise. ``Diagonal()``, ``KroneckerFactored()`` and
    ``TopEigen(k)`` are fitted only once for a multiplier of all priors. ``Dense()`` computes its matrix once and
    factorises it for each value.

    Status: scores the predictions of :class:`~pyro_dvi.predictive.Linearised`.

    Args:
        batches: held-out data with observations, as tuples or mappings of the model's arguments.
        link: function that maps Gaussian logits to class probabilities.
        site: the observed site that is predicted; None for the only observed site.

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
    site: str | None = None

    def score(self, candidates: Candidates) -> Callable[[float], float]:
        """Return the mean log predictive density as a function of the value."""
        passes = Passes(self.batches, candidates.energy.start.device)
        kept: dict[int, tuple[Query, ObservedSite]] = {}  # the scale of a prior does not change outputs

        def score(value: float) -> float:
            posterior, total, count = candidates.posterior(value), 0.0, 0
            energy = candidates.energy if candidates.scale.of_prior else candidates.local(value).energy
            for index, batch in enumerate(passes):
                known = None if passes.reordered else kept.get(index)
                query, site = known or self._read(energy, by_position(energy.model, *batch))
                log_density = self._log_density(GaussianOutputs.of(posterior, query), site)
                total, count = total + float(log_density.sum()), count + log_density.numel()
                room = energy.memory - sum(query.bytes_held for query, _ in kept.values())
                if candidates.scale.of_prior and query.bytes_held <= room:
                    kept[index] = query, site
            return total / count

        return score

    @torch.no_grad()
    def _read(self, energy: Energy, args: tuple) -> tuple[Query, ObservedSite]:
        """Return the outputs of a batch and its observed site."""
        query = Query(energy.model, args, energy.locs, energy.layout, site=self.site)
        with evaluating(energy.model):
            run = run_joint(energy.model, args, {}, energy.locs)
        found = [site for site in run.sites if site.name == query.outputs.site]
        if not found:
            raise DataError("validation batches need observations: pass (x, y)")
        run.log_likelihood()  # raises an error for values outside the support
        return query, found[0]

    @torch.no_grad()
    def _log_density(self, gaussian: GaussianOutputs, site: ObservedSite) -> Tensor:
        """Return the log predictive density of every unmasked observation of a batch."""
        outputs, covariance = gaussian.outputs, gaussian.full_covariance
        distribution = integrated(outputs, covariance, self.link, GaussHermite(20), num_points=256)
        log_density: Tensor = distribution.log_prob(site.value)
        return log_density[(site.weights > 0).expand_as(log_density)]


@dataclass(frozen=True)
class TuningCurve(InNotebook):
    """The values that were tried, with their scores.

    Attributes:
        values: the values, in ascending order.
        scores: their scores (larger is better); NaN if the precision is not positive definite.
        best: the value with the largest score.
        at_edge: whether the best value is the smallest or largest, or next to a value without a Gaussian.
        what: the scale and the criterion, in words.
        others: the curves of other scales that were tuned together with this one.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi.laplace import LaplaceGuide
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = LaplaceGuide(model)
        >>> guide.initialize(x, x)
        >>> _ = guide.polish([(x, x)], progress=False)
        >>> curve = guide.tune([(x, x)], progress=False)
        >>> round(curve.best, 1), guide.scale_factors["slope"] == curve.best**-0.5
        (1.3, True)
    """

    values: Tensor
    scores: Tensor
    best: float
    at_edge: bool
    what: str
    others: tuple["TuningCurve", ...] = ()

    def __str__(self) -> str:
        rows = [
            f"  {v:<10.4g} {s:.6g}{'  <- best' if v == self.best else ''}"
            for v, s in zip(self.values.tolist(), self.scores.tolist(), strict=True)
        ]
        if bool(self.scores.isnan().any()):
            rows.append("  nan: the precision is not positive definite; use GGN()")
        return "\n".join([self.what, *rows, *map(str, self.others)])

    def warn_at_edge(self) -> None:
        """Warn if the best value is the smallest or largest tried, or next to a value without a Gaussian."""
        if self.at_edge:
            singular = "next to values for which the precision is not positive definite: use GGN()"
            end = "largest" if self.best == self.values[-1] else "smallest"
            ends = f"the {end} value tried: change the scale in the model, or pass values=[...] beyond it to guide.tune"
            where = singular if bool(self.scores.isnan().any()) else ends
            warn(f"the best value of {self.what} is {self.best:.4g}, {where}")


def tune(
    candidates: Candidates,
    criterion: Criterion,
    *,
    values: Sequence[float] | Tensor | None,
    refinements: int,
    progress: bool,
) -> TuningCurve:
    """Find the best value on a grid, then repeatedly try values half-way to its neighbours, without warnings.

    Args:
        candidates: quantities that depend on the value.
        criterion: the score to maximise.
        values: grid of positive values; None means the default grid of the scale.
        refinements: number of additional values to try, in pairs, between the neighbours of the best value; none are
            tried if the best value is at the edge.
        progress: show a progress bar in a terminal or notebook.

    Raises:
        ArgumentError: ``values`` is empty, or a value is not positive.
        NotPositiveDefiniteError: the precision is not positive definite for any value.
    """
    try:
        grid = sorted({float(v) for v in (candidates.scale.grid if values is None else values)})
    except (TypeError, ValueError):  # not a sequence of numbers
        grid = []
    if not grid or not all(0 < v < math.inf for v in grid):
        raise ArgumentError(f"values must be a list of positive numbers, got {values!r}")
    what = f"{candidates.scale} by {criterion}"
    tried: dict[float, float] = {}  # minus infinity if there is no Gaussian
    with progress_bar(progress, len(grid) + refinements, unit="value") as bar:
        score = criterion.score(candidates)

        def attempt(value: float) -> float:
            try:
                found = score(value)
            except NotPositiveDefiniteError:
                found = math.nan
            bar.update()
            tried[value] = -math.inf if math.isnan(found) else found
            return tried[value]

        place = grid.index(max(grid, key=attempt))
        if tried[grid[place]] == -math.inf:
            raise NotPositiveDefiniteError(
                "the precision is not positive definite for any value: run guide.polish(batches), or use GGN()"
            )
        at_edge = place in (0, len(grid) - 1)
        for _ in range(0 if at_edge else refinements // 2):
            index = sorted(tried).index(max(tried, key=tried.__getitem__))
            for low, high in pairwise(sorted(tried)[index - 1 : index + 2]):
                attempt(math.sqrt(low * high))
    best = max(tried, key=tried.__getitem__)
    ordered, scores = torch.tensor(sorted(tried.items()), dtype=torch.float64).unbind(1)
    index = sorted(tried).index(best)
    # Towards values without a Gaussian, the evidence tends to infinity.
    singular = bool((scores[max(index - 1, 0) : index + 2] == -math.inf).any())
    scores = scores.masked_fill(scores == -math.inf, math.nan)
    return TuningCurve(ordered, scores, best, at_edge or singular, what)


UNDER_CONFIDENT = (
    "class probabilities are under-confident after tuning with the evidence: if there are validation data, use "
    "guide.tune(batches, criterion=ByValidation(held_out))"
)
_CLASSES = td.Categorical, td.OneHotCategorical, td.Bernoulli
_ROUNDS, _SETTLED = 20, 0.01  # maximum number of rounds; relative change of a scale below which rounds end


def tune_together(
    scales: Sequence[Scale],
    whole: Energy,
    energy_of: Callable[[Mapping[str, float]], Energy],
    factors: Mapping[str, float],
    criterion: Criterion,
    *,
    method: Method,
    seed: int,
    values: Sequence[float] | Tensor | None,
    **options: Any,
) -> tuple[TuningCurve, dict[str, float], Candidates, float]:
    """Find the best value of each scale given the others, in rounds, until none changes.

    Args:
        scales: scales of different sites.
        whole: U with the current scales.
        energy_of: function that returns U on the same batches for multipliers of the scales of sites.
        factors: the current multipliers.
        criterion: the score to maximise.
        method: representation of the Gaussian.
        seed: random seed.
        values: the grid of each scale. After the first round, only values near the best one and within the range of the
            grid are tried.
        options: further arguments of :func:`tune`.

    Returns:
        The curve of the first scale in the last round, which includes the other curves; the multipliers; the candidates
        of the last scale; and the value of the last scale.

    Raises:
        ArgumentError: there is no scale, or two scales belong to the same site.
    """
    check_scales("scale", scales)
    sound(whole)
    observed = [untransformed(site.fn) for site in whole.at(whole.start).first.run.sites]
    if isinstance(criterion, ByEvidence) and any(isinstance(fn, _CLASSES) for fn in observed):
        warn(UNDER_CONFIDENT)
    sites = [scale.sites(whole) for scale in scales]
    if not sites or len({*chain(*sites)}) < sum(map(len, sites)):
        raise ArgumentError(f"scale must be one scale, or several of different sites, got {scales}")
    grids, found = [values for _ in scales], dict(factors)
    for done in range(_ROUNDS):
        before, curves = found, list[TuningCurve]()
        for k, scale in enumerate(scales):
            energy = energy_of({name: factor for name, factor in found.items() if name not in sites[k]})
            candidates = Candidates(energy, scale, sites[k], method, seed)
            curve = tune(candidates, criterion, values=grids[k], **options)
            found = {**found, **dict.fromkeys(sites[k], scale.factor(curve.best))}
            curves.append(curve)
        if len(scales) == 1 or all(abs(found[n] / before.get(n, math.inf) - 1) < _SETTLED for n in found):
            break
        if not done:
            ends = [curve.values[[0, -1]].tolist() for curve in curves]
        if options["refinements"]:
            steps = 2 ** torch.arange(-2, 3, dtype=torch.float64)
            grids = [(c.best * steps).clamp(*e) for c, e in zip(curves, ends, strict=True)]
    else:
        warn(f"the best values still change after {_ROUNDS} rounds: call guide.tune again")
    for curve in curves:
        curve.warn_at_edge()
    return replace(curves[0], others=tuple(curves[1:])), found, candidates, curve.best
