# SPDX-License-Identifier: Apache-2.0
"""Settings of a training, chosen on validation data."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyro
import torch
from torch import Tensor, linalg

from pyro_dvi.analysis.tuning_storage import Key, as_score, read_results, write_result
from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import Columns, Report
from pyro_dvi.errors import ArgumentError, NonFiniteError, PyroDviError, warn
from pyro_dvi.predictive.predict import predict
from pyro_dvi.training.ensemble import TrainedPosterior, train_apart
from pyro_dvi.training.history import Table
from pyro_dvi.training.random_state import preserve_random_state

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

__all__ = ["Tuned", "tune"]

_NUMERICAL = (ValueError, ArithmeticError, linalg.LinAlgError)  # type: ignore[attr-defined]
_TEMPERATURES, _COLD = ("temperature", "kl_weight"), 1e-3
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
    an end of its list, the search goes on beyond it by the pattern of the steps (0.1, 0.3 is followed by 1), as long as
    trainings are left that later lists do not need; whole numbers stay whole. Then neighbours of the best values are
    tried in the same order, until none is better or no trainings are left. A ``sampler`` proposes all at once.

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
        DviWarning: the best value is still at an end of its list, with the next value to try; or the chosen
            ``temperature`` or ``kl_weight`` is below 0.001.

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
        done = _Trainings(train, validation, lists, score, seed, path, recorded, bar)
        if sampler is None:
            _one_after_the_other(done, max_trainings - planned)
        else:
            _as_proposed(done, sampler, max_trainings)
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
        if name in _TEMPERATURES and _are_numbers(lists[name]) and value < _COLD:
            warn(
                f"the chosen {name}, {value:g}, is below {_COLD:g}: almost nothing Bayesian is left, the posterior is "
                "close to a point. Compare it with MAP, and with the scores of larger values in the table"
            )
    posterior = done.posteriors.get(chosen) or done.posterior(chosen)
    posterior.put_back()
    return Tuned(done.named(chosen), posterior.model, posterior.guide, *done.table())


@dataclass
class _Trainings:
    """What was trained, by the values of the settings."""

    train: Callable[..., tuple[Any, Any]]
    validation: Any
    lists: dict[str, list[Any]]
    score: Callable[[Any, Any, Any], Any]
    seed: int
    path: Path | None
    recorded: dict[Key, Tensor | str]  # what the file held at first: scores, or why a training failed
    bar: Any
    scores: dict[Key, Tensor] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)
    posteriors: dict[Key, TrainedPosterior] = field(default_factory=dict)  # those that may be chosen
    cause: Exception | None = None

    def add(self, key: Key) -> None:
        """Train with these settings, unless this is done or in the file."""
        if key in self.scores or key in self.failures:
            return
        result = self.recorded[key] if key in self.recorded else self._trained(key)
        of_kind: dict[Key, Any] = self.failures if isinstance(result, str) else self.scores
        of_kind[key] = result
        if len({tuple(rows.shape) for rows in self.scores.values()}) > 1:
            raise ArgumentError(
                "the scores of two trainings have different shapes: score must return one number for each row of the "
                "same validation data, in the same order; for other data choose another storage"
            )
        if self.path is not None and key not in self.recorded:
            write_result(self.path, self.named(key), self.seed, result)
        close = self.close()
        self.posteriors = {one: kept for one, kept in self.posteriors.items() if one in close}
        self.bar.total = max(self.bar.total, self.bar.n + 1)
        self.bar.update()

    def _trained(self, key: Key) -> Tensor | str:
        """Train and return the score, or why it failed."""
        try:
            posterior = self.posterior(key)
            with preserve_random_state(self.validation), posterior.in_store():
                pyro.set_rng_seed(self.seed)
                result = as_score(self.score(posterior.model, posterior.guide, self.validation))
            if not result.mean().isfinite():
                raise NonFiniteError(f"the score is {float(result.mean())}")
        except _NUMERICAL as error:
            is_mistake = isinstance(error, PyroDviError) and not isinstance(error, ArithmeticError)
            if is_mistake and self.is_listed(key):
                raise  # beyond the end of its list, a value may be one that cannot be
            self.cause = error
            return str(error).split("\n")[0].split(". ")[0]
        self.posteriors[key] = posterior
        return result

    def posterior(self, key: Key) -> TrainedPosterior:
        return train_apart(partial(self.train, **self.named(key)), self.seed, self.posteriors.values())

    def named(self, key: Key) -> dict[str, Any]:
        return dict(zip(self.lists, key, strict=True))

    def is_listed(self, key: Key) -> bool:
        return all(value in values for value, values in zip(key, self.lists.values(), strict=True))

    @property
    def known(self) -> list[Key]:
        """The settings that were trained with."""
        return [*self.scores, *self.failures]

    def neighbours(self, i: int) -> list[Any]:
        """Return the values of a setting beside the one that is chosen; all of a setting without an order."""
        values, chosen = list(self.lists.values())[i], self.choice()[i]
        if not _are_numbers(values):
            return values
        ordered = sorted({*values, *(key[i] for key in self.known)})
        place = ordered.index(chosen)
        return ordered[max(0, place - 1) : place] + ordered[place + 1 : place + 2]

    def best(self) -> Key:
        """Return the settings with the lowest mean score."""
        return min(self.scores, key=lambda key: float(self.scores[key].mean()))

    def close(self) -> list[Key]:
        """Return the best and all settings within one paired standard error of it."""
        best = self.best() if self.scores else ()
        gaps = {key: rows - self.scores[best] for key, rows in self.scores.items()}
        return [key for key, gap in gaps.items() if key == best or float(gap.mean()) <= _standard_error(gap)]

    def choice(self) -> Key:
        """Return the best settings, with the largest temperature that is close."""
        chosen = self.best()
        for i, (name, values) in enumerate(self.lists.items()):
            if name in _TEMPERATURES and _are_numbers(values):
                same = [key for key in self.close() if _with(key, i, chosen[i]) == chosen]
                chosen = max(same, key=lambda key, i=i: key[i])  # type: ignore[misc]
        return chosen

    def beyond(self, i: int) -> float | None:
        """Return the next value of a setting beyond the end where the best is, if it is at one and not on a plateau."""
        values = list(self.lists.values())[i]
        if not self.scores or self.best()[i] != self.choice()[i] or not _are_numbers(values):
            return None
        ordered = sorted({*values, *(key[i] for key in self.known)})
        if self.best()[i] == ordered[-1]:
            ordered.reverse()
        if self.best()[i] != ordered[0] or len(ordered) < 2 or min(ordered[:3]) <= 0:
            return None
        first, second, *rest = ordered
        gain = self.scores.get(_with(self.best(), i, second), math.nan) - self.scores[self.best()]
        if float(gain.mean()) <= _standard_error(gain):
            return None  # the curve is flat there
        step = first / second if not rest else second / rest[0]  # of 0.03, 0.1, 0.3 two make a decade
        following = round(first * step) if isinstance(values[0], int) else float(f"{first * step:.6g}")
        return None if following in (0, first) else following

    def table(self) -> tuple[Table, dict[int, str]]:
        """Return a row for each training, in the order of the lists, and why trainings failed, by row."""
        keys = sorted(self.known, key=self._places)
        results = [self.scores.get(key, torch.tensor(math.nan)) for key in keys]
        table = Table(zip(self.lists, map(list, zip(*keys, strict=True)), strict=True))
        table["score"] = [float(rows.mean()) for rows in results]
        table["standard_error"] = list(map(_standard_error, results))
        table["paired_standard_error"] = [
            _standard_error(rows - self.scores[self.best()]) for rows in results
        ]
        return table, {row: self.failures[key] for row, key in enumerate(keys) if key in self.failures}

    def _places(self, key: Key) -> list[Any]:
        lists = self.lists.values()
        return [v if _are_numbers(own) else own.index(v) for v, own in zip(key, lists, strict=True)]


def _one_after_the_other(done: _Trainings, spare: int) -> None:
    """Search one list after the other; with the trainings to spare beyond ends, and again around the best."""
    best, searched = tuple(values[(len(values) - 1) // 2] for values in done.lists.values()), None
    while searched != best:
        again, searched = searched is not None, best
        for i, values in enumerate(done.lists.values()):
            for value in done.neighbours(i) if again else values:
                if again and not spare:
                    return
                spare -= again and _with(best, i, value) not in done.known
                done.add(_with(best, i, value))
            best = done.choice() if done.scores else best
            while spare and (following := done.beyond(i)) is not None:
                done.add(_with(best, i, following))
                best, spare = done.choice(), spare - 1


def _as_proposed(done: _Trainings, sampler: Any, max_trainings: int) -> None:
    """Train with what a sampler of Optuna proposes, after it has been told what the file holds."""
    import optuna

    check_choice("sampler", sampler, optuna.samplers.BaseSampler, "optuna.samplers.TPESampler(seed=0)")

    def objective(trial: Any) -> float:
        key = tuple(trial.suggest_categorical(name, values) for name, values in done.lists.items())
        done.add(key)
        if len(done.scores) + len(done.failures) >= max_trainings:
            trial.study.stop()
        return float(done.scores[key].mean()) if key in done.scores else math.nan

    study = optuna.create_study(sampler=sampler)
    for key in filter(done.is_listed, done.recorded):
        study.enqueue_trial(done.named(key))
    study.optimize(objective, n_trials=len(done.recorded) + max_trainings)


def _lists(space: Any) -> dict[str, list[Any]]:
    """Return the values of each setting: numbers ascending, others in their order."""
    if not isinstance(space, Mapping):
        raise ArgumentError(
            f'space must map settings to their values, as {{"lr": (0.01, 0.1)}}, not {space!r}'
        )
    lists: dict[str, list[Any]] = {}
    for name, values in space.items():
        own = [] if isinstance(values, str) else list(dict.fromkeys(values))
        fine = (math.isfinite(v) if isinstance(v, Real) else isinstance(v, str | None) for v in own)
        if not own or not all(fine) or name in _SCORES:
            raise ArgumentError(
                f"setting {name!r} needs a list of finite numbers, or of strings, booleans and None, and no name of "
                f"{_SCORES}; it is {values!r}. Name other objects by strings, and look them up inside train"
            )
        kind = int if all(isinstance(value, Integral) for value in own) else float
        lists[name] = sorted(map(kind, own)) if _are_numbers(own) else own
    return lists


def _are_numbers(values: list[Any]) -> bool:
    return all(isinstance(value, Real) and not isinstance(value, bool) for value in values)


def _nll(model: Any, guide: Any, validation: Any, seed: int) -> Tensor:
    """Return the negative log-likelihood of each row; its mean is that of all observations that are not masked."""
    prediction = predict(model, guide, validation, seed=seed)
    values = -prediction.log_likelihood().detach().cpu().double().reshape(len(prediction), -1)
    counts = torch.full_like(values, prediction.mask is None).bool() | ~values.isnan()
    return values.where(counts, 0).sum(1)[counts.any(1)] * (float(counts.any(1).sum()) / float(counts.sum()))


def _standard_error(rows: Tensor) -> float:
    """Return the standard error of the mean; NaN for one number."""
    return float(rows.std()) / math.sqrt(len(rows)) if rows.numel() > 1 else math.nan


def _with(key: Key, i: int, value: Any) -> Key:
    return (*key[:i], value, *key[i + 1 :])


def _text(value: Any) -> str:
    return f"{value:g}" if _are_numbers([value]) else str(value)
