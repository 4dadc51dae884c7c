# SPDX-License-Identifier: Apache-2.0
"""Training runs with their settings and scores, the file that stores them, and the choice of the best settings.

The file has one line of JSON per training run; an interrupted search continues from it.
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor, linalg

from pyro_dvi.errors import ArgumentError, CheckpointError, NonFiniteError, PyroDviError
from pyro_dvi.training.ensemble import TrainedPosterior, train_apart
from pyro_dvi.training.history import Table
from pyro_dvi.training.random_state import preserve_random_state

Key = tuple[Any, ...]  # the values of all settings, in the order of their names

TEMPERATURES = ("temperature", "kl_weight")
_BEGINNING = '{"settings": '  # beginning of every line of the file
_NUMERICAL = (ValueError, ArithmeticError, linalg.LinAlgError)  # type: ignore[attr-defined]


@dataclass
class Trainings:
    """Training runs, by the values of the settings."""

    train: Callable[..., tuple[Any, Any]]
    validation: Any
    lists: dict[str, list[Any]]
    score: Callable[[Any, Any, Any], Any]
    seed: int
    path: Path | None
    recorded: dict[Key, Tensor | str]  # results read from the file: scores, or reasons for failures
    bar: Any
    results: dict[Key, Tensor | str] = field(default_factory=dict)
    posteriors: dict[Key, TrainedPosterior] = field(default_factory=dict)  # posteriors that may be chosen
    cause: Exception | None = None

    def add(self, key: Key) -> None:
        """Train with these settings, unless the result is known already."""
        if key in self.results:
            return
        self.results[key] = result = self.recorded[key] if key in self.recorded else self._trained(key)
        if len({tuple(rows.shape) for rows in self.scores.values()}) > 1:
            raise ArgumentError(
                "the scores of two training runs have different shapes: score must return one number per row of the "
                "same validation data, in the same order. For other data, choose another path for storage"
            )
        if self.path is not None and key not in self.recorded:
            write_result(self.path, self.named(key), self.seed, result)
        close = self.close()
        self.posteriors = {
            k: kept for k, kept in self.posteriors.items() if k in close or k not in self.results
        }
        self.bar.total = max(self.bar.total, self.bar.n + 1)
        self.bar.update()

    def repeat_best(self) -> None:
        """Repeat the best training run in the file: its score shows whether the file belongs to this training.

        Raises:
            CheckpointError: if the score is another one.
        """
        file = replace(self, results=self.recorded)
        if not file.scores:
            return
        key = file.best()
        before, now = file.scores[key], self._trained(key)
        if isinstance(now, Tensor) and now.shape == before.shape:
            gap, size = now - before, float(before.abs().mean())
            # On accelerators, a repeated training run differs a little.
            if abs(float(gap.mean())) <= max(0.01 * size, 2 * standard_error(gap)):
                return
        new = now if isinstance(now, str) else f"{float(now.mean()):.4g}"
        raise CheckpointError(
            f"{self.path} contains the score {float(before.mean()):.4g} for {self.named(key)}, but a repetition gives "
            f"{new}: the file belongs to another training (epochs, data, model, score). Choose another path for storage"
        )

    def _trained(self, key: Key) -> Tensor | str:
        """Train with these settings; return the score, or the reason for a failure."""
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
                raise  # only a value added beyond the end of its list may be invalid
            self.cause = error
            return str(error).split("\n")[0].split(". ")[0]
        self.posteriors[key] = posterior
        return result

    def posterior(self, key: Key) -> TrainedPosterior:
        """Train with these settings, and return the posterior."""
        return train_apart(partial(self.train, **self.named(key)), self.seed, self.posteriors.values())

    def named(self, key: Key) -> dict[str, Any]:
        """Return the settings by name."""
        return dict(zip(self.lists, key, strict=True))

    def is_listed(self, key: Key) -> bool:
        """Return True if every value is in the original list of its setting, not added beyond an end of it."""
        return all(value in values for value, values in zip(key, self.lists.values(), strict=True))

    @property
    def scores(self) -> dict[Key, Tensor]:
        """The scores of the training runs that did not fail."""
        return {key: found for key, found in self.results.items() if isinstance(found, Tensor)}

    @property
    def failures(self) -> dict[Key, str]:
        """The reasons for failures."""
        return {key: found for key, found in self.results.items() if isinstance(found, str)}

    def _ordered(self, i: int) -> list[Any]:
        """Return all values of a setting, listed or tried, in ascending order."""
        return sorted({*list(self.lists.values())[i], *(key[i] for key in self.results)})

    def neighbours(self, i: int) -> list[Any]:
        """Return the values that are next to the chosen value of a setting; all values if the setting has no order."""
        values, chosen = list(self.lists.values())[i], self.choice()[i]
        if not are_numbers(values):
            return values
        ordered = self._ordered(i)
        place = ordered.index(chosen)
        return ordered[max(0, place - 1) : place] + ordered[place + 1 : place + 2]

    def best(self) -> Key:
        """Return the settings with the lowest mean score."""
        return min(self.scores, key=lambda key: float(self.scores[key].mean()))

    def close(self) -> list[Key]:
        """Return the best settings, and all settings whose score is within one paired standard error of the best."""
        best = self.best() if self.scores else ()
        gaps = {key: rows - self.scores[best] for key, rows in self.scores.items()}
        return [key for key, gap in gaps.items() if key == best or float(gap.mean()) <= standard_error(gap)]

    def choice(self) -> Key:
        """Return the best settings, but with the largest temperature that is within one paired standard error."""
        chosen = self.best()
        for i, (name, values) in enumerate(self.lists.items()):
            if name in TEMPERATURES and are_numbers(values):
                same = [key for key in self.close() if with_value(key, i, chosen[i]) == chosen]
                chosen = max(same, key=lambda key, i=i: key[i])  # type: ignore[misc]
        return chosen

    def beyond(self, i: int) -> float | None:
        """Return the next value beyond an end of a list, if the best value is at this end and the curve is not flat."""
        values = list(self.lists.values())[i]
        if not self.scores or self.best()[i] != self.choice()[i] or not are_numbers(values):
            return None
        ordered = self._ordered(i)
        if self.best()[i] == ordered[-1]:
            ordered.reverse()
        if self.best()[i] != ordered[0] or len(ordered) < 2:
            return None
        first, second, *rest = ordered
        gain = self.scores.get(with_value(self.best(), i, second), math.nan) - self.scores[self.best()]
        if float(gain.mean()) <= standard_error(gain):
            return None  # the curve is flat there
        even = bool(rest) and math.isclose(first - second, second - rest[0])
        if abs(first) > abs(second) and (even or min(ordered[:3]) <= 0):  # for example 0, 0.1, 0.2
            following = 2 * first - second
        elif min(ordered[:3]) > 0:
            # Two steps of 0.03, 0.1, 0.3 are a factor of ten.
            step = first / second if not rest else second / rest[0]
            following = first * step
        else:
            return None  # an end at zero is intended
        following = round(following) if isinstance(values[0], int) else float(f"{following:.6g}")
        return None if following in (0, first) else following

    def table(self) -> tuple[Table, dict[int, str]]:
        """Return a table with one row per training run, in the order of the lists, and the failures' reasons by row."""
        keys = sorted(self.results, key=self._places)
        results = [self.scores.get(key, torch.tensor(math.nan)) for key in keys]
        table = Table(zip(self.lists, map(list, zip(*keys, strict=True)), strict=True))
        table["score"] = [float(rows.mean()) for rows in results]
        table["standard_error"] = list(map(standard_error, results))
        table["paired_standard_error"] = [standard_error(rows - self.scores[self.best()]) for rows in results]
        return table, {row: self.failures[key] for row, key in enumerate(keys) if key in self.failures}

    def _places(self, key: Key) -> list[Any]:
        lists = self.lists.values()
        return [v if are_numbers(own) else own.index(v) for v, own in zip(key, lists, strict=True)]


def read_results(path: Path, lists: dict[str, list[Any]], seed: int) -> dict[Key, Tensor | str]:
    """Return a mapping from values of the settings to the score of the training run, or to the reason why it failed.

    An incomplete line is ignored.

    Raises:
        CheckpointError: if the file belongs to other settings or another seed, or does not contain results.
    """
    path.touch()  # an invalid path fails here, before the first training run
    found: dict[Key, Tensor | str] = {}
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            row = json.loads(line)
            settings, failure = dict(row["settings"]), row.get("failure")
            key = tuple(settings.pop(name) for name in lists)
            numbers = [v for v, own in zip(key, lists.values(), strict=True) if are_numbers(own)]
            score = as_score(0.0 if isinstance(failure, str) else row["score"])
            if settings or row["seed"] != seed or not (are_numbers(numbers) and score.mean().isfinite()):
                raise ValueError
            found[key] = failure if isinstance(failure, str) else score
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, json.JSONDecodeError) and _BEGINNING.startswith(line[: len(_BEGINNING)]):
                continue
            raise CheckpointError(
                f"{path} contains a line that is not a training run of this search (seed {seed}, settings "
                f"{', '.join(lists)}): {line[:100]}. Choose another path for storage"
            ) from error
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    return found


def write_result(path: Path, settings: dict[str, Any], seed: int, result: Tensor | str) -> None:
    """Append a result to the file."""
    found = {"failure": result} if isinstance(result, str) else {"score": result.tolist()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"settings": settings, "seed": seed, **found}) + "\n")


def as_score(value: Any) -> Tensor:
    """Return the score in double precision: a single number, or a vector with one number per row.

    Raises:
        ArgumentError: if the score has any other shape.
    """
    value = value if hasattr(value, "__len__") else float(value)
    found = torch.as_tensor(value, dtype=torch.double, device="cpu").detach()
    if found.dim() > 1 or not found.numel():
        raise ArgumentError(
            f"score must return a single number or a vector of one number per row, not shape {tuple(found.shape)}"
        )
    return found


def are_numbers(values: list[Any]) -> bool:
    """Return True if all values are numbers, which have an order."""
    return all(isinstance(value, Real) and not isinstance(value, bool) for value in values)


def standard_error(rows: Tensor) -> float:
    """Return the standard error of the mean; NaN for a single number."""
    return float(rows.std()) / math.sqrt(len(rows)) if rows.numel() > 1 else math.nan


def with_value(key: Key, i: int, value: Any) -> Key:
    """Return the settings with the value of setting i replaced."""
    return (*key[:i], value, *key[i + 1 :])
