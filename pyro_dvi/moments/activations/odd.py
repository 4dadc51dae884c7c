# SPDX-License-Identifier: Apache-2.0
r"""Softsign, arctangent and tanhshrink, odd functions, by quadrature on either side of zero.

Softsign has a corner in its second derivative, and tails that fall slowly, as those of the arctangent do. On the right
of zero (the left is its mirror image) the range :math:`\mu \pm R\sigma` from a to b is mapped to

.. math:: x = (c + a)\,e^w - c, \qquad 0 \le w \le \log\frac{c + b}{c + a},

where 1/(c + x) is an exponential, and integrated by Gauss-Legendre. Differences :math:`d = f(x) - f(\mu)` are written
in :math:`\delta = x - \mu`, so that they keep their digits however small σ is.

Status: exact to 1e-8 (float64), 1e-4 (float32).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.activations.elementwise import from_scores, through
from pyro_dvi.moments.activations.normal import DENSITY, constants, half_line
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments


@dataclass(frozen=True)
class _Odd:
    """An odd function.

    Attributes:
        function: f.
        difference: f(x) - f(μ) from x > 0, μ and x - μ.
        width: c, of the bend at zero.
        block: how many elements are computed at once.
    """

    function: Callable[[Tensor], Tensor]
    difference: Callable[[Tensor, Tensor, Tensor], Tensor]
    width: float
    block: int = 1 << 12

    def __call__(self, mu: Tensor, variance: Tensor, slopes: bool) -> list[Tensor]:
        """Return mean, variance and their slopes."""
        sigma = variance.sqrt()
        first, second = ([torch.zeros_like(mu) for _ in range(3)] for _ in range(2))  # E[d z^k], E[d² z^k]
        reach, columns = half_line(mu.dtype)
        nodes, weights = (constants(c, mu) for c in columns)
        for side in (1.0, -1.0):
            centre = side * mu
            start = torch.maximum(-centre, -reach * sigma)  # from the mean
            scale = (centre + start).add_(self.width)
            length = torch.log1p((reach * sigma - start).clamp_min_(0) / scale)
            density = length * scale * DENSITY / sigma
            growth = length * nodes
            step = torch.expm1(growth).mul_(scale)
            delta = start + step
            z = delta / sigma
            weight = growth.addcmul_(z, z, value=-0.5).exp_().mul_(weights).mul_(density)
            d = self.difference(step.add_(scale).sub_(self.width), centre, delta)
            weight.mul_(d)
            for k in range(3):
                first[k].add_(weight.sum(0), alpha=side if k % 2 == 0 else 1.0)
                second[k].add_((weight * d).sum(0), alpha=1.0 if k % 2 == 0 else side)
                weight.mul_(z)
        return from_scores(self.function(mu), sigma, variance, first, second, slopes)


def _softsign_difference(x: Tensor, mu: Tensor, delta: Tensor) -> Tensor:
    # For μ < 0: x / (1 + x) - μ / (1 - μ) = (δ - 2 x μ) / ((1 + x)(1 - μ)), all terms positive.
    return torch.addcmul(delta, x, mu.clamp_max(0), value=-2) / ((1 + x) * (1 + mu.abs()))


def _tanhshrink_difference(x: Tensor, mu: Tensor, delta: Tensor) -> Tensor:
    tanh = torch.tanh(delta)
    return torch.addcmul(delta - tanh, tanh, torch.tanh(x) * torch.tanh(mu))


def _atan_difference(x: Tensor, mu: Tensor, delta: Tensor) -> Tensor:
    return torch.atan2(delta, torch.addcmul(torch.ones_like(x), x, mu))  # the angle between (1, μ) and (1, x)


_ATAN = _Odd(torch.atan, _atan_difference, 1.0)
_SOFTSIGN = _Odd(F.softsign, _softsign_difference, 1.0)
_TANHSHRINK = _Odd(F.tanhshrink, _tanhshrink_difference, 10.0)


@moment_rule(F.softsign, kind=Kind.ELEMENTWISE)
def softsign(input: GaussianMoments) -> GaussianMoments:
    """Moments of x / (1 + abs(x)).

    Status: exact to 1e-8 (float64), 1e-4 (float32). Several times the work of a sigmoid.

    Example:
        >>> softsign(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([0.1830])
    """
    return through(_SOFTSIGN, input)


@moment_rule(F.tanhshrink, kind=Kind.ELEMENTWISE)
def tanhshrink(input: GaussianMoments) -> GaussianMoments:
    """Moments of x - tanh(x). Status: as :func:`softsign`."""
    return through(_TANHSHRINK, input)


@moment_rule(torch.atan, torch.arctan, kind=Kind.ELEMENTWISE)
def atan(input: GaussianMoments) -> GaussianMoments:
    """Moments of the arctangent. Status: as :func:`softsign`."""
    return through(_ATAN, input)
