# SPDX-License-Identifier: Apache-2.0
"""Batches of models that take their observations in one argument or in several."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.inference_data.names import listed
from pyro_dvi.predictive.batches import Batch, batches
from pyro_dvi.signatures import keyword_only, positional

__all__ = ["split_batches", "without_observation"]


@dataclass(frozen=True)
class _Separated(Batch):
    """A batch whose observations came in several arguments; ``complete`` are all of them, by position and name."""

    complete: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})

    def with_observation(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a call in which the model sees the observations."""
        return self.complete


def split_batches(
    model: Callable[..., Any],
    data: Any,
    observed: str | Sequence[str] | None,
    *,
    batch_size: int,
    device: torch.device | None,
) -> Iterator[Batch]:
    """Split data as :func:`~pyro_dvi.predictive.batches.batches` does, and set every observation apart.

    Raises:
        ArgumentError: an argument that the model does not have.
        DataError: the data hold only some of the observations.
    """
    if observed is None or isinstance(observed, str):
        yield from batches(model, data, observed=observed, batch_size=batch_size, device=device)
        return
    observed = listed("observed", observed)
    names = [p.name for p in positional(model)]
    every = [*names, *keyword_only(model)]
    for name in observed:
        if name not in every:
            raise ArgumentError(f"the model has no argument {name!r} to observe; it has {every}")
    if not observed:
        raise ArgumentError("observed=[] names no argument: leave it out where the data hold no observation")
    stand_in = _all_by_position(model)
    for batch in batches(stand_in, data, observed=observed[0], batch_size=batch_size, device=device):
        values = dict(zip(every, batch.inputs, strict=False))
        if by_name_only := [n for n in values if n not in (*names, *observed) and values[n] is not None]:
            raise DataError(
                f"the model takes {by_name_only} by name only, but inputs are passed by position: move the * of its "
                "signature behind them"
            )
        if batch.observed is not None:
            values[observed[0]] = batch.observed
        missing = [name for name in observed if values.get(name) is None]
        if missing and len(missing) < len(observed):
            raise DataError(
                f"the data hold some of the observations {list(observed)} but not {missing}: give all, or inputs alone"
            )
        inputs = [None if name in observed else values.get(name) for name in names]
        while inputs and inputs[-1] is None:
            inputs.pop()
        if missing:
            yield Batch(tuple(inputs), None, batch.num_rows, batch.start)
            continue
        by_name = {name: values[name] for name in observed if name not in names}
        complete = (tuple(values.get(name) for name in names if name in values), by_name)
        yield _Separated(
            tuple(inputs),
            batch.observed,
            batch.num_rows,
            batch.start,
            batch.observed_as,
            complete=complete,
        )


def _all_by_position(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return what stands for a model's signature, with arguments by position that the model takes by name only."""

    def stand_in(*args: Any) -> None: ...

    by_name = [
        inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None)
        for name in keyword_only(model)
    ]
    stand_in.__signature__ = inspect.Signature([*positional(model), *by_name])  # type: ignore[attr-defined]
    return stand_in


def without_observation(batch: Batch) -> Batch:
    """Return the inputs alone."""
    return Batch(batch.inputs, None, batch.num_rows, batch.start)
