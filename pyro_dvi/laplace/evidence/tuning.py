# SPDX-License-Identifier: Apache-2.0
"""The search for the best value of a scale."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import InNotebook
from pyro_dvi.errors import ArgumentError, NotPositiveDefiniteError, warn
from pyro_dvi.laplace.evidence.criteria import Candidates, Criterion

_GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class TuningCurve(InNotebook):
    """Values that were tried, and how good they are.

    Attributes:
        values: ascending.
        scores: larger is better; NaN where the precision is not positive definite.
        best: the value that was taken.
        at_edge: it is the smallest or largest that was tried, or next to where there is no positive precision.
        what: what was tuned, by which criterion.

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

    def __str__(self) -> str:
        rows = [
            f"  {v:<10.4g} {s:.6g}{'  <- best' if v == self.best else ''}"
            for v, s in zip(self.values.tolist(), self.scores.tolist(), strict=True)
        ]
        if bool(self.scores.isnan().any()):
            rows.append(
                "  nan: no Gaussian, since this precision is not positive definite there; that of GGN() is"
            )
        return "\n".join([self.what, *rows])


def tune(
    candidates: Candidates,
    criterion: Criterion,
    *,
    values: Sequence[float] | Tensor | None,
    refinements: int,
    progress: bool,
) -> TuningCurve:
    """Find the best value on a grid, then between its neighbours by golden sections of the logarithm.

    Args:
        candidates: what varies, and around which mode.
        criterion: what is best.
        values: the grid, positive; None: that of the scale.
        refinements: values to try between the neighbours of the best one; none where that is at the edge.
        progress: show a progress bar where there is a terminal or notebook.

    Raises:
        ArgumentError: values that are not positive, or none.
        NotPositiveDefiniteError: no value has a positive definite precision.
    """
    try:
        grid = sorted({float(v) for v in (candidates.scale.grid() if values is None else values)})
    except (TypeError, ValueError):  # one number, or none
        grid = []
    if not grid or not all(0 < v < math.inf for v in grid) or refinements < 0:
        raise ArgumentError(
            f"values must be a list of positive numbers, and refinements not negative; got {values!r} and {refinements}"
        )
    what = f"{candidates.scale} by {criterion}"
    tried: dict[float, float] = {}  # minus infinity where there is no Gaussian
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
        if not at_edge:
            _golden(attempt, grid[place - 1], grid[place + 1], refinements)
    best = max(tried, key=lambda value: tried[value])
    ordered, scores = torch.tensor(sorted(tried.items()), dtype=torch.float64).unbind(1)
    index = sorted(tried).index(best)
    singular = bool(
        (scores[max(index - 1, 0) : index + 2] == -math.inf).any()
    )  # where the evidence goes to infinity
    if at_edge or singular:
        where = (
            f"the {'smallest' if place == 0 else 'largest'} value tried: pass values=[...] that reach further"
        )
        if singular:
            where = (
                "next to values at which the precision is not positive definite, and means nothing so near to them: "
                "use GGN(), or pass values that stay away from them"
            )
        warn(f"the best of {what} is {best:.4g}, {where}")
    scores = scores.masked_fill(scores == -math.inf, math.nan)
    return TuningCurve(ordered, scores, best, at_edge or singular, what)


def _golden(attempt: Callable[[float], float], low: float, high: float, count: int) -> None:
    """Narrow a bracket of a maximum in the logarithm, by ``count`` evaluations."""
    if count < 2:
        return
    a, b = math.log(low), math.log(high)
    c, d = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
    at_c, at_d = attempt(math.exp(c)), attempt(math.exp(d))
    for _ in range(count - 2):
        if at_c > at_d:
            b, d, at_d = d, c, at_c
            c = b - _GOLDEN * (b - a)
            at_c = attempt(math.exp(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + _GOLDEN * (b - a)
            at_d = attempt(math.exp(d))
