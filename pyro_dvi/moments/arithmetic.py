# SPDX-License-Identifier: Apache-2.0
r"""Elementwise sums, products, quotients, powers, roots and logarithms.

Two different objects are treated as independent, but an object is not independent of itself: ``x + x`` is ``2 * x``,
``x - x`` is zero, ``x * x`` is ``x.square()``. Views count as different objects.

Quotients, powers and logarithms of a function of a Gaussian, such as ``softplus(h)``, are integrated over that Gaussian
(:func:`~pyro_dvi.moments.quadrature.through_link`). For a Gaussian itself, the moments of most of these functions do
not exist, because a Gaussian has mass outside their domain.

Division by a Gaussian, and powers of a Gaussian other than 2 and 3, are therefore expanded around the mean. The
expansion is accurate only if the standard deviation is small relative to the mean. At a coefficient of variation of
0.2, the standard deviation is wrong by 7 %; above 0.2, the rules raise an error. Logarithms use the tangent at the
mean,

.. math:: m = f(\mu), \qquad v = f'(\mu)^2\,\sigma^2.

Status: logarithms are exact to first order; the relative error of the variance is of the order of
:math:`\sigma^2/\mu^2`. For a mean outside the domain, the result is the value of the function there, nan or inf.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.recorder import is_recording
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Kind, broadcast
from pyro_dvi.moments.quadrature import through_link
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments, Link, loc_of, second_moment_of, variance_of


def promoted(loc: Tensor, variance: Tensor) -> GaussianMoments:
    """Return moments with the variance in the dtype of the mean; deterministic operands may have promoted the mean."""
    return GaussianMoments(loc, variance if variance.dtype is loc.dtype else variance.to(loc.dtype))


def squarable(factor: Any, like: Tensor) -> Any:
    """Return a deterministic factor, converted to floating point if the square of its integers could overflow."""
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
    Gaussian; the product of a Gaussian and a constant is.

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


_LARGEST_VARIATION = 0.2


@moment_rule(torch.div, torch.divide, torch.true_divide, kind=Kind.AFFINE)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> GaussianMoments:
    r"""Moments of a quotient.

    Status: exact for a deterministic denominator. For an uncertain denominator, see :func:`reciprocal`.

    Raises:
        UnsupportedError: for a rounding mode, or if the standard deviation of the denominator exceeds 0.2 times its
            mean.
    """
    if rounding_mode is not None:
        raise UnsupportedError(
            "torch.div with a rounding mode is a step function, for which moments have no rule: drop rounding_mode"
        )
    if input is other:
        return GaussianMoments(torch.ones_like(input.loc), torch.zeros_like(input.loc))
    if not isinstance(other, GaussianMoments):
        loc = torch.div(input.loc, other)
        other = squarable(other, loc)
        return promoted(loc, input.variance / (other * other))
    quotient = mul(input, reciprocal(other))
    if isinstance(input, GaussianMoments):
        return quotient
    uniform = not (isinstance(input, Tensor) and input.dim() > 0)
    inner = broadcast(other.snapshot(), quotient)
    return quotient.linked(Link(inner, partial(torch.div, input), uniform=uniform))


@moment_rule(torch.reciprocal, kind=Kind.ELEMENTWISE)
def reciprocal(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of :math:`1/x`.

    With :math:`c^2 = v/m^2`, the mean is :math:`(1 + c^2 + 3c^4)/m` and the variance is :math:`(c^2 + 8c^4)/m^2`.

    Status: expansion around the mean. At the largest c allowed, 0.2, the mean is 0.2 % too small and the standard
    deviation is 7 % too small; at 0.1, they are 0.002 % and 0.4 % too small.

    Raises:
        UnsupportedError: if c exceeds 0.2 anywhere (this check synchronises with a GPU).
    """
    return _expanded_power(input, -1.0)


@moment_rule(torch.pow, kind=Kind.ELEMENTWISE)
def pow(input: Any, exponent: Any) -> GaussianMoments:
    r"""Moments of :math:`x^p` for a deterministic exponent, or of :math:`b^x` for a deterministic base.

    Status: exact for p = 0, 1, 2, 3 and for a deterministic base. If x is a function of a Gaussian, such as
    ``softplus(h)``, other powers are computed by quadrature. Otherwise they are expanded around the mean, which for -1
    ≤ p ≤ 4 is at least as accurate as :func:`reciprocal`.

    Raises:
        UnsupportedError: if base and exponent are both uncertain, if the exponent differs between elements, or if the
            standard deviation exceeds 0.2 times the mean.
    """
    if not isinstance(input, GaussianMoments):
        base = torch.as_tensor(input, dtype=exponent.dtype, device=exponent.device)
        scaled: Any = mul(exponent, base.log())
        return scaled.exp()
    if isinstance(exponent, Tensor) and exponent.dim() == 0:
        exponent = exponent.item()
    if isinstance(exponent, GaussianMoments | Tensor):
        raise UnsupportedError(
            "torch.pow of moments needs a number as exponent, as in x ** 2: for others, write exp(exponent * log(x))"
        )
    if exponent == 0:
        return GaussianMoments(torch.ones_like(input.loc), torch.zeros_like(input.loc))
    if exponent == 1:
        return input.snapshot()
    if exponent == 2:
        return square(input)
    if exponent == 3:
        return _cube(input)
    return _expanded_power(input, float(exponent))


def _cube(x: GaussianMoments) -> GaussianMoments:
    m, v = x.loc, x.variance
    m2 = m.square()
    return GaussianMoments(m * torch.add(m2, v, alpha=3), v * (9 * m2.square() + v * (36 * m2 + 15 * v)))


def _can_be_expanded(m: Tensor, c2: Tensor, p: float) -> bool:
    return bool((c2 <= _LARGEST_VARIATION**2).all()) and (p.is_integer() or not bool((m <= 0).any()))


def _expanded_power(x: GaussianMoments, p: float) -> GaussianMoments:
    """Moments of a power: by quadrature if x is a function of a Gaussian, otherwise to fourth order in σ/μ."""
    linked = through_link(x, lambda value: value.pow(p))
    if linked is not None:
        return linked
    m = x.loc
    c2 = x.variance / m.square()
    if not is_recording() and not _can_be_expanded(m, c2, p):
        raise UnsupportedError(
            f"the power {p:g} of an uncertain x is expanded around the mean. This requires a positive mean or an "
            f"integer exponent, and a standard deviation of at most {_LARGEST_VARIATION} times the mean (here "
            f"{math.sqrt(c2.max().item()):.3g} times). Write x as exp(h) with a Gaussian h, and the power as "
            f"exp({p:g} * h); or take the power of x.loc, which ignores the uncertainty."
        )
    power = m.pow(p)
    second, fourth = p * (p - 1) / 2, p * (p - 1) * (p - 2) * (p - 3) / 8
    spread = p**2 * ((p - 1) ** 2 / 2 + (p - 1) * (p - 2))
    return GaussianMoments(
        power * (1 + c2 * (second + fourth * c2)), power.square() * c2 * (p**2 + spread * c2)
    )


@moment_rule(torch.log, kind=Kind.ELEMENTWISE)
def log(input: GaussianMoments) -> GaussianMoments:
    """Moments of the logarithm, linearised at the mean.

    Status: approximate, to first order in σ/μ.

    Example:
        >>> log(GaussianMoments(torch.full((1,), 2.0), torch.full((1,), 0.04))).variance
        tensor([0.0100])
    """
    linked = through_link(input, torch.log)
    if linked is not None:
        return linked
    return GaussianMoments(torch.log(input.loc), input.variance / input.loc.square())


@moment_rule(torch.log1p, torch.special.log1p, kind=Kind.ELEMENTWISE)
def log1p(input: GaussianMoments) -> GaussianMoments:
    """Moments of log(1 + x), linearised at the mean. Status: approximate, like :func:`log`."""
    linked = through_link(input, torch.log1p)
    if linked is not None:
        return linked
    return GaussianMoments(torch.log1p(input.loc), input.variance / (1 + input.loc).square())


@moment_rule(torch.sqrt, kind=Kind.ELEMENTWISE)
def sqrt(input: GaussianMoments) -> GaussianMoments:
    """Moments of the square root, computed as ``x ** 0.5``."""
    return pow(input, 0.5)


@moment_rule(torch.rsqrt, kind=Kind.ELEMENTWISE)
def rsqrt(input: GaussianMoments) -> GaussianMoments:
    """Moments of 1/sqrt(x), computed as ``x ** -0.5``."""
    return pow(input, -0.5)
