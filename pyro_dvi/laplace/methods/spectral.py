# SPDX-License-Identifier: Apache-2.0
"""Gaussians whose precisions differ by two factors, from one set of eigenvectors."""

from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from pyro_dvi.laplace.energy.precision import common_ratio
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.method import RootPosterior, not_positive

_MEMORY = 2**30  # maximum bytes of rows to keep


class Spectrum:
    r"""Eigenvectors of the likelihood's contribution G to the precision, relative to a diagonal prior precision.

    .. math:: \Pi^{-1/2} G\, \Pi^{-1/2} = V \Lambda V^\top, \qquad
        (aG + c\Pi)^{-1} = \Pi^{-1/2} V (a\Lambda + c)^{-1} V^\top \Pi^{-1/2}

    Rows of a Jacobian are multiplied by :math:`\Pi^{-1/2} V` once for all a and c.

    Status: exact.

    Args:
        precision: :math:`G + \Pi`, ``[D, D]``, in double precision.
        prior: the diagonal of :math:`\Pi`, positive, [D].

    Attributes:
        values: the diagonal of :math:`\Lambda`, [D].
        basis: :math:`\Pi^{-1/2} V`, ``[D, D]``.
    """

    def __init__(self, precision: Tensor, prior: Tensor) -> None:
        self.prior = prior
        half = prior.to(precision).rsqrt()
        self.values, vectors = torch.linalg.eigh(half.unsqueeze(-1) * precision * half)
        self.values = self.values - 1
        self.basis = half.unsqueeze(-1) * vectors
        self._kept: WeakKeyDictionary[Query, Tensor] = WeakKeyDictionary()

    def projected(self, rows: Tensor) -> Tensor:
        r"""Return :math:`R\, \Pi^{-1/2} V` for rows R, ``[*lead, D]``."""
        return (rows.to(self.basis) @ self.basis).to(rows)

    def of_query(self, query: Query) -> Tensor:
        """Return the product with the Jacobian of a query, ``[B, K, D]``; it is kept while the query exists."""
        found = self._kept.get(query)
        if found is None:
            at_once = max(query.size, _MEMORY // (32 * query.layout.size))
            found = torch.cat([self.projected(rows) for rows in query.rows(at_once)])
            found = found.unflatten(0, (query.num_rows, query.size))
            if sum(other.nbytes for other in self._kept.values()) + found.nbytes <= _MEMORY:
                self._kept[query] = found
        return found


class SpectralPosterior(RootPosterior):
    r"""The Gaussian with precision :math:`aG + c\Pi`.

    Args:
        mode: [D].
        spectrum: the eigenvectors.
        likelihood: a.
        prior: c.
    """

    def __init__(self, mode: Tensor, spectrum: Spectrum, likelihood: float = 1.0, prior: float = 1.0) -> None:
        self.mode, self.spectrum = mode, spectrum
        self.values = likelihood * spectrum.values + prior
        if not bool(self.values.min() > 0):
            raise not_positive(
                f"the precision has eigenvalue {float(self.values.min()):.3g} relative to the prior's"
            )

    def whitened(self, rows: Tensor) -> Tensor:
        return self.spectrum.projected(rows) * self.values.rsqrt().to(rows)

    def coloured(self, rows: Tensor) -> Tensor:
        return ((rows * self.values.rsqrt()) @ self.spectrum.basis.mT).to(rows)

    def covariance(self, query: Query) -> Tensor:
        white = self.spectrum.of_query(query) * self.values.rsqrt().to(self.mode)
        return white @ white.mT

    def marginal_variance(self) -> Tensor:
        return (self.spectrum.basis.square() @ self.values.reciprocal()).to(self.mode)

    def reweighted(self, likelihood: float, prior: Tensor) -> "SpectralPosterior | None":
        factor = common_ratio(prior, self.spectrum.prior)
        return None if factor is None else SpectralPosterior(self.mode, self.spectrum, likelihood, factor)

    def log_determinant(self) -> Tensor:
        return self.spectrum.prior.to(self.values).log().sum() + self.values.log().sum()
