# SPDX-License-Identifier: Apache-2.0
"""The weight of the KL divergence, chosen on validation data, by the same training at several weights."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import linalg

from pyro_dvi.core.arguments import check_count, check_positive
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import Columns, Report
from pyro_dvi.errors import ArgumentError, NonFiniteError, PyroDviError, warn
from pyro_dvi.predictive.predict import predict
from pyro_dvi.training.ensemble import TrainedPosterior, train_apart
from pyro_dvi.training.history import Table
from pyro_dvi.training.random_state import preserve_random_state

__all__ = ["TunedKLWeight", "tune_kl_weight"]

_NUMERICAL = (ValueError, ArithmeticError, linalg.LinAlgError)  # type: ignore[attr-defined]


@dataclass(frozen=True, repr=False)
class TunedKLWeight(Report):
    """The best KL weight, its posterior, and the scores of all weights; ``print`` shows them as a table.

    Attributes:
        kl_weight: the best.
        model: the model that was trained with it.
        guide: its posterior.
        table: columns ``kl_weight``, ascending, and ``score``, where lower is better; NaN where training failed.
        failures: why training failed, by weight.
    """

    kl_weight: float
    model: Any
    guide: Any
    table: Table
    failures: dict[float, str]

    def _shown(self) -> list[Any]:
        rows = []
        for weight, score in zip(*self.table.values(), strict=True):
            note = f"failed: {self.failures[weight]}" if weight in self.failures else ""
            rows.append((note or "best" * (weight == self.kl_weight), f"{weight:g}", f"{score:.4f}"))
        return [Columns(("", "KL weight", "score"), rows)]

    __repr__ = Report.__str__


def tune_kl_weight(
    train: Callable[[float], tuple[Any, Any]],
    validation: Any,
    kl_weights: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.3),
    *,
    score: Callable[[Any, Any, Any], float] | None = None,
    max_trainings: int = 9,
    seed: int = 0,
    progress: bool = True,
) -> TunedKLWeight:
    r"""Train at several KL weights and keep the posterior that predicts validation data best.

    .. math::
        \hat\beta = \arg\min_\beta \; -\frac1n \sum_{i=1}^n \log p(y_i \mid x_i, q_\beta)

    The grid is a first guess: as long as the best weight is its smallest or largest, it grows there by the pattern of
    its steps (0.003, ..., 0.1, 0.3 is followed by 1, or preceded by 0.001). Every method has its own best weight,
    maximum a posteriori included, so that methods compared at a common one are not compared at their best.

    Each training begins with the same seed and an empty parameter store, and is scored with that seed. Afterwards
    Pyro's store holds the parameters of the best, in place of others of the same names, and random numbers outside
    are as if nothing had been drawn. A training that diverges is a row of the table.

    Status: the best of those tried. New data will have a higher score, since the weight was chosen by its score.

    Args:
        train: given a KL weight, builds and trains a model and its guide, and returns ``(model, guide)``; with any
            objective that has a ``kl_weight``: ``TaylorELBO``, ``SampledELBO`` (with ``AutoDelta`` for the maximum a
            posteriori), a ``LaplaceGuide``, ... Networks must be built, or copied, inside it.
        validation: inputs with observations, as in :func:`~pyro_dvi.predict`; data that ``train`` does not use.
        kl_weights: positive numbers to begin with; a single one is not extended.
        score: called with model, guide and validation data, returns a number that is better when lower; by default
            ``predict(model, guide, validation).metrics()["nll"]``, by the rule that the guide was trained for.
        max_trainings: at most so many.
        seed: of every training.
        progress: show a progress bar where there is a terminal or notebook.

    Returns:
        The best weight, its model and guide, ready for ``predict``, and the table.

    Raises:
        ArgumentError: a weight is not positive, more weights than ``max_trainings``, ``train`` returns something else
            than model and guide, or uses one network in several trainings.
        NonFiniteError: every training has failed.

    Warns:
        DviWarning: the best is still the smallest or largest when ``max_trainings`` are done.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> import pyro_dvi as dvi
        >>> def train(kl_weight):
        ...     def model(x, y=None):
        ...         w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...         with pyro.plate("data", len(x)):
        ...             return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)
        ...
        ...     guide = dvi.MeanFieldGuide(model)
        ...     elbo = dvi.TaylorELBO(kl_weight=kl_weight)
        ...     svi = pyro.infer.SVI(model, guide, dvi.optim.Adam({"lr": 0.1}), loss=elbo)
        ...     dvi.fit(svi, [(x, y)], epochs=100)
        ...     return model, guide
        >>> x = torch.linspace(-1, 1, 10)
        >>> y = 0.2 * x + torch.tensor([1.0, -1, 0.5, 0.5, -1, -1, 0.5, 0.5, -1, 1])
        >>> tuned = tune_kl_weight(train, (x, 0.2 * x), kl_weights=(1, 3, 10))
        >>> tuned
              KL weight   score
        -----------------------
                      1  0.9194
        best          3  0.9190
                     10  0.9201
        >>> dvi.predict(tuned.model, tuned.guide, x).mean.shape
        torch.Size([10])
    """
    check_count("max_trainings", max_trainings)
    grid = sorted({float(weight) for weight in kl_weights})
    for weight in grid:
        check_positive("each of kl_weights", weight)
    if not 1 <= len(grid) <= max_trainings:
        raise ArgumentError(
            f"kl_weights must be one to max_trainings={max_trainings} numbers, not {len(grid)}"
        )
    score = partial(_nll, seed=seed) if score is None else score
    scores: dict[float, float] = {}
    failures: dict[float, str] = {}
    kept: TrainedPosterior | None = None
    cause: Exception | None = None
    waiting = grid
    with progress_bar(progress, len(grid), unit="training") as bar:
        while waiting and len(scores) < max_trainings:
            for weight in waiting:
                try:
                    posterior = train_apart(partial(train, weight), seed, [] if kept is None else [kept])
                    with preserve_random_state(), posterior.in_store():
                        scores[weight] = float(score(posterior.model, posterior.guide, validation))
                    if not math.isfinite(scores[weight]):
                        raise NonFiniteError(f"the score is {scores[weight]}")
                    kept = posterior if _best(scores) == weight else kept
                except _NUMERICAL as error:
                    if isinstance(error, PyroDviError) and not isinstance(error, ArithmeticError):
                        raise
                    scores[weight], cause = math.nan, error
                    failures[weight] = str(error).split("\n")[0].split(". ")[0]
                bar.update()
            waiting = _beyond(scores)
            bar.total = bar.n + len(waiting)
    if kept is None:
        listed = "; ".join(f"{weight:g}: {why}" for weight, why in failures.items())
        raise NonFiniteError(
            f"every training has failed ({listed}). Run train(kl_weight) alone at one of these weights until it works; "
            "where it diverges, lower the learning rate, first of the posterior scales, or train in float64"
        ) from cause
    if _beyond(scores):
        warn(
            f"the best KL weight, {_best(scores):g}, is at the end of those tried, {min(scores):g} to "
            f"{max(scores):g}: begin with others (kl_weights), or allow more trainings (max_trainings)"
        )
    kept.put_back()
    table = Table(kl_weight=sorted(scores), score=[scores[weight] for weight in sorted(scores)])
    return TunedKLWeight(_best(scores), kept.model, kept.guide, table, failures)


def _best(scores: dict[float, float]) -> float:
    """Return the weight with the lowest score."""
    return min(scores, key=lambda weight: (math.isnan(scores[weight]), scores[weight]))


def _beyond(scores: dict[float, float]) -> list[float]:
    """Return the next weight beyond the end of the grid where the best is, if it is at one."""
    ordered = sorted(scores)
    if _best(scores) == ordered[-1]:
        ordered.reverse()
    if len(ordered) < 2 or _best(scores) != ordered[0] or math.isnan(scores[ordered[0]]):
        return []
    first, second, *rest = ordered
    step = first / second if not rest else second / rest[0]  # of 0.03, 0.1, 0.3 two make a decade
    return [float(f"{first * step:.6g}")]


def _nll(model: Any, guide: Any, validation: Any, seed: int) -> float:
    return predict(model, guide, validation, seed=seed).metrics()["nll"]
