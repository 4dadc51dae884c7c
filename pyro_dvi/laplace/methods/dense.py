# SPDX-License-Identifier: Apache-2.0
"""The precision as a matrix: exact, for small models."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method

__all__ = ["Dense", "DensePosterior"]


@dataclass(frozen=True)
class Dense(Method):
    r"""Build :math:`P \in \mathbb R^{D\times D}` and factorise it.

    Memory :math:`3 D^2` numbers. The Gauss-Newton matrix comes from gradients of single examples (K backward passes for
    K outputs) where layers have rules for them; otherwise, and for the Hessian, a column costs two gradients.

    Status: exact.

    Args:
        curvature: ``GGN()`` or ``Hessian()``.
        max_size: refuse a larger D, instead of running out of memory.

    Raises:
        ArgumentError: D is larger than ``max_size``.
        NotPositiveDefiniteError: P has an eigenvalue that is not positive: the mode is no minimum.

    Source: MacKay (1992) for the Hessian; Schraudolph (2002) for the Gauss-Newton matrix.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import Dense
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False))
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=3, noise_scale=1.0))
        >>> batches = [(torch.ones(3, 1), torch.zeros(3, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> guide.fit(batches, Dense()).marginal_variance()
        tensor([0.2500])
    """

    curvature: PrecisionMatrix = field(default_factory=GGN)
    max_size: int = 20_000

    exact = reweights = True

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "DensePosterior":
        """Return the posterior."""
        size = len(local.point)
        if size > self.max_size:
            raise ArgumentError(
                f"Dense() would build a matrix of {size} x {size} ({size**2 * 8 / 2**30:.1f} GiB): use "
                "PosteriorSamples() or ConjugateGradient(), a subset of the sites, or a larger max_size"
            )
        precision = self.curvature.matrix(local)
        return DensePosterior(local.point, 0.5 * (precision + precision.mT), local.prior_diagonal())


class DensePosterior(LaplacePosterior):
    """A Gaussian by the Cholesky factor of its precision.

    Attributes:
        precision: P, [D, D].
        prior: the prior's part, [D], as far as it is known to be diagonal.
    """

    stored = ("mode", "precision")

    def __init__(self, mode: Tensor, precision: Tensor, prior: Tensor | None = None) -> None:
        self.mode, self.precision, self.prior = mode, precision, prior
        factor, info = torch.linalg.cholesky_ex(precision)
        if int(info) != 0:
            values = torch.linalg.eigvalsh(precision)
            raise NotPositiveDefiniteError(
                f"the precision has {int((values <= 0).sum())} of {len(values)} eigenvalues that are not positive, the "
                f"smallest {values[0].item():.3g}: the mode is no minimum. Run guide.polish(batches), or use "
                "curvature=GGN()."
            )
        self.factor = factor

    def quadratic(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        half = torch.linalg.solve_triangular(self.factor, flat.mT, upper=False).mT.reshape(rows.shape)
        return half @ half.mT

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        noise = torch.randn(
            len(self.mode), count, generator=generator, dtype=self.mode.dtype, device=self.mode.device
        )
        return self.mode + torch.linalg.solve_triangular(self.factor.mT, noise, upper=True).mT

    def solve(self, vectors: Tensor) -> Tensor:
        return torch.cholesky_solve(vectors.mT, self.factor).mT

    def marginal_variance(self) -> Tensor:
        return torch.cholesky_inverse(self.factor).diagonal()

    def reweighted(self, likelihood: float, prior: Tensor) -> "DensePosterior | None":
        if self.prior is None:
            return None
        precision = likelihood * self.precision
        precision.diagonal().add_(prior - likelihood * self.prior)
        return DensePosterior(self.mode, precision, prior)

    def log_determinant(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()
