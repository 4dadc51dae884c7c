# SPDX-License-Identifier: Apache-2.0
"""The precision as a matrix: exact, for small models."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pyro_dvi.core.undisturbed import widest
from pyro_dvi.curvature.example_gradients import ExampleGradients, OuterGradients
from pyro_dvi.errors import ArgumentError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method, RootPosterior


@dataclass(frozen=True)
class Dense(Method):
    r"""Build :math:`P \in \mathbb R^{D\times D}` and factorise it.

    Memory :math:`3 D^2` numbers. The Gauss-Newton matrix comes from gradients of single examples (K backward passes for
    K outputs) where layers have rules for them; otherwise, and for the Hessian, a column costs two gradients.

    Status: exact.

    Args:
        precision: ``GGN()`` or ``Hessian()``.
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

    precision: PrecisionMatrix = field(default_factory=GGN)
    max_size: int = 20_000

    reweights = True

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "DensePosterior":
        """Return the posterior."""
        size = len(local.point)
        if size > self.max_size:
            raise ArgumentError(
                f"Dense() would build a matrix of {size} x {size} ({size**2 * 8 / 2**30:.1f} GiB): use "
                "PosteriorSamples() or ConjugateGradient(), a subset of the sites, or a larger max_size"
            )
        precision = self.precision.matrix(local)
        return DensePosterior(local.point, 0.5 * (precision + precision.mT), local.prior_diagonal)


class DensePosterior(RootPosterior):
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
                f"the precision has {int((values <= 0).sum())} of {len(values)} eigenvalues that are not positive: the "
                "mode is no minimum. Run guide.polish(batches), or use precision=GGN()."
            )
        self.factor = factor
        self._rows_asked = 0

    def whitened(self, rows: Tensor) -> Tensor:
        flat = rows.reshape(-1, rows.shape[-1])
        return torch.linalg.solve_triangular(self.factor, flat.mT, upper=False).mT.reshape(rows.shape)

    def coloured(self, rows: Tensor) -> Tensor:
        return torch.linalg.solve_triangular(self.factor.mT, rows.mT, upper=True).mT

    def covariance(self, query: Query) -> Tensor:
        self._rows_asked += query.num_rows * query.size
        if self._rows_asked < len(self.mode):  # solves for so few rows take less work than the inverse
            return LaplacePosterior.covariance(self, query)
        return super().covariance(query)

    def covariance_of_examples(self, examples: ExampleGradients) -> Tensor:
        return torch.cat([self._of_part(examples, part) for part in examples.chunks()])

    def _of_part(self, examples: ExampleGradients, part: slice) -> Tensor:
        half, spans = self._half_inverse, examples.spans
        factors = _factors(examples, part, half)

        def times_rows(vectors: Tensor) -> Tensor:  # [m, s, n] of the first n columns to [m, s, K]
            known = zip(factors, spans, strict=True)
            found = [f.times_rows(vectors[..., s]) for f, s in known if s.start < vectors.shape[-1]]
            return torch.stack(found).sum(0)

        blocks = [half[span, : span.stop] for span in spans]
        found = [f.rows_times(block, times_rows) for f, block in zip(factors, blocks, strict=True)]
        total = torch.stack(found).sum(0)
        return (total + total.mT).to(self.mode)

    @cached_property
    def _half_inverse(self) -> Tensor:
        r"""The lower triangle S of the covariance, with half of its diagonal, so that it is :math:`S + S^\top`.

        In double precision: variances among the data are small differences of the large ones that the prior leaves.
        """
        wide = self.precision.to(widest(self.mode.device))
        half = torch.cholesky_inverse(torch.linalg.cholesky(wide)).tril_()
        half.diagonal().mul_(0.5)
        return half

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


def _factors(examples: ExampleGradients, part: slice, like: Tensor) -> "list[_Rows | _Single]":
    """Return the factors of J of some examples, tensor by tensor."""
    single, tensors = examples.single, range(len(examples.values))
    found: dict[int, _Rows | _Single] = {
        k: _Single(*outer.factors(part, like.dtype), outer) for k, outer in single.items()
    }
    rest = [k for k in tensors if k not in single]
    if rest:
        rows = examples.rows(part, rest).to(like).split([examples.sizes[k] for k in rest], -1)
        found |= {k: _Rows(some) for k, some in zip(rest, rows, strict=True)}
    return [found[k] for k in tensors]


@dataclass
class _Rows:
    """Rows of J for a tensor, ``[m, K, n]``."""

    rows: Tensor

    def times_rows(self, vectors: Tensor) -> Tensor:
        """Return products ``[m, s, K]`` of vectors ``[m, s, n]`` with the rows of their example."""
        return vectors @ self.rows.mT

    def rows_times(self, block: Tensor, then: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``then`` of the rows times a matrix ``[n, n']``, a linear function to ``[m, K, K]``."""
        return then(self.rows @ block)


@dataclass
class _Single:
    r"""The same for a weight where a row is one product :math:`\delta_k a^\top`: a ``[m, q]``, delta ``[m, K, p]``."""

    a: Tensor
    delta: Tensor
    outer: OuterGradients

    def times_rows(self, vectors: Tensor) -> Tensor:
        units = self.outer.by_unit(vectors.movedim(-1, 0))  # [p, q, m, s]
        return torch.einsum("pqms,mq->msp", units, self.a) @ self.delta[..., : len(units)].mT

    def rows_times(self, block: Tensor, then: Callable[[Tensor], Tensor]) -> Tensor:
        units = self.outer.by_unit(block)
        beyond = 0 if self.outer.inputs_first else self.a.shape[-1]  # columns of later units, which are zero
        ends = [block.shape[1] - later * beyond for later in reversed(range(len(units)))]
        found = [then((self.a @ unit[:, :end]).unsqueeze(1)) for unit, end in zip(units, ends, strict=True)]
        return self.delta @ torch.cat(found, 1)
