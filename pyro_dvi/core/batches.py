# SPDX-License-Identifier: Apache-2.0
"""The batches of a loader, and the arguments of model and guide in a batch."""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, SequentialSampler, WeightedRandomSampler

from pyro_dvi.errors import ArgumentError, DataError


def arguments(batch: Any, device: torch.device | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Split a batch into positional and keyword arguments, and move its tensors.

    A tuple or list becomes positional arguments, a mapping becomes keyword arguments, and anything else becomes the
    only argument.

    Example:
        >>> arguments([torch.zeros(2), torch.ones(2)], None)
        ((tensor([0., 0.]), tensor([1., 1.])), {})
        >>> arguments({"x": torch.zeros(1)}, None)
        ((), {'x': tensor([0.])})
    """
    if isinstance(batch, Mapping):
        return (), {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, (tuple, list)):
        return tuple(_moved(value, device) for value in batch), {}
    return (_moved(batch, device),), {}


def check_loader(loader: Any, passes: int, role: str = "loader") -> None:
    """Raise an error for a loader that cannot be iterated ``passes`` times.

    Raises:
        ArgumentError: if the loader is not iterable, or is a batch instead of batches.
        DataError: if the loader is empty, or is an iterator that ends after one pass.
    """
    if isinstance(loader, Tensor):
        raise ArgumentError(
            f"{role} is a tensor, whose rows would be treated as batches: pass a DataLoader, or [(x, y)] for one batch"
        )
    if isinstance(loader, (tuple, list)) and loader and all(isinstance(part, Tensor) for part in loader):
        # Tensors of one kind in a list may be batches for a model with one argument.
        if isinstance(loader, tuple) or len({(part.ndim, part.dtype) for part in loader}) > 1:
            raise ArgumentError(
                f"{role} is a {type(loader).__name__} of tensors, which is one batch: pass [(x, y)], or a DataLoader."
            )
    if not isinstance(loader, Iterable):
        raise ArgumentError(
            f"{role} must yield batches (a DataLoader, a list of tuples), but is of type {type(loader).__name__}."
        )
    if isinstance(loader, Iterator) and passes > 1:
        raise DataError(
            f"{role} is an iterator ({type(loader).__name__}), which ends after one pass: pass a DataLoader, or a list"
        )
    if number_of_batches(loader) == 0:
        raise DataError(f"{role} is empty: it has no batches (too few examples for drop_last=True?)")


def number_of_batches(loader: Any) -> int | None:
    """Return the number of batches of one pass, or None if unknown."""
    try:
        return len(loader)
    except TypeError:
        return None


def row_sampler(loader: Any) -> Any:
    """Return the sampler that chooses the rows of a loader, or, if that is unknown, the sampler of its batches."""
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(loader, "sampler", None) if batches is None else batches
    return sampler.sampler if type(sampler) is BatchSampler else sampler


def dataset_size(loader: Any) -> int | None:
    """Return the number of examples from which a loader draws, or None if only an epoch shows it.

    Example:
        >>> from torch.utils.data import DataLoader
        >>> dataset_size(DataLoader(range(100), batch_size=2, sampler=[3, 5, 7]))
        3
    """
    sampler, batches = row_sampler(loader), getattr(loader, "batch_sampler", loader)
    in_order = isinstance(sampler, Sequence)
    if in_order and sampler is batches:
        return sum(map(len, sampler))
    own = not (in_order or sampler is None or type(sampler).__module__.startswith("torch."))
    if own or (
        batches is None and sampler is loader.sampler
    ):  # then, each entry of the data set may be a batch
        return None
    if type(sampler) is WeightedRandomSampler:
        return int((sampler.weights > 0).sum())
    # The rows from which torch's samplers draw, in all epochs together.
    sources = [getattr(sampler, name, None) for name in ("indices", "data_source", "dataset")]
    drawn = next((rows for rows in sources if rows is not None), getattr(loader, "dataset", None))
    rows: Any = sampler if in_order else drawn
    size = len(rows) if hasattr(rows, "__len__") else None
    if size and (in_order or type(sampler) is SequentialSampler) and getattr(batches, "drop_last", False):
        return size - size % batches.batch_size or size  # each epoch drops the same rows
    return size


def named_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model by name; positional arguments are numbered from 1."""
    return {**{f"argument {i}": value for i, value in enumerate(args, start=1)}, **kwargs}


def non_finite_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[str]:
    """Return descriptions of the arguments whose tensors contain NaN or infinities."""
    found = []
    for name, value in named_arguments(args, kwargs).items():
        tensors = [tensor for tensor in tensors_in(value) if is_strided(tensor)]
        if count := sum(int((~torch.isfinite(tensor)).sum()) for tensor in tensors):
            found.append(f"{name} ({count} of {sum(tensor.numel() for tensor in tensors)} elements)")
    return found


def is_strided(value: Any) -> bool:
    """Return True if a value is a dense tensor, neither sparse nor nested."""
    return isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Apply a function to everything in nested tuples, lists, mappings and data classes.

    Containers keep their types, because a model may check these types.

    Example:
        >>> mapped(abs, {"x": [-1, -2]})
        {'x': [1, 2]}
    """
    if isinstance(value, (tuple, list)):
        items = [mapped(function, item) for item in value]
        if hasattr(value, "_fields"):  # a named tuple
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, Mapping):
        entries = {key: mapped(function, item) for key, item in value.items()}
        if not isinstance(value, MutableMapping):
            return entries
        applied = copy.copy(value)
        applied.update(entries)
        return applied
    if is_dataclass(value) and not isinstance(value, type):
        return replace(
            value, **{f.name: mapped(function, getattr(value, f.name)) for f in fields(value) if f.init}
        )
    return function(value)


def tensors_in(value: Any) -> list[Tensor]:
    """Return the tensors in nested arguments, in the order of :func:`mapped`."""
    found: list[Tensor] = []

    def note(item: Any) -> Any:
        if isinstance(item, Tensor):
            found.append(item)
        return item

    mapped(note, value)
    return found


def with_rows(value: Any) -> Tensor | None:
    """Return the first tensor in nested arguments that has rows (they are the rows to count); None if there is none."""
    return next((tensor for tensor in tensors_in(value) if is_strided(tensor) and tensor.dim()), None)


def rows_cut(cut: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Apply a function to every tensor in nested arguments that has as many rows as the first tensor.

    Example:
        >>> rows_cut(lambda tensor: tensor[:1], (torch.ones(2), torch.zeros(2), torch.ones(3)))
        (tensor([1.]), tensor([0.]), tensor([1., 1., 1.]))
    """
    first = with_rows(value)
    return mapped(
        lambda v: cut(v) if first is not None and is_strided(v) and v.dim() and len(v) == len(first) else v,
        value,
    )


def _moved(value: Any, device: torch.device | None) -> Any:
    def moved(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=leaf.is_pinned())
        # Packed sequences and graph batches move themselves.
        return leaf.to(device) if callable(getattr(leaf, "to", None)) else leaf

    return value if device is None else mapped(moved, value)
