# SPDX-License-Identifier: Apache-2.0
"""The log determinant of the precision, for one prior after the other from the same eigenvalues."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_dvi.devices import widest
from pyro_dvi.errors import ArgumentError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import PrecisionMatrix
from pyro_dvi.linalg import LogDeterminant, SpectralQuadrature, TraceEstimate, trace_of_function

__all__ = ["ByLanczos", "Determinant", "Exactly", "Spectrum", "default_determinant"]

_EXACT_SIZE = 1000  # both ways cost about the same there
_BASIS_BYTES = 2**31


@dataclass(frozen=True)
class Spectrum:
    r"""Eigenvalues of the likelihood's part of P relative to the prior's, :math:`A = D^{-1/2} G D^{-1/2}`.

    .. math:: P = G + D, \qquad \log\det(aG + cD) = \log\det D + \operatorname{tr}\log(aA + c)

    Attributes:
        quadrature: of A; of P itself where the prior precision D is not a positive diagonal.
        log_prior_determinant: log det D; None in that case.
        exact: the nodes are all the eigenvalues.
    """

    quadrature: SpectralQuadrature
    log_prior_determinant: float | None
    exact: bool

    def log_determinant(self, likelihood: float = 1.0, prior: float = 1.0) -> TraceEstimate:
        """Return log det(likelihood * G + prior * D).

        Raises:
            NotPositiveDefiniteError: it has an eigenvalue that is not positive.
            ArgumentError: D is no positive diagonal, and a factor is not 1.
        """
        if self.log_prior_determinant is None:
            if likelihood != 1 or prior != 1:
                raise ArgumentError(
                    "the prior precision is no positive diagonal, so its eigenvalues do not scale"
                )
            found = LogDeterminant(self.quadrature)
            offset = 0.0
        else:
            found = LogDeterminant(self.quadrature).shifted(prior / likelihood)
            offset = self.log_prior_determinant + self.quadrature.dim * math.log(likelihood)
        try:
            value, error = found.value + offset, found.standard_error
        except NotPositiveDefiniteError as reason:
            error_ = NotPositiveDefiniteError(
                "the precision is not positive definite, so that its log determinant does not exist: run "
                "guide.polish(batches), or use curvature=GGN()"
            )
            error_.curvature = reason.curvature
            raise error_ from reason
        return TraceEstimate(value, 0.0 if self.exact else error)


class Determinant(ABC):
    """How the log determinant of the precision is found."""

    @abstractmethod
    def spectrum(self, local: LocalEnergy, curvature: PrecisionMatrix) -> Spectrum:
        """Return the spectrum of the precision at a point."""

    def _relative(self, local: LocalEnergy, curvature: PrecisionMatrix) -> "_Relative":
        return _Relative(local, curvature, local.prior_diagonal())


@dataclass(frozen=True)
class Exactly(Determinant):
    """By all eigenvalues of the matrix, for 2D gradients of all data and the time of a dense decomposition.

    Args:
        max_size: refuse a larger D.

    Raises:
        ArgumentError: D is larger than ``max_size``.
    """

    max_size: int = 10_000

    def spectrum(self, local: LocalEnergy, curvature: PrecisionMatrix) -> Spectrum:
        """Return the exact spectrum."""
        size = len(local.point)
        if size > self.max_size:
            raise ArgumentError(
                f"Exactly() would decompose a matrix of {size} x {size}: use ByLanczos(), or a larger max_size"
            )
        matrix = self._relative(local, curvature)
        rows = torch.eye(size, dtype=local.point.dtype, device=local.point.device).split(256)
        dense = torch.cat([matrix.product(part) for part in rows]).to(widest(local.point.device))
        values = torch.linalg.eigvalsh(0.5 * (dense + dense.mT)).cpu().double()
        quadrature = SpectralQuadrature(values[None], torch.full_like(values[None], 1 / size), size, size)
        return matrix.spectrum(quadrature, exact=True)


@dataclass(frozen=True)
class ByLanczos(Determinant):
    """By stochastic Lanczos quadrature, for ``2 * probes * steps`` gradients of all data.

    Args:
        probes: random vectors; the standard error falls with their square root.
        steps: of the recursion of each; ``steps * D`` numbers are held for as many probes together as fit 2 GiB.
        seed: of the vectors.

    Source: Ubaru, Chen & Saad (2017).
    """

    probes: int = 16
    steps: int = 60
    seed: int = 0

    def spectrum(self, local: LocalEnergy, curvature: PrecisionMatrix) -> Spectrum:
        """Return the estimated spectrum."""
        matrix, size = self._relative(local, curvature), len(local.point)
        generator = torch.Generator().manual_seed(self.seed)
        together = max(1, _BASIS_BYTES // (self.steps * size * local.point.element_size()))
        parts = [
            trace_of_function(
                matrix.product,
                size,
                probes=min(together, self.probes - done),
                steps=self.steps,
                generator=generator,
                like=local.point,
            )
            for done in range(0, self.probes, together)
        ]
        return matrix.spectrum(_joined(parts), exact=False)


def default_determinant(size: int) -> Determinant:
    """Return the exact way where it costs no more than the other."""
    return Exactly() if size <= _EXACT_SIZE else ByLanczos()


def _joined(parts: list[SpectralQuadrature]) -> SpectralQuadrature:
    """Return the quadrature over the probes of all parts."""
    steps = max(part.nodes.shape[1] for part in parts)

    def padded(rows: Tensor) -> Tensor:
        return torch.nn.functional.pad(rows, (0, steps - rows.shape[1]))

    return SpectralQuadrature(
        torch.cat([padded(part.nodes) for part in parts]),
        torch.cat([padded(part.weights) for part in parts]),
        parts[0].dim,
        sum(part.applications for part in parts),
    )


class _Relative:
    """A = D^(-1/2) (P - D) D^(-1/2), or P where D is None."""

    def __init__(self, local: LocalEnergy, curvature: PrecisionMatrix, diagonal: Tensor | None) -> None:
        self.local, self.curvature = local, curvature
        self.scale = None if diagonal is None else diagonal.rsqrt()
        self.log_prior_determinant = None if diagonal is None else float(diagonal.cpu().double().log().sum())

    def spectrum(self, quadrature: SpectralQuadrature, *, exact: bool) -> Spectrum:
        """Eigenvalues of A that rounding made negative are zero."""
        nodes = quadrature.nodes
        rounding = 64 * torch.finfo(self.local.point.dtype).eps * (1 + nodes.abs().max())
        nodes = torch.where((nodes < 0) & (nodes > -rounding), 0.0, nodes)
        return Spectrum(replace(quadrature, nodes=nodes), self.log_prior_determinant, exact)

    def product(self, vectors: Tensor) -> Tensor:
        if self.scale is None:
            return self.curvature.product(self.local, vectors)
        return self.scale * self.curvature.product(self.local, self.scale * vectors) - vectors
