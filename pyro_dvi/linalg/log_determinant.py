# SPDX-License-Identifier: Apache-2.0
"""Traces of matrix functions, and the log determinant, from random probes."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import NotPositiveDefiniteError
from pyro_dvi.linalg.lanczos import LanczosProcess
from pyro_dvi.linalg.operator import Operator

_BASIS_BYTES = 2**31


@dataclass(frozen=True)
class TraceEstimate:
    """An average over probes.

    Attributes:
        value: the estimate.
        standard_error: of the value, from the spread between probes; NaN with a single probe, and zero where all probes
            agree. The error of the quadrature, which falls exponentially with the steps, is not part of it.
    """

    value: float
    standard_error: float


@dataclass(frozen=True)
class SpectralQuadrature:
    r"""Nodes and weights with :math:`z_p^\top f(A) z_p \approx D \sum_j w_{pj} f(\theta_{pj})` for each probe.

    Attributes:
        nodes: Ritz values, ``[probes, steps]``, in float64 on the CPU.
        weights: of the nodes, ``[probes, steps]``, each row summing to one; zero where a Krylov space ended early.
        dim: D.
        applications: vectors that the operator was applied to.
    """

    nodes: Tensor
    weights: Tensor
    dim: int
    applications: int

    def trace(self, function: Callable[[Tensor], Tensor]) -> TraceEstimate:
        """Return the estimate of tr f(A) for an elementwise ``function``, without further applications."""
        # Padding may lie outside f's domain.
        nodes = torch.where(self.weights > 0, self.nodes, self.nodes[:, :1])
        per_probe = self.dim * (self.weights * function(nodes)).sum(-1)
        error = (
            per_probe.std() / len(per_probe) ** 0.5 if len(per_probe) > 1 else per_probe.new_tensor(torch.nan)
        )
        return TraceEstimate(float(per_probe.mean()), float(error))

    def log_determinant(self, shift: float = 0.0) -> TraceEstimate:
        r"""Return the estimate of :math:`\log\det(A + cI) = \operatorname{tr}\log(A + cI)` for a shift c.

        For a posterior precision G + c D with a diagonal prior precision D, take the quadrature of
        :math:`A = D^{-1/2} G D^{-1/2}`: with ``D.log().sum()`` added this estimates log det(G + c D) for every
        multiplier c of the prior. Steps of about the square root of the condition number of A + cI suffice.

        Raises:
            NotPositiveDefiniteError: A + cI has an eigenvalue that is not positive.

        Source: Ubaru, Chen & Saad (2017), Section 3.

        Example:
            >>> gram = torch.tensor([1.0, 0.0, 3.0])  # singular: only its shifts have a log determinant
            >>> quadrature = trace_of_function(lambda v: v * gram, 3, probes=2, steps=3)
            >>> round(quadrature.log_determinant(1.0).value, 4)  # log(2 * 1 * 4)
            2.0794
        """
        lowest = float(self.nodes[self.weights > 0].min()) + shift
        if lowest <= 0:
            raise NotPositiveDefiniteError(
                f"log det(A + c I) with c = {shift:.6g}: an eigenvalue of A + c I is at most {lowest:.3g}. Use a "
                "positive definite curvature, or a larger c.",
                curvature=lowest,
            )
        return self.trace(lambda nodes: (nodes + shift).log())


def trace_of_function(
    operator: Operator,
    dim: int,
    *,
    probes: int = 8,
    steps: int = 40,
    generator: torch.Generator | None = None,
    like: Tensor | None = None,
) -> SpectralQuadrature:
    r"""Prepare tr f(A) for any f by stochastic Lanczos quadrature.

    .. math::
        \operatorname{tr} f(A) = \mathbb{E}\,z^\top f(A)\,z \approx \frac{D}{P} \sum_p \sum_j w_{pj}\,f(\theta_{pj}),
        \qquad w_{pj} = (e_1^\top u_{pj})^2

    with Rademacher probes z and the eigenpairs :math:`(\theta, u)` of the tridiagonal matrix of each probe.

    Status: unbiased over the probes up to the error of the Gauss quadrature, which is zero for polynomials of degree
    below ``2 * steps`` and with ``steps >= dim``. A diagonal matrix has no error over the probes.

    Args:
        operator: A, symmetric.
        dim: D.
        probes: P, applied together in each step, as many as fit.
        steps: Lanczos steps. ``steps * dim`` numbers are held for as many probes together as fit 2 GiB.
        generator: of the probes; the global one by default.
        like: tensor whose dtype and device the probes get; the default dtype on the CPU otherwise.

    Returns:
        The nodes and weights; ``.trace(torch.log)`` is the estimate for one function.

    Raises:
        ArgumentError: a count is not positive.

    Source: Ubaru, Chen & Saad (2017), Alg. 1; Hutchinson (1989).

    Example:
        >>> diagonal = torch.tensor([1.0, 2.0, 3.0])
        >>> trace_of_function(lambda v: v * diagonal, 3, probes=2, steps=3).trace(torch.sqrt).value
        4.146...
    """
    for name, count in (("dim", dim), ("probes", probes), ("steps", steps)):
        check_count(name, count)
    like = torch.empty(0) if like is None else like
    device = like.device if generator is None else generator.device
    signs = torch.randint(2, (probes, dim), generator=generator, device=device, dtype=like.dtype)
    signs = signs.mul_(2).sub_(1).to(like.device)
    nodes, weights = torch.zeros(2, probes, steps, dtype=torch.float64).unbind()
    together, applications = max(1, _BASIS_BYTES // (steps * dim * like.element_size())), 0
    for start in range(0, probes, together):
        some = signs[start : start + together]
        process = LanczosProcess(operator, some, steps)
        while not process.finished:
            process.advance()
        applications += process.applications
        for p in range(len(some)):
            values, vectors = torch.linalg.eigh(process.tridiagonal(p).dense())
            nodes[start + p, : len(values)] = values
            weights[start + p, : len(values)] = vectors[0].square()
    return SpectralQuadrature(nodes, weights, dim, applications)
