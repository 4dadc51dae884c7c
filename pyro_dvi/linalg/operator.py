# SPDX-License-Identifier: Apache-2.0
"""Matrices that are known only by their products."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from pyro_dvi.errors import NonFiniteError

Operator = Callable[[Tensor], Tensor]
"""A symmetric matrix A as a function of rows: ``[S, D] -> [S, D]``, each row v to A v.

It is called in the gradient mode of the caller, so one that differentiates does so under ``torch.enable_grad``.
"""


def apply(operator: Operator, vectors: Tensor) -> Tensor:
    """Return the products ``[S, D]`` with the rows of ``vectors``, checked.

    Raises:
        NonFiniteError: a product is NaN or infinite.
    """
    products = operator(vectors).detach()
    if not bool(products.sum().isfinite()) and not bool(products.isfinite().all()):
        raise NonFiniteError(
            "the product of the operator with a finite vector is NaN or infinite; check the point at which the "
            "operator was built, or build it in float64"
        )
    return products.to(vectors)


def identity_rows(like: Tensor, at_once: int = 256) -> Iterator[Tensor]:
    """Give the rows of the identity ``[D, D]`` for a vector ``[D]``, at most ``at_once`` together."""
    size = len(like)
    for start in range(0, size, at_once):
        rows = like.new_zeros(min(at_once, size - start), size)
        rows.diagonal(start).fill_(1)
        yield rows


def gaussian_rows(count: int, dim: int, like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return standard normal rows ``[count, dim]`` with dtype and device of ``like``.

    They are drawn on the device of the generator, so that one seed gives the same rows everywhere. Without a generator
    the seed is fixed: the rows only have to be generic, and equal calls then give equal answers.
    """
    if generator is None:
        generator = torch.Generator().manual_seed(0)
    rows = torch.randn(count, dim, generator=generator, dtype=like.dtype, device=generator.device)
    return rows.to(like.device)
