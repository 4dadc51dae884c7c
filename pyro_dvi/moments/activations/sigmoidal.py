# SPDX-License-Identifier: Apache-2.0
"""Steps: sigmoid, tanh and erf."""

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.activations.elementwise import through
from pyro_dvi.moments.activations.normal import moments_of_erf
from pyro_dvi.moments.activations.smooth import Rescaled, Smooth
from pyro_dvi.moments.rules import Kind, moment_rule
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["erf", "sigmoid", "tanh"]


def _sigmoid(x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    return s, s - s * s


SIGMOID = Smooth(_sigmoid, ramp=False, smoothing=1.7)


_SIGMOID = Rescaled(torch.sigmoid, SIGMOID)
_TANH = Rescaled(torch.tanh, SIGMOID, inner=2.0, outer=2.0)


@moment_rule(F.sigmoid, torch.sigmoid, torch.special.expit, kind=Kind.ELEMENTWISE)
def sigmoid(input: GaussianMoments) -> GaussianMoments:
    """Moments of the logistic function.

    Status: exact to 1e-8 (float64), 1e-4 (float32): :mod:`pyro_dvi.moments.activations.smooth`.

    Example:
        >>> sigmoid(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([0.0434])
    """
    return through(_SIGMOID, input)


@moment_rule(F.tanh, torch.tanh, kind=Kind.ELEMENTWISE)
def tanh(input: GaussianMoments) -> GaussianMoments:
    r"""Moments of :math:`\tanh x = 2\,\mathrm{sigmoid}(2x) - 1`.

    Status: as :func:`sigmoid`.

    Example:
        >>> tanh(GaussianMoments(torch.zeros(1), torch.ones(1))).variance
        tensor([0.3943])
    """
    return through(_TANH, input)


@moment_rule(torch.erf, torch.special.erf, kind=Kind.ELEMENTWISE)
def erf(input: GaussianMoments) -> GaussianMoments:
    """Moments of the error function.

    Status: exact, by closed forms and Owen's T function (:mod:`pyro_dvi.moments.activations.normal`).
    """
    return through(moments_of_erf, input)
