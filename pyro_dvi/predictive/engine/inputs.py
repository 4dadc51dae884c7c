# SPDX-License-Identifier: Apache-2.0
"""Batches for prediction, split into the inputs of the model and its observation."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from pyro_dvi.core.arguments import by_own_names, check_count, keyword_only, positional, takes_any_number
from pyro_dvi.core.batches import mapped, row_sampler, tensors_in
from pyro_dvi.errors import ArgumentError, DataError


@dataclass(frozen=True)
class Batch:
    """Arguments of one call of the model.

    Attributes:
        inputs: positional arguments, with None in place of the observation.
        observed: the observation (the first one, if there are several); None if the data do not contain it.
        num_rows: number of examples.
        start: index of the batch's first example in the data set.
        complete: positional and keyword arguments of a call in which the model sees the observations.
        mask: True for observed values that the model does not mask, with the shape of one draw; None if it masks none.
        varies: True if the model masks or reshapes the observation; it may do so differently for another batch.
    """

    inputs: tuple[Any, ...]
    observed: Tensor | None
    num_rows: int
    start: int
    complete: tuple[tuple[Any, ...], dict[str, Any]] = ((), {})
    mask: Tensor | None = None
    varies: bool = True

    @property
    def whole(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a call in which the model sees the observations, if there are any."""
        return (self.inputs, {}) if self.observed is None else self.complete


def batches(
    model: Callable[..., Any],
    data: Any,
    *,
    observed: str | Sequence[str] | None = None,
    batch_size: int = 1000,
    device: torch.device | None = None,
    sites: Callable[[Batch], Collection[str]] = lambda batch: (),
) -> Iterator[Batch]:
    """Split ``data`` into batches, and separate the observations from the inputs.

    Args:
        model: the Pyro model, whose signature determines which argument is the observation.
        data: a tensor; a tuple or mapping of the model's arguments; or a loader of any of these.
        observed: name or names of the observed arguments. By default, it is the argument whose default value is None,
            as in ``forward(x, y=None)``. If there are several such arguments, those with the names of ``sites`` are
            used, or else the last one, provided that the data contain all of them.
        batch_size: examples per batch, for tensors; a loader has its own batch size.
        device: device to which tensors are moved.
        sites: returns the candidate observed sites, given a batch in which all arguments that may be observations are
            treated as observations.

    Raises:
        ArgumentError: if ``batch_size`` or ``observed`` is invalid, or several arguments may be the observation.
        DataError: if the data contain no examples, tensors of different lengths, NaN, or only some of the observations,
            or are not a tensor, tuple, mapping or loader.
    """
    check_count("batch_size", batch_size)
    taken = _Arguments(model)
    start = 0

    def moved(batch: Batch) -> Batch:  # after the checks, which then need no synchronisation
        there: dict[int, Tensor] = {}  # a tensor that occurs twice remains one tensor
        return mapped(lambda v: there.setdefault(id(v), v.to(device)) if torch.is_tensor(v) else v, batch)

    for args in taken.split(data, batch_size):
        places, held = taken.observations(args, observed)
        names = [taken.names[i] for i in places]
        if observed is None and held and len(places) > 1:
            called = sites(moved(taken.batch(args, held, start)))
            held = [i for i in held if taken.names[i] in called]
            if not held:
                raise ArgumentError(
                    f"any of the arguments {names} may be the observation: name it, as in observed={names[-1]!r}"
                )
        elif 0 < len(held) < len(places):
            missing = [taken.names[i] for i in places if i not in held]
            raise DataError(
                f"the data contain some observations but not {missing}: pass all observations, or inputs alone"
            )
        batch = taken.batch(args, held, start)
        yield moved(batch)
        start += batch.num_rows
    if start == 0:
        raise DataError("the data contain no examples to predict")


def keeps_order(data: Any) -> bool:
    """Return True if examples come in the order of the data, that is, unless a loader may change the order."""
    return not isinstance(data, DataLoader) or type(row_sampler(data)) is SequentialSampler


class _Arguments:
    """The arguments of a model: first those that can be passed by position, then keyword-only arguments."""

    def __init__(self, model: Callable[..., Any]) -> None:
        parameters = positional(model)
        self.by_name, self.count = keyword_only(model), len(parameters)
        self.names = [p.name for p in parameters] + self.by_name
        self._optional = [i for i, p in enumerate(parameters) if p.default is None]
        self._any_number = takes_any_number(model)
        self._own_names = partial(by_own_names, model)

    def split(self, data: Any, batch_size: int) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of every batch, in the order of the model's signature."""
        if torch.is_tensor(data):
            data = (data,)
        elif isinstance(data, list) and not _holds_batches(data):
            kinds = {(v.dtype, v.shape[1:]) if torch.is_tensor(v) else None for v in data}
            data = tuple(data) if len(kinds) > 1 or len(data) == 1 else data  # one batch of a loader
        if isinstance(data, (tuple, Mapping)):
            data = self._in_order(data)
            rows = _rows(data, "the data contain no tensor of examples: pass tensors as x, (x,) or (x, y)")
            for i in range(0, rows, batch_size):
                yield mapped(partial(_rows_at, slice(i, i + batch_size)), data)
        elif isinstance(data, DataLoader) or _holds_batches(data):
            for batch in data:
                yield self._in_order((batch,) if torch.is_tensor(batch) else batch)
        else:
            raise DataError(
                f"the data are of type {type(data).__name__}: pass a tensor (torch.as_tensor), tuple(batch) or a loader"
            )

    def observations(
        self, args: tuple[Any, ...], observed: str | Sequence[str] | None
    ) -> tuple[list[int], list[int]]:
        """Return the positions of all arguments that are or may be observations, and of those that the data contain."""
        if observed is not None:
            asked = [observed] if isinstance(observed, str) else list(observed)
            places = [self.names.index(name) for name in asked]
        else:
            by_name = range(self.count, len(self.names)) if len(args) > self.count else ()
            last = [len(args) - 1] if len(args) >= max(2, self.count) else []
            places = [*self._optional, *by_name] or last
        return places, [i for i in places if i < len(args) and args[i] is not None]

    def batch(self, args: tuple[Any, ...], held: Collection[int], start: int) -> Batch:
        """Return a batch with the arguments at the positions ``held`` as observations."""
        inputs = tuple(None if i in held else a for i, a in enumerate(args))
        if by_name := [n for n, v in zip(self.by_name, inputs[self.count :], strict=False) if v is not None]:
            raise DataError(
                f"the arguments {by_name} of the model are keyword-only, but predictions pass inputs by position. Move "
                f"the * in the signature behind these arguments; for an observation, pass observed={by_name[0]!r}"
            )
        while inputs and inputs[-1] is None:  # left to the model's default; see with_missing
            inputs = inputs[:-1]
        targets = [args[i] for i in held]
        for i, value in enumerate(inputs):
            _check(f"input {i}", value)
        for value in targets:
            _check("the observation", value, is_tensor=True)
        _rows(inputs, "a batch contains no input tensor with one row per example")
        rows = _rows((*inputs, *targets))
        named = {n: v for n, v in zip(self.by_name, args[self.count :], strict=False) if v is not None}
        whole = args[: self.count] if self.by_name else args, named
        return Batch(inputs, targets[0] if targets else None, rows, start, whole)

    def _in_order(self, batch: Any) -> tuple[Any, ...]:
        if isinstance(batch, (tuple, list)):
            if len(batch) > len(self.names) and not self._any_number:
                raise DataError(f"the data have {len(batch)} entries for the arguments {self.names}")
            return tuple(batch)
        if not isinstance(batch, Mapping):
            raise DataError(f"batches are of type {type(batch).__name__}, not tensors, tuples or mappings")
        batch = self._own_names(batch)
        if unknown := [name for name in batch if name not in self.names]:
            raise DataError(f"a batch has entries {unknown} beyond the model's arguments {self.names}")
        last = max((i for i, name in enumerate(self.names) if name in batch), default=-1)
        return tuple(batch.get(name) for name in self.names[: last + 1])


def _rows_at(place: slice, value: Any) -> Any:
    return value[place] if torch.is_tensor(value) and value.dim() > 0 else value


def _holds_batches(data: Any) -> bool:
    """Return True if an object of another type can be read like a DataLoader; a list of tensors would be ambiguous."""
    if isinstance(data, list):
        return not any(torch.is_tensor(batch) for batch in data)
    return isinstance(data, Iterable) and not isinstance(data, (str, bytes)) and not hasattr(data, "dtype")


def _check(what: str, value: Any, *, is_tensor: bool = False) -> None:
    if isinstance(value, np.ndarray) or (is_tensor and not isinstance(value, Tensor)):
        raise DataError(f"{what} is of type {type(value).__name__}: convert it with torch.as_tensor")
    for tensor in () if is_tensor else tensors_in(value):  # NaN may stand for missing observations
        if tensor.is_floating_point() and tensor.isnan().any():
            raise DataError(
                f"{what} (shape {tuple(tensor.shape)}) contains {int(tensor.isnan().sum())} NaN: drop these rows"
            )


def _rows(values: Any, none: str = "") -> int:
    """Return the common number of rows of all tensors; ``none`` is the error message if no tensor has rows."""
    rows = [tensor.shape[0] for tensor in tensors_in(values) if tensor.dim() > 0]
    if not rows:
        raise DataError(none)
    if len(set(rows)) > 1:
        raise DataError(f"the tensors of a batch have {rows} rows: every tensor needs one row per example")
    return int(rows[0])
