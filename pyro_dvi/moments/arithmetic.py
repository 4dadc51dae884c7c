# SPDX-License-Identifier: Apache-2.0
r"""Sums and products of elements.

Two different objects are taken as independent; an object with itself is not: ``x + x`` is ``2 * x``, ``x - x`` is
zero, ``x * x`` is ``x.square()``. Views count as different objects.
"""

from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, loc_of, second_moment_of, variance_of


def promoted(loc: Tensor, variance: Tensor) -> GaussianMoments:
    """Return moments whose variance follows the dtype of the mean, as certain operands may raise it."""
    return GaussianMoments(loc, variance if variance.dtype is loc.dtype else variance.to(loc.dtype))


def squarable(factor: Any, like: Tensor) -> Any:
    """A certain factor whose square does not overflow, as that of a small integer would."""
    if isinstance(factor, int | float) or (isinstance(factor, Tensor) and factor.is_floating_point()):
        return factor
    return torch.as_tensor(factor, dtype=like.dtype, device=like.device)


@moment_rule(torch.add, kind=Kind.AFFINE)
def add(input: Any, other: Any, *, alpha: float = 1) -> GaussianMoments:
    r"""Moments of :math:`x + \alpha y`.

    Status: exact for independent x and y, and for the same object twice.
    """
    if input is other:
        return GaussianMoments((1 + alpha) * input.loc, (1 + alpha) ** 2 * input.variance)
    loc = torch.add(loc_of(input), loc_of(other), alpha=alpha)
    first, second = variance_of(input), variance_of(other)
    if second is None:
        return promoted(loc, first)
    if first is None:
        return promoted(loc, second if alpha == 1 else alpha**2 * second)
    return promoted(loc, torch.add(first, second, alpha=alpha**2))


@moment_rule(torch.sub, torch.subtract, kind=Kind.AFFINE)
def sub(input: Any, other: Any, *, alpha: float = 1) -> GaussianMoments:
    r"""Moments of :math:`x - \alpha y`.

    Status: exact for independent x and y, and for the same object twice.
    """
    return add(input, other, alpha=-alpha)


@moment_rule(torch.rsub, kind=Kind.AFFINE)
def rsub(input: Any, other: Any, *, alpha: float = 1) -> GaussianMoments:
    r"""Moments of :math:`y - \alpha x`."""
    return add(other, input, alpha=-alpha)


@moment_rule(torch.neg, torch.negative, kind=Kind.AFFINE)
def neg(input: GaussianMoments) -> GaussianMoments:
    """Moments of ``-x``."""
    return GaussianMoments(-input.loc, input.variance)


@moment_rule(torch.mul, torch.multiply, kind=Kind.AFFINE)
def mul(input: Any, other: Any) -> GaussianMoments:
    r"""Moments of a product.

    .. math:: \mathrm E[xy] = m_x m_y, \qquad \mathrm{Var}[xy] = m_x^2 v_y + v_x (m_y^2 + v_y)

    Status: exact moments for independent x and y, and for the same object twice. The product of two Gaussians is not
    Gaussian; that of a Gaussian and a certain number is.

    Example:
        >>> x, y = (GaussianMoments(torch.ones(1), torch.ones(1)) for _ in range(2))
        >>> (x * y).variance, (x * x).variance
        (tensor([3.]), tensor([6.]))
    """
    if input is other:
        return square(input)
    if not isinstance(input, GaussianMoments):
        input, other = other, input
    if not isinstance(other, GaussianMoments):
        loc = torch.mul(input.loc, other)
        other = squarable(other, loc)
        return promoted(loc, input.variance * (other * other))
    spread = input.loc.square() * other.variance + input.variance * second_moment_of(other)
    return promoted(input.loc * other.loc, spread)


@moment_rule(torch.square, kind=Kind.ELEMENTWISE)
def square(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of :math:`x^2`: :math:`m^2 + v` and :math:`2v(v + 2m^2)`.

    Status: exact for Gaussian x.
    """
    m2, v = input.loc.square(), input.variance
    return GaussianMoments(m2 + v, 2 * v * torch.add(v, m2, alpha=2))


@moment_rule(torch.addcmul)
def addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> GaussianMoments:
    r"""Moments of :math:`x + c\,y\,z`.

    Status: exact for independent factors, and where x is y.
    """
    if input is tensor1 and isinstance(input, GaussianMoments):
        return times(input, plus(1, times(tensor2, value)))
    return plus(input, times(times(tensor1, tensor2), value))


@moment_rule(torch.lerp)
def lerp(input: Any, end: Any, weight: Any) -> GaussianMoments:
    r"""Moments of :math:`(1 - w) x + w y`.

    Status: exact for independent x and y and certain w.
    """
    if isinstance(weight, GaussianMoments):
        raise UnsupportedError(
            "torch.lerp has no rule for an uncertain weight: write start + weight * (end - start)"
        )
    if input is end:
        return input.snapshot()
    return plus(times(input, 1 - weight), times(end, weight))


def plus(x: Any, y: Any) -> Any:
    """Return the sum of two things, of which any may be uncertain."""
    return add(x, y) if isinstance(x, GaussianMoments) or isinstance(y, GaussianMoments) else x + y


def times(x: Any, y: Any) -> Any:
    """Return the product of two things, of which any may be uncertain."""
    return mul(x, y) if isinstance(x, GaussianMoments) or isinstance(y, GaussianMoments) else x * y
