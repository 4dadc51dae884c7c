# SPDX-License-Identifier: Apache-2.0
r"""Quotients, powers, roots and logarithms of elements.

Of what is a function of a Gaussian, as ``softplus(h)``, moments are taken by quadrature over that Gaussian
(:mod:`pyro_dvi.moments.through_link`). A Gaussian itself puts mass where most of these are not defined, so its moments
do not exist (a Gaussian denominator has no mean at all).

Quotients by something uncertain and powers other than 2 and 3 are then expanded around the mean, which is good only
where the deviation is small against the mean. These rules look at the coefficient of variation and refuse more than
0.2, where the error of the deviation reaches 7 %. For logarithms, the moments of the tangent at the mean are passed on,

.. math:: m = f(\mu), \qquad v = f'(\mu)^2\,\sigma^2.

Status: logarithms to first order; good where :math:`\sigma \ll \mu` (the relative error of the variance is of the
order of :math:`\sigma^2/\mu^2`). A mean outside the domain gives what the function gives there, nan or inf.
"""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.arithmetic import mul, plus, promoted, squarable, square, times
from pyro_dvi.moments.dispatch import Kind, broadcast
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.through_link import through_link
from pyro_dvi.moments.value import GaussianMoments, Link

_LARGEST_VARIATION = 0.2


@moment_rule(torch.div, torch.divide, torch.true_divide, kind=Kind.AFFINE)
def div(input: Any, other: Any, *, rounding_mode: str | None = None) -> GaussianMoments:
    r"""Moments of a quotient.

    Status: exact for a certain denominator. An uncertain one is expanded, see :func:`reciprocal`.

    Raises:
        UnsupportedError: rounding; or the deviation of the denominator is more than 0.2 of its mean.
    """
    if rounding_mode is not None:
        raise UnsupportedError(
            "torch.div with a rounding mode has steps, where moments have no rule: drop rounding_mode"
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

    With :math:`c^2 = v/m^2`, the mean is :math:`(1 + c^2 + 3c^4)/m` and the variance :math:`(c^2 + 8c^4)/m^2`.

    Status: expansion around the mean. At the largest c allowed, 0.2, the mean is 0.2 % and the deviation 7 % too
    small; at 0.1 they are 0.002 % and 0.4 %.

    Raises:
        UnsupportedError: c is more than 0.2 somewhere (this looks at the values, which waits for a GPU).
    """
    return _expanded_power(input, -1.0)


@moment_rule(torch.pow, kind=Kind.ELEMENTWISE)
def pow(input: Any, exponent: Any) -> GaussianMoments:
    r"""Moments of :math:`x^p` for a certain exponent, or of :math:`b^x` for a certain base.

    Status: exact for p = 0, 1, 2, 3 and for a certain base; by quadrature where x is a function of a Gaussian, as
    ``softplus(h)`` is; else an expansion around the mean, of the accuracy of :func:`reciprocal` or better for
    -1 ≤ p ≤ 4.

    Raises:
        UnsupportedError: base and exponent are uncertain, the exponent differs between elements, or the deviation is
            more than 0.2 of the mean.
    """
    if not isinstance(input, GaussianMoments):
        base = torch.as_tensor(input, dtype=exponent.dtype, device=exponent.device)
        scaled: Any = mul(exponent, base.log())
        return scaled.exp()
    if isinstance(exponent, Tensor) and exponent.dim() == 0:
        exponent = exponent.item()
    if isinstance(exponent, GaussianMoments | Tensor):
        raise UnsupportedError(
            "torch.pow has rules for an exponent that is a number: write x ** 2, or exp(exponent * log(x)) if both vary"
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


def _expanded_power(x: GaussianMoments, p: float) -> GaussianMoments:
    """By quadrature over the Gaussian behind x; else to fourth order in the coefficient of variation."""
    linked = through_link(x, lambda value: value.pow(p))
    if linked is not None:
        return linked
    m = x.loc
    c2 = x.variance / m.square()
    if not bool((c2 <= _LARGEST_VARIATION**2).all()) or (not p.is_integer() and bool((m <= 0).any())):
        raise UnsupportedError(
            f"the power {p:g} of something uncertain is expanded around its mean, which needs a deviation of at most "
            f"{_LARGEST_VARIATION} of the mean (and a positive mean if the exponent is not an integer); here it is "
            f"{math.sqrt(c2.max().item()):.3g}. Reduce the uncertainty of the denominator, divide by x.loc if its mean "
            "may stand for it, or use exp(-log) of something that is Gaussian on the log scale."
        )
    power = m.pow(p)
    second, fourth = p * (p - 1) / 2, p * (p - 1) * (p - 2) * (p - 3) / 8
    spread = p**2 * ((p - 1) ** 2 / 2 + (p - 1) * (p - 2))
    return GaussianMoments(
        power * (1 + c2 * (second + fourth * c2)), power.square() * c2 * (p**2 + spread * c2)
    )


@moment_rule(torch.log, kind=Kind.ELEMENTWISE)
def log(input: GaussianMoments) -> GaussianMoments:
    """Moments of the tangent of the logarithm.

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
    """Moments of the tangent of log(1 + x). Status: approximate, as :func:`log`."""
    linked = through_link(input, torch.log1p)
    if linked is not None:
        return linked
    return GaussianMoments(torch.log1p(input.loc), input.variance / (1 + input.loc).square())


@moment_rule(torch.sqrt, kind=Kind.ELEMENTWISE)
def sqrt(input: GaussianMoments) -> GaussianMoments:
    """Moments of the square root: those of ``x ** 0.5``, with its status and refusals."""
    return pow(input, 0.5)


@moment_rule(torch.rsqrt, kind=Kind.ELEMENTWISE)
def rsqrt(input: GaussianMoments) -> GaussianMoments:
    """Moments of 1/sqrt(x): those of ``x ** -0.5``, with its status and refusals."""
    return pow(input, -0.5)


@moment_rule(torch.addcdiv)
def addcdiv(input: Any, tensor1: Any, tensor2: Any, *, value: float = 1) -> GaussianMoments:
    r"""Moments of :math:`x + c\,y/z`.

    Status: that of :func:`div`.
    """
    if input is tensor1 and isinstance(input, GaussianMoments):
        return times(input, plus(1, torch.div(value, tensor2)))
    return plus(input, times(torch.div(tensor1, tensor2), value))
