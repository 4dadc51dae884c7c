# SPDX-License-Identifier: Apache-2.0
"""Whether the rows of a layer are those of single examples."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node


def row_weights(count: int, like: Tensor, seed: int = 0) -> Tensor:
    r"""Return a weight c for each row, by which :func:`kept_apart` sees whether rows depend on each other.

    They are powers of two of both signs, so that multiplying by them rounds nothing. Up to 32 rows have 32 different
    weights; of more rows, any two have different ones with probability 31/32.

    Args:
        count: the number of rows.
        like: of the type and on the device that the weights shall have.
        seed: of the order of the weights.
    """
    places = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % 32
    return (torch.exp2(places // 2 - 8.0) * (1 - 2 * (places % 2))).to(like)


def kept_apart(plain: Tensor, weighted: Tensor, weights: Tensor) -> Tensor:
    r"""Whether no row of a gradient comes from the output of another row, a boolean scalar.

    With :math:`M_{jb}` for what output j adds to row b, rows that come from their own outputs alone are multiplied by
    the weights of these, and others are not,

    .. math:: \delta_b(c) - c_b\,\delta_b(1) = \sum_j (c_j - c_b)\, M_{jb} .

    Args:
        plain: :math:`\delta(1)`, the gradient of the sum of the outputs, ``[B, ...]``.
        weighted: :math:`\delta(c)`, that of their weighted sum.
        weights: c, from :func:`row_weights`.
    """
    if not plain.numel():
        return torch.ones((), dtype=torch.bool, device=plain.device)
    plain, weighted = (d.reshape(len(d), -1) for d in (plain, weighted))
    expected = plain * weights.to(plain).unsqueeze(1)
    error, size = (d.abs().amax(1) for d in (weighted - expected, expected))
    # Two different weights differ by half of either at least; without an influence of others only sums in a random
    # order, as on devices, and numbers too small for their type are rounded.
    rounding = torch.finfo(plain.dtype).eps
    return ~(error > rounding**0.5 * size + rounding**2 * plain.abs().max()).any()  # NaN shows nothing


def mixed_rows(places: Sequence[Any], outputs: Tensor, seed: int = 0) -> set[int]:
    r"""Return which of ``places`` have rows that other examples than their own depend on.

    Costs two backward passes. An example that alone reads a single other one is overlooked with probability 1/32 among
    more than 32 examples, n such pairs with probability :math:`32^{-n}`.
    Batch normalisation in training mode mixes all rows: ask under :func:`constant_statistics`.

    Args:
        places: tensors or edges of the graph with examples in their first dimension.
        outputs: f, one entry for each of B examples.
        seed: of the order of the weights, so that another look sees what the first has overlooked.
    """
    if not places or not outputs.requires_grad or len(outputs) < 2:
        return set()
    weights = row_weights(len(outputs), outputs, seed)
    plain, weighted = (
        torch.autograd.grad(outputs, places, seeds, retain_graph=True, allow_unused=True)
        for seeds in (torch.ones_like(outputs), weights)
    )
    reached = [n for n, d in enumerate(plain) if d is not None]
    if not reached:
        return set()
    apart = torch.stack([kept_apart(plain[n], weighted[n], weights) for n in reached]).tolist()
    return {n for n, alone in zip(reached, apart, strict=True) if not alone}


@contextmanager
def constant_statistics(normalised: Iterable[tuple[Node, Tensor]]) -> Iterator[None]:
    """Let no gradient pass through the statistics of batch normalisation in training mode.

    Its weight is left out, too, which keeps no rows apart.

    Args:
        normalised: places in the graph, with what was normalised there.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]], requires_grad=True)
        >>> y = torch.nn.functional.batch_norm(x, None, None, training=True)
        >>> with constant_statistics([(y.grad_fn, x)]):
        ...     torch.autograd.grad(y[0, 0], x)[0][1]
        tensor([0.])
    """
    handles = [node.register_hook(partial(_divided, x)) for node, x in normalised]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _divided(x: Tensor, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]) -> tuple | None:
    """The gradient of an output, divided by the standard deviation of its channel, for that of the input ``x``."""
    if inputs[0] is None:
        return None
    variance = x.detach().var([k for k in range(x.dim()) if k != 1], correction=0, keepdim=True)
    return (outputs[0].to(x.dtype) * (variance + 1e-5).rsqrt(), *inputs[1:])
