# SPDX-License-Identifier: Apache-2.0
r"""Sums, means, extremes and norms over dimensions.

The largest of many Gaussians has no closed form. As in max pooling, it is taken to be the element with the largest
mean, which is exact where one is clearly the largest; elsewhere the mean comes out too small.
"""

import math
from collections.abc import Callable
from typing import Any

import torch

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments


@moment_rule(torch.sum)
def sum(input: GaussianMoments, *args: Any, **kwargs: Any) -> GaussianMoments:
    """Moments of a sum over dimensions.

    Status: exact for independent elements.
    """
    return GaussianMoments(torch.sum(input.loc, *args, **kwargs), torch.sum(input.variance, *args, **kwargs))


@moment_rule(torch.mean)
def mean(input: GaussianMoments, *args: Any, **kwargs: Any) -> GaussianMoments:
    """Moments of a mean over n elements, whose variance is their mean variance over n.

    Status: exact for independent elements. Those of a feature map share weights and are not: the variance of a global
    average pool is then too small.
    """
    loc = torch.mean(input.loc, *args, **kwargs)
    number = input.loc.numel() / max(loc.numel(), 1)
    return GaussianMoments(loc, torch.mean(input.variance, *args, **kwargs) / number)


@moment_rule(torch.cumsum)
def cumsum(input: GaussianMoments, *args: Any, **kwargs: Any) -> GaussianMoments:
    """Moments of running sums.

    Status: exact marginals for independent elements; the sums are correlated, which is dropped.
    """
    return GaussianMoments(
        torch.cumsum(input.loc, *args, **kwargs), torch.cumsum(input.variance, *args, **kwargs)
    )


# Extremes ----------------------------------------------------------------------------------------------------


def _extreme(
    choose: Callable[..., Any], of_all: Callable[..., Any], of_two: Callable[..., Any]
) -> Callable[..., Any]:
    name = choose.__name__

    def extreme(input: Any, dim: Any = None, keepdim: bool = False, *, other: Any = None) -> Any:
        other = dim if other is None and not isinstance(dim, int) else other
        if other is not None:
            return of_two(input, other)
        if dim is None:
            return of_all(input)
        loc, index = choose(input.loc, dim, keepdim=True)
        values = GaussianMoments(loc, input.variance.gather(dim, index))
        if not keepdim:
            values, index = values.squeeze(dim), index.squeeze(dim)
        return getattr(torch.return_types, name)((values, index))

    extreme.__doc__ = f"""Moments of ``{name}``: over a dimension with the index of the {name} of the means, over all
    elements, or of two things.

    Status: over elements, those of the one with the {name} mean; of two things, that of ``{of_two.__name__}``.
    """
    return extreme


def _extreme_value(
    function: Callable[..., Any], choose: Callable[..., Any]
) -> Callable[..., GaussianMoments]:
    def extreme_value(input: GaussianMoments, dim: Any = (), keepdim: bool = False) -> GaussianMoments:
        dims = [dim] if isinstance(dim, int) else list(dim) or list(range(input.dim()))
        dims = [k % input.dim() for k in dims]
        kept = [k for k in range(input.dim()) if k not in dims]
        sizes = [input.shape[k] for k in kept]
        values: GaussianMoments = choose(input.permute(*kept, *dims).reshape(*sizes, -1), -1).values
        full = [1 if k in dims else size for k, size in enumerate(input.shape)]
        return values.reshape(full) if keepdim else values

    extreme_value.__doc__ = (
        f"Moments of the element whose mean is the ``{function.__name__}`` over dimensions."
    )
    return extreme_value


moment_rule(torch.max)(_extreme(torch.max, torch.amax, torch.maximum))
moment_rule(torch.min)(_extreme(torch.min, torch.amin, torch.minimum))
amax = moment_rule(torch.amax)(_extreme_value(torch.amax, torch.max))
amin = moment_rule(torch.amin)(_extreme_value(torch.amin, torch.min))


# Norms -------------------------------------------------------------------------------------------------------


@moment_rule(torch.linalg.vector_norm)
def vector_norm(
    x: GaussianMoments,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> GaussianMoments:
    r"""Moments of the norm of vectors.

    Of the Euclidean norm, with :math:`S = \sum_i x_i^2` and :math:`c^2 = \mathrm{Var}[S] / \mathrm E[S]^2 \le 2`,

    .. math::
        \mathrm E\lVert x\rVert = \sqrt{\mathrm E[S]}\,(1 - u), \qquad
        \mathrm{Var}\lVert x\rVert = \mathrm E[S]\,u(2 - u), \qquad
        u = \frac{c^2}8 - \frac{c^4}{128},

    the first terms of the series of a gamma variable S, which S is where all elements have mean 0 and one variance.

    Status: the Euclidean norm approximately, for independent elements with any noise: against sampling, means are
    within 5 % and deviations within 15 %, both exact to first order in the noise and for noise alone. The sum of
    absolute values is exact; the largest one is that of :func:`amax`.

    Args:
        x: the vectors.
        ord: 1, 2, or plus or minus infinity.
        dim: over which dimensions; all by default.
        keepdim: whether these stay, with size 1.
        dtype: that of the result.

    Raises:
        UnsupportedError: another norm.

    Example:
        >>> torch.linalg.vector_norm(
        ...     GaussianMoments(torch.tensor([3.0, 4.0]), torch.full((2,), 0.01))
        ... )
        GaussianMoments(loc=5.00100040435791, variance=0.009994005784392357)
    """
    x = x if dtype is None else x.to(dtype)
    dim = tuple(range(x.dim())) if dim is None else dim
    if ord == 1:
        return x.abs().sum(dim, keepdim)
    if abs(ord) == math.inf:
        return (amax if ord > 0 else amin)(x.abs(), dim, keepdim)
    if ord != 2:
        raise UnsupportedError(
            f"the norm of order {ord} of moments has no rule: orders 1, 2, inf and -inf have. Write x.abs() ** order"
        )
    squares = x.square().sum(dim, keepdim)
    mean = squares.loc.clamp_min(torch.finfo(x.dtype).tiny ** 0.5)
    c2 = squares.variance / mean / mean
    u = c2 / 8 * (1 - c2 / 16)
    return GaussianMoments(mean.sqrt() * (1 - u), mean * u * (2 - u))


@moment_rule(torch.linalg.norm)
def linalg_norm(
    A: GaussianMoments,
    ord: Any = None,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> GaussianMoments:
    """Moments of the norm of vectors, or the Frobenius norm of matrices. Status: that of :func:`vector_norm`.

    Raises:
        UnsupportedError: any other norm of a matrix.
    """
    is_matrix = isinstance(dim, tuple | list) or (dim is None and A.dim() == 2)
    if is_matrix and ord not in (None, "fro"):
        raise UnsupportedError(
            f"the norm of order {ord} of a matrix of moments has no rule: only the Frobenius norm has, and norms of "
            "its rows or columns (dim=1 or dim=0)"
        )
    return vector_norm(A, 2 if ord in (None, "fro") else ord, dim, keepdim, dtype=dtype)


@moment_rule(torch.norm)
def norm(
    input: GaussianMoments,
    p: Any = "fro",
    dim: Any = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
) -> GaussianMoments:
    """Moments of the norm of all elements, or over dimensions. Status: that of :func:`vector_norm`.

    Raises:
        UnsupportedError: the nuclear norm, or another order without a rule.
    """
    if p == "nuc":
        raise UnsupportedError("the nuclear norm of moments has no rule: only orders 1, 2, inf and -inf have")
    return vector_norm(input, 2 if p in (None, "fro") else p, dim, keepdim, dtype=dtype)
