# SPDX-License-Identifier: Apache-2.0
"""The precision as a full matrix, or as the prior precision plus a low-rank matrix."""

from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.recorder import is_for_any_rows
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.curvature.example_gradients import ExampleGradients
from pyro_dvi.errors import ArgumentError, NotConvergedError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix, common_ratio, independent_prior_precision
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method, RootPosterior, not_positive
from pyro_dvi.laplace.methods.spectral import SpectralPosterior, Spectrum
from pyro_dvi.linalg.lanczos import top_eigenpairs


@dataclass(frozen=True)
class Dense(Method):
    r"""Compute and factorise the full matrix :math:`P \in \mathbb R^{D\times D}`.

    It needs memory for :math:`3 D^2` numbers in double precision. The Gauss-Newton matrix is computed from per-example
    gradients (K backward passes for K outputs) if all layers have per-example rules. Otherwise, and for the Hessian,
    each column costs two gradients.

    Status: exact.

    Args:
        precision: ``GGN()`` or ``Hessian()``.
        max_size: maximum D; a larger D raises an error instead of running out of memory.

    Raises:
        ArgumentError: D is larger than ``max_size``.
        NotPositiveDefiniteError: P has an eigenvalue that is not positive, so the mode is not a minimum.

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

    precision: PrecisionMatrix = field(default_factory=GGN)
    max_size: int = 20_000

    reweights = True

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "DensePosterior":
        """Return the posterior."""
        size = len(local.point)
        if size > self.max_size:
            raise ArgumentError(
                f"Dense() would compute a {size} x {size} matrix: use PosteriorSamples(), or a larger max_size"
            )
        precision = self.precision.matrix(local)
        return DensePosterior(local.point, 0.5 * (precision + precision.mT), local.prior_diagonal)


class DensePosterior(RootPosterior):
    """A Gaussian represented by the Cholesky factor of its precision.

    Attributes:
        precision: P, ``[D, D]``, in double precision.
        prior: diagonal prior precision, [D]; None if it is not known to be diagonal.
    """

    stored = ("mode", "precision")

    def __init__(self, mode: Tensor, precision: Tensor, prior: Tensor | None = None) -> None:
        self.mode, self.precision, self.prior = mode, precision.to(widest(mode.device)), prior
        factor, info = torch.linalg.cholesky_ex(self.precision)
        if int(info) != 0:
            values = torch.linalg.eigvalsh(self.precision)
            count = f"{int((values <= 0).sum())} of {len(values)}"
            raise not_positive(f"the precision has {count} eigenvalues that are not positive")
        self.factor = factor
        self._rows_asked = 0

    def whitened(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1]).to(self.factor)
        return (
            torch.linalg.solve_triangular(self.factor, flat.mT, upper=False).mT.reshape(rows.shape).to(rows)
        )

    def coloured(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, rows.to(self.factor).mT, upper=True).mT.to(rows)

    def covariance(self, query: Query) -> Tensor:
        self._rows_asked += query.num_rows * query.size
        # For few rows, solves are cheaper than the inverse.
        if self._rows_asked < len(self.mode) and not is_for_any_rows():
            return LaplacePosterior.covariance(self, query)
        return super().covariance(query)

    def covariance_of_examples(self, examples: ExampleGradients) -> Tensor:
        return torch.cat([self._of_part(examples, part) for part in examples.chunks()])

    def _of_part(self, examples: ExampleGradients, part: slice) -> Tensor:
        half, rows, found = self._half_inverse, examples.rows(part).to(self._half_inverse), []
        for k, span in enumerate(examples.spans):
            block, before = half[span, : span.stop], rows[..., : span.stop].mT
            if k in examples.single:  # rows are outer products of delta and a, and all outputs share a
                a, delta = examples.single[k].factors(part, half.dtype)
                units = examples.single[k].by_unit(block)
                found.append(delta @ torch.cat([(a @ unit).unsqueeze(1) @ before for unit in units], 1))
            else:
                found.append(rows[..., span] @ block @ before)
        total = torch.stack(found).sum(0)
        return (total + total.mT).to(self.mode)

    @cached_property
    def _half_inverse(self) -> Tensor:
        r"""The lower triangle S of the covariance :math:`S + S^\top`, with half of its diagonal.

        Double precision is needed, because variances near the data are small differences of large numbers.
        """
        half = torch.cholesky_inverse(self.factor).tril_()
        half.diagonal().mul_(0.5)
        return half

    def marginal_variance(self) -> Tensor:
        return torch.cholesky_inverse(self.factor).diagonal().to(self.mode)

    def reweighted(self, likelihood: float, prior: Tensor) -> "DensePosterior | None":
        if self.prior is None:
            return None
        precision = likelihood * self.precision
        precision.diagonal().add_(prior - likelihood * self.prior)
        return DensePosterior(self.mode, precision, prior)

    def for_tuning(self) -> LaplacePosterior:
        return (
            self if self.prior is None else SpectralPosterior(self.mode, Spectrum(self.precision, self.prior))
        )

    def log_determinant(self) -> Tensor:
        return 2 * self.factor.diagonal().log().sum()


@dataclass(frozen=True)
class TopEigen(Method):
    r"""Keep the k directions in which the data reduce the prior uncertainty most.

    With the diagonal prior precision :math:`\Pi` and the curvature G of the likelihood,

    .. math::
        \Pi^{-1/2} G\, \Pi^{-1/2} &\approx U^\top \Lambda U, \qquad
        P \approx \Pi^{1/2} (I + U^\top \Lambda U)\, \Pi^{1/2}, \\
        P^{-1} &\approx \Pi^{-1/2} \Bigl(I - U^\top \tfrac{\Lambda}{1+\Lambda}\, U\Bigr) \Pi^{-1/2} .

    In these directions, the posterior is narrow; in all other directions, it is as wide as the prior. If all latents
    have the same prior scale, the directions are the top eigenvectors of G.

    Status: exact if k is at least the rank of G; otherwise variances are too large, never too small.

    Args:
        rank: k, the number of directions, at most D; the eigensolver stores about 2 k + 64 vectors.
        precision: ``GGN()`` or ``Hessian()``.
        tolerance: bound on the residuals of the eigenvectors, relative to the largest eigenvalue.

    Raises:
        UnsupportedError: the prior couples latents.
        NotPositiveDefiniteError: the Hessian is not positive definite.
        NotConvergedError: the eigenvectors did not converge to the tolerance.

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
            worst = float(found.residuals.max() / found.values[0])
            raise NotConvergedError(
                f"the top {self.rank} eigenvectors have relative residuals up to {worst:.2g} after "
                f"{found.applications} products: use a smaller rank, or a larger tolerance"
            )
        return TopEigenPosterior(local.point, prior, found.values, found.vectors)


class TopEigenPosterior(RootPosterior):
    """A Gaussian whose precision is a diagonal plus a low-rank matrix.

    Attributes:
        prior: diagonal prior precision, [D].
        values: eigenvalues relative to the prior, ``[k]``.
        vectors: the eigenvectors, orthonormal rows ``[k, D]``.
    """

    stored = ("mode", "prior", "values", "vectors")

    def __init__(self, mode: Tensor, prior: Tensor, values: Tensor, vectors: Tensor) -> None:
        self.mode, self.prior, self.values, self.vectors = mode, prior, values, vectors
        if not bool((values > -1).all()):
            lowest = 1 + float(values.min())
            raise not_positive(f"P has curvature {lowest:.3g} times the prior's", curvature=lowest)

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
        if factor is None:  # the directions would change
            return None
        return TopEigenPosterior(self.mode, prior, self.values * (likelihood / factor), self.vectors)

    def log_determinant(self) -> Tensor:
        return self.prior.log().sum() + self.values.log1p().sum()
