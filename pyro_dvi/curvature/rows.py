# SPDX-License-Identifier: Apache-2.0
"""Whether the rows of a layer are those of single examples."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["ConstantStatistics", "bits_of_rows", "halves", "mixed_rows"]


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
        if func is F.batch_norm:
            return _of_module(*args, **kwargs)
        return _of_torch(*args, **kwargs) if func is torch.batch_norm else func(*args, **kwargs)


def _of_module(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        dims = [k for k in range(input.dim()) if k != 1]
        like = input if weight is None else weight  # which is wider than the input under autocast
        running_var, running_mean = torch.var_mean(input.detach().to(like.dtype), dims, correction=0)
    return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)


def _of_torch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return _of_module(input, running_mean, running_var, weight, bias, training, momentum, eps)
