# SPDX-License-Identifier: Apache-2.0
"""Whether the rows of a layer are those of single examples."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["ConstantStatistics", "bits_of_rows", "halves", "mixed_rows"]

_BATCH_NORM = inspect.signature(F.batch_norm)
_OF_TORCH = "input weight bias running_mean running_var training momentum eps cudnn_enabled".split()


def halves(count: int, device: torch.device | None = None) -> list[Tensor]:
    """Return the first half of that many rows, and every other row: two subsets that tell most mixtures of rows."""
    rows = torch.arange(count, device=device)
    return [rows < count // 2, rows % 2 == 0]


def bits_of_rows(count: int, device: torch.device | None = None) -> list[Tensor]:
    """Return the rows whose number has a certain bit, and those that have it not, for each bit.

    Two rows differ in some bit: for any of them, some subset has the one and not the other.
    """
    rows = torch.arange(count, device=device)
    having = [rows >> bit & 1 == 1 for bit in range((count - 1).bit_length())]
    return [part for with_bit in having for part in (with_bit, ~with_bit)]


def mixed_rows(places: Sequence[Any], outputs: Tensor, parts: Sequence[Tensor]) -> set[int]:
    r"""Return which of ``places`` have rows that other examples than their own depend on.

    A part of the examples must reach none of the rows outside that part. With :func:`bits_of_rows` any example that
    reaches the row of another is found, at :math:`2 \log_2 B` backward passes; with :func:`halves` most are, at two.
    Batch normalisation in training mode mixes all rows: run the model under ``ConstantStatistics`` for this question.

    Args:
        places: tensors or edges of the graph with examples in their first dimension.
        outputs: f, one entry for each of B examples.
        parts: subsets of the examples, as masks.
    """
    if not places or not outputs.requires_grad:
        return set()
    # Unequal weights, under which what two examples do to a third does not cancel by symmetry.
    weights = torch.linspace(1, 2, len(outputs), device=outputs.device)
    found: set[int] = set()
    for part in parts:
        seeds = (part * weights).to(outputs)
        deltas = torch.autograd.grad(outputs, places, seeds, retain_graph=True, allow_unused=True)
        reached = [(n, d[~part].count_nonzero()) for n, d in enumerate(deltas) if d is not None]
        found |= {n for n, foreign in reached if foreign > 0}
    return found


class ConstantStatistics(TorchFunctionMode):
    """Let no gradient pass through the statistics of batch normalisation in training mode.

    Values are those of the plain function; running statistics stay as they are.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]], requires_grad=True)
        >>> with ConstantStatistics():
        ...     y = F.batch_norm(x, None, None, training=True)
        >>> torch.autograd.grad(y[0, 0], x)[0][1]
        tensor([0.])
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.batch_norm:
            kwargs = dict(zip(_OF_TORCH, args, strict=False)) | kwargs
            func, args = F.batch_norm, ()
            kwargs.pop("cudnn_enabled", None)
        if func is not F.batch_norm:
            return func(*args, **kwargs)
        arguments = _BATCH_NORM.bind(*args, **kwargs).arguments
        if arguments.get("training"):
            x, weight = arguments["input"].detach(), arguments.get("weight")
            if weight is not None:
                x = x.to(weight.dtype)  # which is wider than the input under autocast
            variance, mean = torch.var_mean(x, [k for k in range(x.dim()) if k != 1], correction=0)
            arguments |= {"running_mean": mean, "running_var": variance, "training": False}
        return F.batch_norm(**arguments)
