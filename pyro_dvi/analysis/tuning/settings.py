# SPDX-License-Identifier: Apache-2.0
"""Settings of a training, chosen on validation data."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_dvi.analysis.tuning.search import as_proposed, one_after_the_other
from pyro_dvi.analysis.tuning.storage import read_results
from pyro_dvi.analysis.tuning.trainings import TEMPERATURES, Trainings, are_numbers
from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import Columns, Report
from pyro_dvi.errors import ArgumentError, NonFiniteError, warn
from pyro_dvi.predictive.predict import predict
from pyro_dvi.predictive.predictive_distribution import with_any
from pyro_dvi.training.history import Table

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

__all__ = ["Tuned", "tune"]

_COLD = 1e-3
_SCORES = ("score", "standard_error", "paired_standard_error")


@dataclass(frozen=True, repr=False)
class Tuned(Report):
    """The chosen settings, their posterior, and the scores of all trainings; ``print`` shows them as a table.

    Attributes:
        settings: the chosen ones, by name.
        model: the model that was trained with them.
        guide: its posterior.
        table: a row for each training and a column for each setting; ``score``, where lower is better and NaN is a
            failed training; ``standard_error`` of the score, and ``paired_standard_error`` of its difference from the
            lowest score, both over validation rows and NaN where the score is one number.
        failures: why trainings failed, by row of the table.
    """

    settings: dict[str, Any]
    model: Any
    guide: Any
    table: Table
    failures: dict[int, str]

    def _shown(self) -> list[Any]:
        lowest = min(score for score in self.table["score"] if score == score)
        rows = []
        for row, (*values, score, error, paired) in enumerate(zip(*self.table.values(), strict=True)):
            is_chosen = values == list(self.settings.values())
            note = "chosen" if is_chosen else "lowest score" if score == lowest else ""
            note = f"failed: {self.failures[row]}" if row in self.failures else note
            numbers = ("-" if number != number else f"{number:.4f}" for number in (score, error, paired))
            rows.append((note, *map(_text, values), *numbers))
        return [Columns(("", *self.settings, "score", "standard error", "paired error"), rows)]

    __repr__ = Report.__str__


def tune(
    train: Callable[..., tuple[Any, Any]],
    validation: Any,
    space: Mapping[str, Iterable[Any]],
    *,
    max_trainings: int = 12,
    score: Callable[[Any, Any, Any], Any] | None = None,
    seed: int = 0,
    storage: str | Path | None = None,
    sampler: "BaseSampler | None" = None,
    progress: bool = True,
) -> Tuned:
    r"""Train with several settings and keep the posterior that predicts validation data best.

    .. math::
        \hat s = \arg\min_s \bar\ell(s), \qquad
        \bar\ell(s) = -\frac1n \sum_{i=1}^n \log p(y_i \mid x_i, q_s)

    **Search.** The settings are searched one after the other, in the order of ``space``: the training runs with every
    value of one list, while the other settings are held at their best values so far, at first the middle value of each
    list (of an even number, the lower of the two). Step size, its decay, temperature is a sensible order, since a
    temperature that is chosen before the step size makes up for a step size that does not fit. If the best value is at
    an end of its list, the search goes on beyond it by the pattern of the steps (0.1, 0.3 is followed by 1, and 0, 1, 2
    by 3), as long as trainings are left that later lists do not need; whole numbers stay whole. Then neighbours of the
    best values are tried in the same order, until none is better or no trainings are left. A ``sampler`` proposes all
    at once.

    **Choice.** The lowest mean score is chosen. A setting that is called ``temperature`` or ``kl_weight`` then takes
    its largest value, with the other settings at their best, that is within one paired standard error of the lowest
    score,

    .. math::
        \bar\ell(s) - \bar\ell(\hat s) \le \operatorname{sd}_i\left(\ell_i(s) - \ell_i(\hat s)\right) / \sqrt n,

    since the curve is often flat, and the larger value keeps more of the posterior. A score that is one number has no
    standard error, and the lowest is chosen. The search does not follow such a flat curve beyond the end of its list.

    Each training begins with the same seed and an empty parameter store, and is scored with that seed. Afterwards
    Pyro's store holds the parameters of the chosen posterior, in place of others of the same names, and random numbers
    outside are as if nothing had been drawn. A training that diverges is a row of the table.

    Status: approximation. The best of the settings that were tried is chosen, not of all combinations. New data will
    have a higher score, since the settings were chosen by their score.

    Args:
        train: called with the names of ``space`` as keywords; builds and trains a model and its guide by any method,
            and returns ``(model, guide)``. Networks must be built, or copied, inside it.
        validation: inputs with observations, as in :func:`~pyro_dvi.predict`; data that ``train`` does not use.
        space: for each setting a list of numbers, or of strings, booleans and None, which have no order.
        max_trainings: at most so many, those in ``storage`` included; with a ``sampler`` also of its trials.
        score: called with model, guide and validation data, returns one number, or a vector of one number for each row
            of the data; lower is better. By default the negative log-likelihood of each row that
            ``predict(model, guide, validation)`` gives, by the rule that the guide was trained for.
        seed: of every training.
        storage: path of a file that keeps a line of JSON for each finished training. A further call continues there:
            only the chosen training is run again, if this call has not run it. Remove a line to repeat its training.
        sampler: any sampler of Optuna (``python -m pip install optuna``), which proposes values as categories.
        progress: show a progress bar where there is a terminal or notebook.

    Returns:
        The chosen settings, their model and guide, ready for ``predict``, and the table, which
        :func:`~pyro_dvi.plots.tuning` draws.

    Raises:
        ArgumentError: lists that cannot be searched or that need more than ``max_trainings``; ``train`` returns
            something else than model and guide, or uses one network in several trainings; ``score`` returns other
            numbers of rows.
        CheckpointError: ``storage`` is a file of other settings, of another seed, or of something else.
        NonFiniteError: every training has failed.

    Warns:
        DviWarning: the best value is still at an end of its list other than zero, with the next value to try; or the
            chosen ``temperature`` or ``kl_weight`` is below 0.001.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> import pyro_dvi as dvi
        >>> def train(lr, kl_weight):
        ...     def model(x, y=None):
        ...         w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...         with pyro.plate("data", len(x)):
        ...             return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)
        ...
        ...     guide = dvi.MeanFieldGuide(model)
        ...     elbo = dvi.TaylorELBO(kl_weight=kl_weight)
        ...     svi = pyro.infer.SVI(model, guide, dvi.optim.Adam({"lr": lr}), loss=elbo)
        ...     dvi.fit(svi, [(x, y)], epochs=100)
        ...     return model, guide
        >>> x = torch.linspace(-1, 1, 10)
        >>> y = 0.2 * x + torch.tensor([1.0, -1, 0.5, 0.5, -1, -1, 0.5, 0.5, -1, 1])
        >>> tuned = tune(train, (x, 0.2 * x), {"lr": (0.01, 0.1, 0.3), "kl_weight": (1, 3, 10)})
        >>> tuned
                  lr  kl_weight   score  standard error  paired error
        -------------------------------------------------------------
                0.01          3  0.9203          0.0004        0.0004
                 0.1          1  0.9194          0.0001        0.0001
        chosen   0.1          3  0.9190          0.0000        0.0000
                 0.1         10  0.9201          0.0003        0.0003
                 0.3          3  0.9207          0.0005        0.0005
        >>> tuned.settings
        {'lr': 0.1, 'kl_weight': 3}
        >>> dvi.predict(tuned.model, tuned.guide, x).mean.shape
        torch.Size([10])
    """
    check_count("max_trainings", max_trainings)
    lists = _lists(space)
    planned = max_trainings if sampler else 1 + sum(len(values) - 1 for values in lists.values())
    if planned > max_trainings:
        raise ArgumentError(
            f"these lists need {planned} trainings, more than max_trainings={max_trainings}: allow more, shorten the "
            "lists, or pass a sampler of Optuna"
        )
    path = None if storage is None else Path(storage)
    recorded = {} if path is None else read_results(path, list(lists), seed)
    with progress_bar(progress, planned, unit="training") as bar:
        score = score or partial(_nll, seed=seed)
        done = Trainings(train, validation, lists, score, seed, path, recorded, bar)
        if sampler is None:
            one_after_the_other(done, max_trainings - planned)
        else:
            as_proposed(done, sampler, max_trainings)
    if not done.scores:
        listed = "; ".join(f"{', '.join(map(_text, key))}: {why}" for key, why in done.failures.items())
        raise NonFiniteError(
            f"every training has failed ({listed}). Run train alone with one of these settings until it works; "
            "where it diverges, lower the learning rate, first of the posterior scales, or train in float64"
        ) from done.cause
    chosen = done.choice()
    for i, (name, value) in enumerate(zip(lists, chosen, strict=True)):
        if (following := done.beyond(i)) is not None:
            warn(
                f"the best {name}, {value:g}, is at an end of the values that were tried: try {following:g} as well "
                f"(add it to the list of {name}, or allow more trainings with max_trainings)"
            )
        if name in TEMPERATURES and are_numbers(lists[name]) and value < _COLD:
            warn(
                f"the chosen {name}, {value:g}, is below {_COLD:g}: almost nothing Bayesian is left, the posterior is "
                "close to a point. Compare it with MAP, and with the scores of larger values in the table"
            )
    posterior = done.posteriors.get(chosen) or done.posterior(chosen)
    posterior.put_back()
    return Tuned(done.named(chosen), posterior.model, posterior.guide, *done.table())


def _lists(space: Any) -> dict[str, list[Any]]:
    """Return the values of each setting: numbers ascending, others in their order."""
    if not isinstance(space, Mapping):
        raise ArgumentError(
            f'space must map settings to their values, as {{"lr": (0.01, 0.1)}}, not {space!r}'
        )
    lists: dict[str, list[Any]] = {}
    if not space:
        raise ArgumentError('space is empty: name the settings and their values, as {"lr": (0.01, 0.1)}')
    for name, values in space.items():
        own = [] if isinstance(values, str) else list(dict.fromkeys(values))
        fine = (math.isfinite(v) if isinstance(v, Real) else isinstance(v, str | None) for v in own)
        if not own or not all(fine) or name in _SCORES:
            raise ArgumentError(
                f"setting {name!r} needs a list of finite numbers, or of strings, booleans and None, and no name of "
                f"{_SCORES}; it is {values!r}. Name other objects by strings, and look them up inside train"
            )
        kind = int if all(isinstance(value, Integral) for value in own) else float
        lists[name] = sorted(map(kind, own)) if are_numbers(own) else own
    return lists


def _nll(model: Any, guide: Any, validation: Any, seed: int) -> Tensor:
    """Return the negative log-likelihood of each row; its mean is that of all observations that are not masked."""
    prediction = predict(model, guide, validation, seed=seed)
    values = -prediction.log_likelihood().detach().cpu().double().reshape(len(prediction), -1)
    counts = torch.ones_like(values).bool()
    if prediction.mask is not None:
        missing = prediction.mask.dim() - prediction.log_likelihood().dim()
        counts = with_any(prediction.mask, missing).cpu().reshape(len(prediction), -1)
    return values.where(counts, 0).sum(1)[counts.any(1)] * (float(counts.any(1).sum()) / float(counts.sum()))


def _text(value: Any) -> str:
    return f"{value:g}" if are_numbers([value]) else str(value)
