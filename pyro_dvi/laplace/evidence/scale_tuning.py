# SPDX-License-Identifier: Apache-2.0
"""The search for the best value of a scale, or of several."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor, distributions as td

from pyro_dvi.core.densities import untransformed
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import InNotebook
from pyro_dvi.errors import ArgumentError, NotPositiveDefiniteError, warn
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.evidence.candidates import Candidates, FirstFit, Scale, check_scales
from pyro_dvi.laplace.evidence.criteria import REFUSED, ByEvidence, Criterion
from pyro_dvi.laplace.methods.method import Method
from pyro_dvi.laplace.mode.diagnosis import sound


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
        refinements: number of additional values to try, in pairs, between the neighbours of the best value (half as
            many, below it, if the criterion has a threshold); none are tried if the best value is at the edge.
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

        if criterion.has_threshold:
            place = min(bisect_left(grid, True, key=lambda v: attempt(v) > REFUSED), len(grid) - 1)
        else:
            place = grid.index(max(grid, key=attempt))
        if tried[grid[place]] == -math.inf:
            raise NotPositiveDefiniteError(
                "the precision is not positive definite for any value: run guide.polish(batches), or use GGN()"
            )
        at_edge = place in (0, len(grid) - 1)
        for _ in range(0 if at_edge else refinements // 2):
            index = sorted(tried).index(max(tried, key=tried.__getitem__))
            for low, high in pairwise(sorted(tried)[index - 1 : index + 2 - criterion.has_threshold]):
                attempt(math.sqrt(low * high))
    best = max(tried, key=tried.__getitem__)
    ordered, scores = torch.tensor(sorted(tried.items()), dtype=torch.float64).unbind(1)
    index = sorted(tried).index(best)
    # Towards values without a Gaussian, the evidence tends to infinity.
    singular = bool((scores[max(index - 1, 0) : index + 2] == -math.inf).any())
    scores = scores.masked_fill(scores == -math.inf, math.nan)
    return TuningCurve(ordered, scores, best, at_edge or singular, what)


UNDER_CONFIDENT = (
    "class probabilities are under-confident after tuning with the evidence: use guide.tune(batches, "
    "criterion=ByValidation(held_out)) or, without validation data, criterion=ByTrainingLoss()"
)
_CLASSES = td.Categorical, td.OneHotCategorical, td.Bernoulli
_ROUNDS, _SETTLED = 20, 0.01  # maximum number of rounds; relative change of a scale below which rounds end


def tune_together(
    scales: Sequence[Scale],
    whole: Energy,
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
    first = FirstFit(whole, method, seed)
    grids, found = [values for _ in scales], dict(whole.scale_factors)
    for done in range(_ROUNDS):
        before, curves = found, list[TuningCurve]()
        for k, scale in enumerate(scales):
            energy = whole.with_factors({name: f for name, f in found.items() if name not in sites[k]})
            candidates = Candidates(energy, scale, sites[k], first)
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
