# SPDX-License-Identifier: Apache-2.0
r"""Functions on half the line: logarithms by their tangent at the mean, roots by the expansion of powers.

Of what is a function of a Gaussian, as ``softplus(h)``, moments are taken by quadrature over that Gaussian. A Gaussian
itself puts mass where these are not defined, so its moments do not exist. For logarithms, those of the tangent are
passed on,

.. math:: m = f(\mu), \qquad v = f'(\mu)^2\,\sigma^2.

Status: approximate, to first order; good where :math:`\sigma \ll \mu` (the relative error of the variance is of the
order of :math:`\sigma^2/\mu^2`). A mean outside the domain gives what the function gives there, nan or inf.
"""

import torch

from pyro_dvi.moments.arithmetic import pow
from pyro_dvi.moments.rules import Kind, moment_rule
from pyro_dvi.moments.through_link import through_link
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["log", "log1p", "rsqrt", "sqrt"]


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
