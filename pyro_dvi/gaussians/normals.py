# SPDX-License-Identifier: Apache-2.0
r"""Gaussians with covariances, and Gaussians whose standard deviation is proportional to the mean.

Vectors have the form :math:`w_i = \bar w_i + \sum_r F_{ri}\,\epsilon_r + \sqrt{d_i}\,\delta_i` with standard Gaussian
:math:`\epsilon, \delta`. The covariance is dense, low-rank, or dense within each output of a layer, with a separate
:math:`\epsilon` for each output.
"""

import math
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, distributions as td
from torch.distributions import constraints


class RowsNormal(dist.TorchDistribution):
    r"""A vector whose permuted elements are independent Gaussian rows, each with its own covariance.

    .. math:: w = \bar w + \operatorname{order}(L_1\epsilon_1, \dots, L_m\epsilon_m)

    Args:
        loc: means ``[n]``, in the order of the vector.
        scale_tril: Cholesky factors of the rows, ``[m, k, k]`` with mk = n.
        order: index into the concatenated rows for each element of the vector, ``[n]``.

    Example:
        >>> rows = RowsNormal(
        ...     torch.zeros(2), 2 * torch.eye(1).expand(2, 1, 1), torch.tensor([1, 0])
        ... )
        >>> rows.variance
        tensor([4., 4.])
    """

    arg_constraints = {"loc": constraints.real_vector}  # noqa: RUF012
    support = constraints.real_vector
    has_rsample = True

    def __init__(self, loc: Tensor, scale_tril: Tensor, order: Tensor) -> None:
        self.loc, self.scale_tril, self.order = loc, scale_tril, order
        super().__init__(torch.Size(), loc.shape, validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Means."""
        return self.loc

    @property
    def variance(self) -> Tensor:
        """Variances."""
        return self.scale_tril.square().sum(-1).flatten()[self.order]

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (as torch's)
        """Draw vectors ``[*sample_shape, n]``."""
        noise = torch.randn(
            *sample_shape, *self.scale_tril.shape[:-1], 1, dtype=self.loc.dtype, device=self.loc.device
        )
        return self.loc + (self.scale_tril @ noise).flatten(-3)[..., self.order]

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of vectors ``[*, n]``."""
        rows = (value - self.loc)[..., self.order.argsort()].unflatten(-1, self.scale_tril.shape[:2])
        zeros = rows.new_zeros(rows.shape[-1])
        return td.MultivariateNormal(zeros, scale_tril=self.scale_tril).log_prob(rows).sum(-1)

    def entropy(self) -> Tensor:
        """Entropy of the vector."""
        diagonal = self.scale_tril.diagonal(dim1=-2, dim2=-1)
        return diagonal.log().sum() + 0.5 * len(self.loc) * math.log(2 * math.pi * math.e)


def is_joint(fn: Any) -> bool:
    """Return whether a distribution is a Gaussian vector with correlated elements."""
    known = isinstance(fn, td.MultivariateNormal | td.LowRankMultivariateNormal | RowsNormal)
    return known and not fn.batch_shape


def shared_factor(fn: Any) -> tuple[Tensor, Tensor | None, bool]:
    r"""Return F ``[R, n]``, d ``[n]`` (None if zero), and whether the outputs of a layer share :math:`\epsilon`."""
    if isinstance(fn, RowsNormal):
        return fn.scale_tril.flatten(0, 1)[fn.order].mT, None, len(fn.scale_tril) == 1
    if isinstance(fn, td.LowRankMultivariateNormal):
        return fn.cov_factor.mT, fn.cov_diag, True
    return fn.scale_tril.mT, None, True


def total_correlation(fn: Any) -> Tensor:
    r"""Return the KL divergence of a Gaussian vector from the product of its marginals.

    .. math:: \sum_i \log\sigma_i - \tfrac12\log\det\Sigma

    Adding this total correlation to the divergences of the marginals from independent priors gives the divergence of
    the vector.

    Status: exact.

    Example:
        >>> total_correlation(
        ...     dist.MultivariateNormal(torch.zeros(2), torch.tensor([[1.0, 0.6], [0.6, 1.0]]))
        ... )
        tensor(0.2231)
    """
    variance = fn.variance
    alone = variance.log().sum() + variance.numel() * math.log(2 * math.pi * math.e)
    return 0.5 * alone - fn.entropy().sum()


class MatrixNormal(dist.Normal):
    r"""A Gaussian matrix :math:`W = M + L_r Z L_c^\top` with standard Gaussian Z.

    Its covariance is a Kronecker product.

    Attributes such as ``scale`` describe the marginal Normals of single elements. Draws, and the sum of ``log_prob``
    over the elements, belong to the distribution of the whole matrix.

    Args:
        loc: M, ``[*, p, ...]``; the dimensions after p are flattened to q columns.
        rows: :math:`L_r` ``[p, p]``, lower triangular.
        columns: :math:`L_c` ``[n, n]``, lower triangular, with n ≥ q. If n > q, this is the distribution of the first q
            columns of a wider matrix.
        dims: number of dimensions of ``loc`` that belong to the matrix; if it is 1, q is 1.

    Example:
        >>> q = MatrixNormal(
        ...     torch.zeros(2, 1), torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.eye(1), 2
        ... )
        >>> q.variance.flatten(), float(total_correlation(q))
        (tensor([1.0000, 2.0000]), 0.3465...)
    """

    arg_constraints = {"loc": constraints.real}  # noqa: RUF012

    def __init__(self, loc: Tensor, rows: Tensor, columns: Tensor, dims: int) -> None:
        self.loc, self.rows, self.columns, self.dims = loc, rows, columns, dims
        td.Distribution.__init__(self, loc.shape, validate_args=False)

    @property
    def _own(self) -> Tensor:
        """The factor of these q columns only."""
        q = self.loc.shape[-self.dims :].numel() // len(self.rows)
        return self.columns[:q, :q]

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """Marginal standard deviations."""
        deviations = torch.outer(*(torch.linalg.vector_norm(x, dim=1) for x in (self.rows, self._own)))
        return deviations.reshape(self.loc.shape[-self.dims :]).expand_as(self.loc)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "MatrixNormal":
        """Return independent matrices."""
        return MatrixNormal(self.loc.expand(torch.Size(batch_shape)), self.rows, self.columns, self.dims)

    def matrix(self, values: Tensor) -> Tensor:
        """Return values ``[*, p, ...]`` as ``[*, p, q]``."""
        return values.unflatten(-1, (-1, 1)) if self.dims == 1 else values.flatten(1 - self.dims)

    def coloured(self, noise: Tensor) -> Tensor:
        """Transform standard Gaussian noise to deviations from the mean."""
        return (self.rows @ self.matrix(noise) @ self._own.mT).reshape(noise.shape)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008 (as torch's)
        """Draw matrices."""
        shape = self._extended_shape(sample_shape)
        return self.loc + self.coloured(torch.randn(shape, dtype=self.loc.dtype, device=self.loc.device))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:  # noqa: B008
        """Draw matrices without building an autograd graph."""
        with torch.no_grad():
            return self.rsample(sample_shape)

    def log_prob(self, value: Tensor) -> Tensor:
        """Return terms whose sum over the elements is the log density of the matrix."""
        left = torch.linalg.solve_triangular(self.rows, self.matrix(value - self.loc), upper=False)
        noise = torch.linalg.solve_triangular(self._own, left.mT, upper=False).mT
        return 0.5 - 0.5 * noise.reshape(value.shape).square() - self.entropy()

    def entropy(self) -> Tensor:
        """Return terms whose sum over the elements is the entropy of the matrix."""
        logs = self.rows.diagonal().log().mean() + self._own.diagonal().log().mean()
        return (logs + 0.5 * math.log(2 * math.pi * math.e)).expand_as(self.loc)

    def next_column(self, loc: Tensor, value: Tensor | None = None) -> "MatrixNormal":
        """Return the next column of the wider matrix, conditional on these columns if their value is given.

        Args:
            loc: mean of the next column, ``[p]``.
            value: value of these columns; None for the marginal.
        """
        q = len(self._own)
        spread = self.columns[q, : q + 1]
        if value is None:
            return MatrixNormal(loc, self.rows, torch.linalg.vector_norm(spread).reshape(1, 1), 1)
        weights = torch.linalg.solve_triangular(self._own.mT, spread[:-1].unsqueeze(-1), upper=True)
        shift = (self.matrix(value - self.loc).detach() @ weights).squeeze(-1)
        return MatrixNormal(loc + shift, self.rows, spread[-1].reshape(1, 1), 1)


class MultiplicativeNormal(dist.Normal):
    r"""Weights with multiplicative Gaussian noise.

    .. math:: w_{ij} \sim \mathcal N\bigl(m_{ij},\ \alpha_j m_{ij}^2 + \varepsilon\bigr)

    A deterministic weight has this distribution if its input j is multiplied by noise with mean 1 and variance
    :math:`\alpha_j`, drawn independently for each product. The :math:`\varepsilon` keeps densities and gradients finite
    if a weight is zero. In the paper, :math:`\varepsilon` appears only in the logarithm of the divergence. Here, it is
    a part of the variance, so that samples, densities and divergences are consistent; this adds the constant
    :math:`\varepsilon / 2 s^2` per weight to the divergence.

    Status: exact.

    Args:
        loc: means m, floating-point, of any shape.
        alpha: nonnegative relative variance, broadcastable to ``loc``; its shape is kept.
        eps: :math:`\varepsilon`, in squared units of ``loc``; by default, the paper's value, which is a standard
            deviation of 1e-5.

    Raises:
        ValueError: a mean is not finite or ``alpha`` is negative, and Pyro's validation is enabled.

    Source: Schmitt & Roth (2021), "Sampling-free variational inference for neural networks with multiplicative
    activation noise", Eq. 5, and Appendix A for :math:`\varepsilon`.

    Example:
        >>> q = MultiplicativeNormal(
        ...     torch.tensor([[1.0, -2.0], [0.0, 4.0]]), torch.tensor([[0.01, 0.25]])
        ... )
        >>> q.scale
        tensor([[1.0000e-01, 1.0000e+00],
                [1.0000e-05, 2.0000e+00]])
        >>> q.expand((3, 2, 2)).to_event(2).base_dist.alpha.shape
        torch.Size([1, 2])
    """

    # The standard deviation is computed only on demand; moment propagation does not need it.
    arg_constraints = {"loc": constraints.real, "alpha": constraints.nonnegative}  # noqa: RUF012

    def __init__(
        self, loc: Tensor, alpha: Tensor, eps: float = 1e-10, validate_args: bool | None = None
    ) -> None:
        self.loc, self.alpha, self.eps = loc, alpha, float(eps)
        torch.distributions.Distribution.__init__(self, loc.shape, validate_args=validate_args)

    @property
    def variance(self) -> Tensor:
        """Variances."""
        return self.alpha * self.loc.square() + self.eps

    @property
    def scale(self) -> Tensor:  # type: ignore[override]
        """Standard deviations."""
        return self.variance.sqrt()

    def expand(self, batch_shape: Any, _instance: Any = None) -> "MultiplicativeNormal":
        """Return the distribution with an expanded mean; ``alpha`` keeps its shape and broadcasts."""
        new = self._get_checked_instance(MultiplicativeNormal, _instance)
        batch_shape = torch.Size(batch_shape)
        new.loc, new.alpha, new.eps = self.loc.expand(batch_shape), self.alpha, self.eps
        torch.distributions.Distribution.__init__(new, batch_shape, validate_args=False)
        new._validate_args = self._validate_args
        return new
