# SPDX-License-Identifier: Apache-2.0
"""The precision as the prior's plus what the data say in a few directions."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import NotConvergedError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix, common_ratio, independent_prior_precision
from pyro_dvi.laplace.methods.method import Method, RootPosterior
from pyro_dvi.linalg.lanczos import top_eigenpairs


@dataclass(frozen=True)
class TopEigen(Method):
    r"""Keep the k directions in which the data say most, relative to the prior.

    With the diagonal prior precision :math:`\Pi` and the likelihood's curvature G,

    .. math::
        \Pi^{-1/2} G\, \Pi^{-1/2} \approx U^\top \Lambda U, \qquad
        P \approx \Pi^{1/2} (I + U^\top \Lambda U)\, \Pi^{1/2}, \qquad
        P^{-1} \approx \Pi^{-1/2} \Bigl(I - U^\top \tfrac{\Lambda}{1+\Lambda}\, U\Bigr) \Pi^{-1/2} .

    These are top directions of the precision, where the posterior is narrow; elsewhere it stays as wide as the prior.
    For one prior scale they are the top eigenvectors of G.

    Status: exact for k = D, or where k reaches the rank of G; otherwise variances are too large, never too small.

    Args:
        rank: k, the number of directions, at most D; about 2 k + 64 vectors are held while it looks for them.
        precision: ``GGN()`` or ``Hessian()``.
        tolerance: of the eigenvectors' residuals, relative to the largest eigenvalue.

    Raises:
        UnsupportedError: the prior couples latents.
        NotPositiveDefiniteError: the Hessian is not positive definite.
        NotConvergedError: the eigenvectors were not found to the tolerance.

    Source: Spantini et al. (2015), Theorem 2.3, for the optimality of the update relative to the prior.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import TopEigen
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False))
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=3, noise_scale=1.0))
        >>> batches = [(torch.ones(3, 1), torch.zeros(3, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> guide.fit(batches, TopEigen(1)).marginal_variance()
        tensor([0.2500])
    """

    rank: int
    precision: PrecisionMatrix = field(default_factory=GGN)
    tolerance: float = 1e-4

    reweights = True

    def __post_init__(self) -> None:
        check_count("rank", self.rank)

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "TopEigenPosterior":
        """Return the posterior."""
        prior = independent_prior_precision(local, "TopEigen()")
        half = prior.rsqrt()

        def relative(vectors: Tensor) -> Tensor:
            return self.precision.product(local, vectors * half) * half - vectors

        found = top_eigenpairs(
            relative,
            prior,
            min(self.rank, len(prior)),
            tolerance=max(self.tolerance, 100 * torch.finfo(prior.dtype).eps),
        )
        if not found.converged:
            raise NotConvergedError(
                f"the top {self.rank} eigenvectors have residuals up to {float(found.residuals.max()):.2g} after "
                f"{found.applications} products, not {self.tolerance:.2g} of {float(found.values[0]):.2g}: use a "
                "smaller rank, or a larger tolerance"
            )
        return TopEigenPosterior(local.point, prior, found.values, found.vectors)


class TopEigenPosterior(RootPosterior):
    """A Gaussian of low rank plus diagonal.

    Attributes:
        prior: the prior's precision, [D].
        values: eigenvalues relative to the prior, ``[k]``.
        vectors: the eigenvectors, orthonormal rows ``[k, D]``.
    """

    stored = ("mode", "prior", "values", "vectors")

    def __init__(self, mode: Tensor, prior: Tensor, values: Tensor, vectors: Tensor) -> None:
        self.mode, self.prior, self.values, self.vectors = mode, prior, values, vectors
        if not bool((values > -1).all()):
            lowest = 1 + float(values.min())
            raise NotPositiveDefiniteError(
                f"the precision has curvature {lowest:.3g} times the prior's along a direction: the mode is no "
                "minimum. Run guide.polish(batches), or use precision=GGN().",
                curvature=lowest,
            )

    def whitened(self, rows: Tensor) -> Tensor:
        return self._shrunk(rows * self.prior.rsqrt())

    def coloured(self, rows: Tensor) -> Tensor:
        return self._shrunk(rows) * self.prior.rsqrt()

    def _shrunk(self, rows: Tensor) -> Tensor:
        return rows + (rows @ self.vectors.mT * ((1 + self.values).rsqrt() - 1)) @ self.vectors

    def marginal_variance(self) -> Tensor:
        return (1 - self.values / (1 + self.values) @ self.vectors.square()) / self.prior

    def reweighted(self, likelihood: float, prior: Tensor) -> "TopEigenPosterior | None":
        factor = common_ratio(prior, self.prior)
        if factor is None:  # the directions are others then
            return None
        return TopEigenPosterior(self.mode, prior, self.values * (likelihood / factor), self.vectors)

    def log_determinant(self) -> Tensor:
        return self.prior.log().sum() + self.values.log1p().sum()
