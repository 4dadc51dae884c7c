# SPDX-License-Identifier: Apache-2.0
"""Settings of a training run, chosen on validation data: the search, the training runs and the choice."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

import pyro
import torch
from torch import Tensor, linalg

from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.densities import with_any
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import Columns, InNotebook
from pyro_dvi.errors import ArgumentError, NonFiniteError, PyroDviError, warn
from pyro_dvi.predictive.predict import predict
from pyro_dvi.training.ensemble import TrainedPosterior, train_apart
from pyro_dvi.training.history import Table
from pyro_dvi.training.random_state import preserve_random_state

if TYPE_CHECKING:
    from optuna import Study

__all__ = ["Tuned", "tune"]

Key = tuple[Any, ...]  # the values of all settings, in the order of their names

_TEMPERATURES = ("temperature", "kl_weight")
_SCORES = ("score", "standard_error", "paired_standard_error")
_NUMERICAL = (ValueError, ArithmeticError, linalg.LinAlgError)  # type: ignore[attr-defined]


@dataclass(frozen=True, repr=False)
class Tuned(InNotebook):
    """The chosen settings, their posterior, and the scores of all training runs; ``print`` shows them as a table.

    Attributes:
        settings: the chosen settings, by name.
        model: the model that was trained with them.
        guide: its posterior.
        table: a row for each training run. The columns are the settings; ``score`` (lower is better; NaN for a failed
            run); ``standard_error``; and ``paired_standard_error`` of the difference from the lowest score. Standard
            errors are over validation rows, and NaN if the score is a single number.
        failures: for each failed training run, the row of the table and the reason for the failure.
    """

    settings: dict[str, Any]
    model: Any
    guide: Any
    table: Table
    failures: dict[int, str]

    def __repr__(self) -> str:
        lowest = min(score for score in self.table["score"] if score == score)
        rows = []
        for row, (*values, score, error, paired) in enumerate(zip(*self.table.values(), strict=True)):
            is_chosen = values == list(self.settings.values())
            note = "chosen" if is_chosen else "lowest score" if score == lowest else ""
            note = f"failed: {self.failures[row]}" if row in self.failures else note
            numbers = ("-" if number != number else f"{number:.4f}" for number in (score, error, paired))
            rows.append((note, *map(_text, values), *numbers))
        return str(Columns(("", *self.settings, "score", "standard error", "paired error"), rows))


def tune(
    train: Callable[..., tuple[Any, Any]],
    validation: Any,
    space: Mapping[str, Iterable[Any]],
    *,
    max_trainings: int = 12,
    score: Callable[[Any, Any, Any], Any] | None = None,
    seed: int = 0,
    study: "Study | None" = None,
    progress: bool = True,
) -> Tuned:
    r"""Train with several settings, and keep the posterior that predicts the validation data best.

    .. math::
        \hat s = \arg\min_s \bar\ell(s), \qquad
        \bar\ell(s) = -\frac1n \sum_{i=1}^n \log p(y_i \mid x_i, q_s)

    **Search.** The lists of ``space`` are searched one after another: every value of a list is tried, while the other
    settings keep the best values found so far, at first the middle of their lists. A sensible order is step size, decay
    of the step size, temperature: a temperature that is chosen first would compensate for a badly chosen step size. If
    the best value is at an end of a list of positive numbers, the search continues beyond the end with the ratios of
    the list (0.03, 0.1, 0.3 is followed by 1; integers remain integers), unless the curve is flat there, with training
    runs that later lists do not need. Then neighbours of the best values are tried, until none is better or no training
    runs remain. If an Optuna ``study`` is given, it proposes all settings jointly instead.

    **Choice.** The settings with the lowest mean score are chosen. If a setting is called ``temperature`` or
    ``kl_weight``, a larger value may then replace the best one, while the other settings keep their best values. It is
    the largest value whose score is within one paired standard error of the lowest score,

    .. math::
        \bar\ell(s) - \bar\ell(\hat s) \le \operatorname{sd}_i\left(\ell_i(s) - \ell_i(\hat s)\right) / \sqrt n,

    because the curve is often flat, and a larger value keeps more of the posterior uncertainty. If the score is a
    single number, there is no standard error, and the lowest score is chosen.

    Each training run starts with the same seed and an empty parameter store. Afterwards, Pyro's store contains the
    parameters of the chosen posterior, and the global random state is restored. A training run that diverges keeps its
    row in the table.

    Status: approximate. ``tune`` does not try all combinations. Expect a higher (worse) score on new data, because the
    settings were chosen by their score on the validation data.

    Args:
        train: function that is called with the names of ``space`` as keywords. It builds and trains a model and its
            guide with any method, and returns ``(model, guide)``. Each call must build or copy its networks.
        validation: inputs with observations that ``train`` does not use, as for :func:`~pyro_dvi.predict`.
        space: for each setting, a list of numbers; or a list of strings, booleans and None, which has no order.
        max_trainings: maximum number of training runs; with a ``study``, of trials that have a score.
        score: function of model, guide and validation data. It returns a single number, or a vector with one number per
            row of the data; lower is better. By default, the negative log-likelihood of each row with ``predict``.
        seed: seed of every training run.
        study: Optuna study that minimises the score (``python -m pip install optuna``). Its sampler proposes settings,
            with the values as categories. A study with a storage keeps the scores of finished training runs, and
            another call with this study continues from them; the chosen settings are trained again if necessary.
        progress: show a progress bar in a terminal or notebook.

    Returns:
        The chosen settings, their model and guide, and the table of all training runs.

    Raises:
        ArgumentError: if a list cannot be searched, if the lists need more than ``max_trainings``, if ``train`` uses
            one network in several training runs, or if ``score`` returns different numbers of rows.
        NonFiniteError: if all training runs have failed.

    Warns:
        DviWarning: if the best value is still at an end of a list of positive numbers, with the next value to try.

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
        >>> tune(train, (x, 0.2 * x), {"lr": (0.01, 0.1, 0.3), "kl_weight": (1, 3, 10)})
                  lr  kl_weight   score  standard error  paired error
        -------------------------------------------------------------
                0.01          3  0.9203          0.0004        0.0004
                 0.1          1  0.9194          0.0001        0.0001
        chosen   0.1          3  0.9190          0.0000        0.0000
                 0.1         10  0.9201          0.0003        0.0003
                 0.3          3  0.9207          0.0005        0.0005
    """
    check_count("max_trainings", max_trainings)
    lists = _lists(space)
    planned = max_trainings if study else 1 + sum(len(values) - 1 for values in lists.values())
    if planned > max_trainings:
        raise ArgumentError(
            f"these lists need {planned} training runs, more than max_trainings={max_trainings}: raise max_trainings, "
            "shorten the lists, or pass an Optuna study"
        )
    with progress_bar(progress, planned, unit="training") as bar:
        done = _Trainings(train, validation, lists, score or partial(_nll, seed=seed), seed, bar)
        if study is None:
            done.one_after_the_other(max_trainings - planned)
        else:
            done.as_proposed(study, max_trainings)
    if not done.scores:
        listed = "; ".join(f"{', '.join(map(_text, key))}: {why}" for key, why in done.failures.items())
        raise NonFiniteError(
            f"every training run has failed ({listed}). First make train work with one of these settings. If training "
            "diverges, lower the learning rate (of the posterior scales first), or train in float64"
        ) from done.cause
    chosen = done.choice()
    for i, (name, value) in enumerate(zip(lists, chosen, strict=True)):
        if (following := done.beyond(i)) is not None:
            warn(
                f"the best {name}, {value:g}, is the smallest or largest value that was tried. Try {following:g} too: "
                f"add it to the list of {name}, or allow more training runs with max_trainings"
            )
    posterior = done.posteriors.get(chosen) or done.posterior(chosen)
    posterior.put_back()
    return Tuned(dict(zip(lists, chosen, strict=True)), posterior.model, posterior.guide, *done.table())


@dataclass
class _Trainings:
    """Training runs, by the values of the settings."""

    train: Callable[..., tuple[Any, Any]]
    validation: Any
    lists: dict[str, list[Any]]
    score: Callable[[Any, Any, Any], Any]
    seed: int
    bar: Any
    scores: dict[Key, Tensor] = field(default_factory=dict)
    failures: dict[Key, str] = field(default_factory=dict)  # reasons
    posteriors: dict[Key, TrainedPosterior] = field(default_factory=dict)  # posteriors that may be chosen
    cause: Exception | None = None

    def one_after_the_other(self, spare: int) -> None:
        """Search one list after another; spare runs extend lists beyond their ends, then try neighbours of the best."""
        best, searched = tuple(values[(len(values) - 1) // 2] for values in self.lists.values()), None
        while searched != best:
            again, searched = searched is not None, best
            for i, values in enumerate(self.lists.values()):
                for value in self._neighbours(i) if again else values:
                    if again and not spare:
                        return
                    spare -= self.add(_with_value(best, i, value)) and again
                best = self.choice() if self.scores else best
                while spare and (following := self.beyond(i)) is not None:
                    self.add(_with_value(best, i, following))
                    best, spare = self.choice(), spare - 1

    def as_proposed(self, study: "Study", max_trainings: int) -> None:
        """Train with the settings that an Optuna study proposes, after reading the results of its finished trials."""
        for trial in study.trials:
            if "score" in trial.user_attrs:
                key = tuple(trial.params[name] for name in self.lists)
                self.scores[key] = torch.tensor(trial.user_attrs["score"], dtype=torch.double)

        def objective(trial: Any) -> float:
            key = tuple(trial.suggest_categorical(name, values) for name, values in self.lists.items())
            self.add(key)
            if key not in self.scores:
                return math.nan
            trial.set_user_attr("score", self.scores[key].tolist())
            return float(self.scores[key].mean())

        study.optimize(objective, max(0, max_trainings - len(self.scores)))

    def add(self, key: Key) -> bool:
        """Train with these settings, unless the result is known already; return True if it was not."""
        if key in self.scores or key in self.failures:
            return False
        try:
            self.posteriors[key] = posterior = self.posterior(key)
            with preserve_random_state(self.validation), posterior.in_store():
                pyro.set_rng_seed(self.seed)
                result = _as_score(self.score(posterior.model, posterior.guide, self.validation))
            if not result.mean().isfinite():
                raise NonFiniteError(f"the score is {float(result.mean())}")
            self.scores[key] = result
        except _NUMERICAL as error:
            is_mistake = isinstance(error, PyroDviError) and not isinstance(error, ArithmeticError)
            if is_mistake and all(v in own for v, own in zip(key, self.lists.values(), strict=True)):
                raise  # only a value added beyond the end of its list may be invalid
            self.cause, self.failures[key] = error, str(error).split("\n")[0].split(". ")[0]
        if len({rows.shape for rows in self.scores.values()}) > 1:
            raise ArgumentError(
                "the scores of two training runs have different shapes: score must return one number per row of the "
                "same validation data, in the same order"
            )
        close = self._close()
        self.posteriors = {k: kept for k, kept in self.posteriors.items() if k in close}
        self.bar.total = max(self.bar.total, self.bar.n + 1)
        self.bar.update()
        return True

    def posterior(self, key: Key) -> TrainedPosterior:
        """Train with these settings, and return the posterior."""
        settings = dict(zip(self.lists, key, strict=True))
        return train_apart(partial(self.train, **settings), self.seed, self.posteriors.values())

    def _ordered(self, i: int) -> list[Any]:
        """Return all values of a setting, listed or tried, in ascending order."""
        return sorted({*list(self.lists.values())[i], *(key[i] for key in (*self.scores, *self.failures))})

    def _neighbours(self, i: int) -> list[Any]:
        """Return the values that are next to the chosen value of a setting; all values if the setting has no order."""
        values, chosen = list(self.lists.values())[i], self.choice()[i]
        if not _are_numbers(values):
            return values
        ordered = self._ordered(i)
        place = ordered.index(chosen)
        return ordered[max(0, place - 1) : place] + ordered[place + 1 : place + 2]

    def _best(self) -> Key:
        """Return the settings with the lowest mean score."""
        return min(self.scores, key=lambda key: float(self.scores[key].mean()))

    def _close(self) -> list[Key]:
        """Return the best settings, and all settings whose score is within one paired standard error of the best."""
        best = self._best() if self.scores else ()
        gaps = {key: rows - self.scores[best] for key, rows in self.scores.items()}
        return [key for key, gap in gaps.items() if key == best or float(gap.mean()) <= _standard_error(gap)]

    def choice(self) -> Key:
        """Return the best settings, but with the largest temperature that is within one paired standard error."""
        chosen = self._best()
        for i, (name, values) in enumerate(self.lists.items()):
            if name in _TEMPERATURES and _are_numbers(values):
                same = [key for key in self._close() if _with_value(key, i, chosen[i]) == chosen]
                chosen = max(same, key=lambda key, i=i: key[i])  # type: ignore[misc]
        return chosen

    def beyond(self, i: int) -> float | None:
        """Return the next value beyond an end of a list, if the best value is at this end and the curve is not flat."""
        values = list(self.lists.values())[i]
        if not self.scores or self._best()[i] != self.choice()[i] or not _are_numbers(values):
            return None
        ordered = self._ordered(i)
        if self._best()[i] == ordered[-1]:
            ordered.reverse()
        if self._best()[i] != ordered[0] or len(ordered) < 2 or min(ordered) <= 0:
            return None
        first, second, *rest = ordered
        gain = self.scores.get(_with_value(self._best(), i, second), math.nan) - self.scores[self._best()]
        if float(gain.mean()) <= _standard_error(gain):
            return None  # the curve is flat there
        # Two steps of 0.03, 0.1, 0.3 are a factor of ten.
        following = first * (second / rest[0] if rest else first / second)
        following = round(following) if isinstance(values[0], int) else float(f"{following:.6g}")
        return None if following in (0, first) else following

    def table(self) -> tuple[Table, dict[int, str]]:
        """Return a table with one row per training run, in the order of the lists, and the failures' reasons by row."""
        keys = sorted([*self.scores, *self.failures], key=self._places)
        results = [self.scores.get(key, torch.tensor(math.nan)) for key in keys]
        table = Table(zip(self.lists, map(list, zip(*keys, strict=True)), strict=True))
        table["score"] = [float(rows.mean()) for rows in results]
        table["standard_error"] = list(map(_standard_error, results))
        table["paired_standard_error"] = [
            _standard_error(rows - self.scores[self._best()]) for rows in results
        ]
        return table, {row: self.failures[key] for row, key in enumerate(keys) if key in self.failures}

    def _places(self, key: Key) -> list[Any]:
        pairs = zip(key, self.lists.values(), strict=True)
        return [v if _are_numbers(own) else own.index(v) for v, own in pairs]


def _lists(space: Any) -> dict[str, list[Any]]:
    """Return the values of each setting: numbers in ascending order, other values in the given order."""
    lists: dict[str, list[Any]] = {}
    for name, values in space.items():
        own = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
        fine = (math.isfinite(v) if isinstance(v, Real) else isinstance(v, str | None) for v in own)
        if not own or not all(fine) or not isinstance(name, str) or name in _SCORES:
            raise ArgumentError(
                f"setting {name!r} with values {values!r} cannot be tuned. Values must be a list of finite numbers, "
                f"strings (for other objects), booleans or None, and the names {_SCORES} are reserved"
            )
        own = list(dict.fromkeys(own))
        kind = int if all(isinstance(value, Integral) for value in own) else float
        lists[name] = sorted(map(kind, own)) if _are_numbers(own) else own
    return lists


def _nll(model: Any, guide: Any, validation: Any, seed: int) -> Tensor:
    """Return the negative log-likelihood of each row; the mean over rows is that over all unmasked observations."""
    prediction = predict(model, guide, validation, seed=seed, progress=False)
    values = -prediction.log_likelihood().detach().cpu().double().reshape(len(prediction), -1)
    counts = torch.ones_like(values).bool()
    if prediction.mask is not None:
        missing = prediction.mask.dim() - prediction.log_likelihood().dim()
        counts = with_any(prediction.mask, missing).cpu().reshape(len(prediction), -1)
    return values.where(counts, 0).sum(1)[counts.any(1)] * (float(counts.any(1).sum()) / float(counts.sum()))


def _text(value: Any) -> str:
    return f"{value:g}" if _are_numbers([value]) else str(value)


def _as_score(value: Any) -> Tensor:
    """Return the score in double precision: a single number, or a vector with one number per row."""
    value = value if hasattr(value, "__len__") else float(value)
    found = torch.as_tensor(value, dtype=torch.double, device="cpu").detach()
    if found.dim() > 1 or not found.numel():
        raise ArgumentError(
            f"score must return a single number or a vector of one number per row, not shape {tuple(found.shape)}"
        )
    return found


def _are_numbers(values: list[Any]) -> bool:
    """Return True if all values are numbers, which have an order."""
    return all(isinstance(value, Real) and not isinstance(value, bool) for value in values)


def _standard_error(rows: Tensor) -> float:
    """Return the standard error of the mean; NaN for a single number."""
    return float(rows.std()) / math.sqrt(len(rows)) if rows.numel() > 1 else math.nan


def _with_value(key: Key, i: int, value: Any) -> Key:
    """Return the settings with the value of setting i replaced."""
    return (*key[:i], value, *key[i + 1 :])
