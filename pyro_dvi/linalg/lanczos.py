# SPDX-License-Identifier: Apache-2.0
"""Krylov methods for a symmetric matrix: its smallest eigenvalue, log determinant and largest eigenpairs."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import NotPositiveDefiniteError
from pyro_dvi.linalg.operator import Operator, apply, gaussian_rows


class LanczosProcess:
    r"""The Lanczos recursion for several starting vectors at once; :meth:`advance` applies the operator once.

    .. math::
        \beta_k\, q_{k+1} = A q_k - \alpha_k q_k - \beta_{k-1} q_{k-1}, \qquad \alpha_k = q_k^\top A q_k

    Each new vector is orthogonalised against all earlier ones, twice. The recursion of a row (one starting vector) ends
    when beta is within rounding error of zero: the row's Krylov space is then invariant, and the operator is no longer
    applied to the row.

    Args:
        operator: A.
        starts: nonzero starting vectors as rows, ``[S, D]``.
        capacity: maximum number of steps; ``S * capacity * D`` numbers are stored.
    """

    def __init__(self, operator: Operator, starts: Tensor, capacity: int) -> None:
        starts = starts.detach()
        self.capacity = min(capacity, starts.shape[-1])
        self.operator = operator
        self.basis = starts.new_empty(len(starts), self.capacity, starts.shape[-1])
        self.basis[:, 0] = starts / starts.norm(dim=-1, keepdim=True)
        # The small matrices are on the CPU in float64, where decompositions are fastest and most accurate.
        self.diagonal = torch.zeros(len(starts), self.capacity, dtype=torch.float64)
        self.off_diagonal = torch.zeros_like(self.diagonal)  # the last entry couples to the next vector
        self.lengths = torch.zeros(len(starts), dtype=torch.long)
        self.active = torch.arange(len(starts))
        self.steps = 0

    @property
    def finished(self) -> bool:
        """Whether no row can advance, because the capacity is exhausted or every space is invariant."""
        return self.steps == self.capacity or not len(self.active)

    def advance(self) -> None:
        """Extend the space of each active row by one vector."""
        k, rows = self.steps, self.active
        every = len(rows) == len(self.basis)
        earlier = (self.basis if every else self.basis[rows])[:, : k + 1]
        q = earlier[:, k]
        product = apply(self.operator, q)
        alpha = (q * product).sum(-1)  # summed pairwise, unlike a matmul
        w = product - alpha.unsqueeze(-1) * q
        for _ in range(2):
            w = w - (earlier.transpose(1, 2) @ (earlier @ w.unsqueeze(-1))).squeeze(-1)
        beta = w.norm(dim=-1)
        self.diagonal[rows, k] = alpha.cpu().double()
        self.lengths[rows] = self.steps = k + 1
        scale = self.diagonal[rows].abs().amax(-1) + self.off_diagonal[rows].amax(-1)
        remains = beta.cpu().double() > 32 * torch.finfo(w.dtype).eps * scale
        remains &= k + 1 < self.basis.shape[-1]
        self.off_diagonal[rows, k] = torch.where(remains, beta.cpu().double(), 0.0)
        self.active = rows[remains]
        if k + 1 < self.capacity:
            kept = remains.to(w.device)
            self.basis[self.active, k + 1] = w[kept] / beta[kept].unsqueeze(-1)

    def tridiagonal(self, row: int = 0) -> Tensor:
        r"""Return the matrix T of a row, ``[k, k]``, in :math:`A Q = Q T + \rho\, q e_k^\top`.

        If the Krylov space became invariant, k is smaller than the number of steps, and :math:`\rho` is zero.
        """
        k = int(self.lengths[row])
        beside = self.off_diagonal[row, : k - 1]
        return self.diagonal[row, :k].diag() + beside.diag(1) + beside.diag(-1)


_BASIS_BYTES = 2**31


@dataclass(frozen=True)
class Eigenpair:
    r"""An eigenvalue and its eigenvector.

    Attributes:
        value: :math:`\lambda`, the Rayleigh quotient of the vector. It is at least the smallest eigenvalue, so a
            negative value proves that the matrix is not positive definite.
        vector: v, ``[D]``, of norm one.
        residual: :math:`|A v - \lambda v|`; some eigenvalue lies within this distance of the value.
        norm: lower bound on the largest ``|eigenvalue|``, from the same Krylov space.
    """

    value: float
    vector: Tensor
    residual: float
    norm: float

    @property
    def resolution(self) -> float:
        """Smallest magnitude of an eigenvalue that can be distinguished from zero in this dtype."""
        return 8 * torch.finfo(self.vector.dtype).eps * self.norm


def smallest_eigenpair(
    operator: Operator, like: Tensor, *, steps: int = 200, tolerance: float = 1e-2
) -> Eigenpair:
    r"""Return the algebraically smallest eigenpair, from the Lanczos recursion with a random start.

    Status: the value is an upper bound on the smallest eigenvalue and converges to it. After m steps, the error is
    about :math:`(\lambda_{\max} - \lambda_{\min})\,(\log D / m)^2` in the worst case, and much smaller if the
    eigenvalue is well separated. The smallest eigenvalue of :math:`M^{-1/2} A M^{-1/2}` has the same sign, and the
    recursion often converges faster for this matrix.

    Args:
        operator: A, symmetric.
        like: vector ``[D]`` with the dtype and device to use.
        steps: maximum number of steps, each of which applies the operator to one vector. ``steps * D`` numbers are
            stored. If they exceed 2 GiB, the maximum is reduced, but not below 20.
        tolerance: bound on the residual relative to ``|value|``. If it is below 1, some eigenvalue certainly has the
            sign of the value.

    Raises:
        ArgumentError: the number of steps is not positive.

    Source: Kuczynski & Wozniakowski (1992) for random starts.

    Example:
        >>> saddle = torch.tensor([3.0, 2.0, -0.5])
        >>> round(smallest_eigenpair(lambda v: v * saddle, saddle).value, 4)
        -0.5
    """
    check_count("steps", steps)
    steps = min(steps, max(20, _BASIS_BYTES // (len(like) * like.element_size())))
    process = LanczosProcess(operator, gaussian_rows(1, len(like), like), steps)
    rounding, next_look = 8 * torch.finfo(like.dtype).eps, 1
    while True:
        process.advance()
        if process.steps < next_look and not process.finished:
            continue
        next_look = process.steps + 1 + process.steps // 10  # limits the cost of the small decompositions
        values, vectors = torch.linalg.eigh(process.tridiagonal())
        value, norm = float(values[0]), float(values.abs().max())
        residual = float(process.off_diagonal[0, len(values) - 1] * vectors[-1, 0].abs())
        if residual <= max(tolerance * abs(value), rounding * norm) or process.finished:
            break
    vector = vectors[:, 0].to(like) @ process.basis[0, : len(values)]
    return Eigenpair(value, vector / vector.norm(), residual, norm)


@dataclass(frozen=True)
class TraceEstimate:
    """An estimate of a trace, averaged over probes.

    Attributes:
        value: the estimate.
        standard_error: standard error of the value, from the spread between probes; NaN with a single probe. It
            excludes the error of the quadrature, which decreases exponentially with the steps.
    """

    value: float
    standard_error: float


@dataclass(frozen=True)
class SpectralQuadrature:
    r"""Nodes and weights with :math:`z_p^\top f(A) z_p \approx D \sum_j w_{pj} f(\theta_{pj})` for each probe.

    Attributes:
        nodes: Ritz values, ``[probes, steps]``, in float64 on the CPU.
        weights: weights of the nodes, ``[probes, steps]``. Each row sums to 1; its last weights are zero if the Krylov
            space ended early.
        dim: D.
    """

    nodes: Tensor
    weights: Tensor
    dim: int

    def trace(self, function: Callable[[Tensor], Tensor]) -> TraceEstimate:
        """Return the estimate of tr f(A) for an elementwise ``function``, without applying the operator again."""
        # Nodes that are padding may lie outside the domain of f.
        nodes = torch.where(self.weights > 0, self.nodes, self.nodes[:, :1])
        per_probe = self.dim * (self.weights * function(nodes)).sum(-1)
        several = len(per_probe) > 1
        error = per_probe.std() / len(per_probe) ** 0.5 if several else per_probe.new_tensor(torch.nan)
        return TraceEstimate(float(per_probe.mean()), float(error))

    def log_determinant(self, shift: float = 0.0) -> TraceEstimate:
        r"""Return the estimate of :math:`\log\det(A + cI) = \operatorname{tr}\log(A + cI)` for a shift c.

        For a posterior precision G + c D with a diagonal prior precision D, use the quadrature of
        :math:`A = D^{-1/2} G D^{-1/2}`. Adding ``D.log().sum()`` to this estimate then gives log det(G + c D) for any
        multiplier c of the prior. The number of steps should be about the square root of the condition number of A +
        cI.

        Raises:
            NotPositiveDefiniteError: A + cI has an eigenvalue that is not positive.

        Source: Ubaru, Chen & Saad (2017), Section 3.

        Example:
            >>> gram = torch.tensor(
            ...     [1.0, 0.0, 3.0]
            ... )  # singular: log determinants exist for positive shifts only
            >>> quadrature = trace_of_function(lambda v: v * gram, gram, torch.Generator())
            >>> round(quadrature.log_determinant(1.0).value, 4)  # log(2 * 1 * 4)
            2.0794
        """
        lowest = float(self.nodes[self.weights > 0].min()) + shift
        if lowest <= 0:
            found = f"A + c I, with c = {shift:.6g}, has an eigenvalue of at most {lowest:.3g} and no log det"
            remedy = "run guide.polish(batches) first, or use GGN() or a larger c"
            raise NotPositiveDefiniteError(f"{found}: {remedy}", curvature=lowest)
        return self.trace(lambda nodes: (nodes + shift).log())


def trace_of_function(
    operator: Operator, like: Tensor, generator: torch.Generator, *, num_probes: int = 8, steps: int = 40
) -> SpectralQuadrature:
    r"""Prepare estimates of tr f(A) for any f, with stochastic Lanczos quadrature.

    .. math::
        \operatorname{tr} f(A) = \mathbb{E}\,z^\top f(A)\,z \approx \frac{D}{P} \sum_p \sum_j w_{pj}\,f(\theta_{pj}),
        \qquad w_{pj} = (e_1^\top u_{pj})^2

    with Rademacher probes z and the eigenpairs :math:`(\theta, u)` of the tridiagonal matrix of each probe.

    Status: unbiased over the probes, up to the error of the Gauss quadrature, which is zero for polynomials of degree
    below ``2 * steps`` and for ``steps >= dim``. For a diagonal matrix, the estimate does not depend on the probes.

    Args:
        operator: A, symmetric.
        like: vector ``[D]`` with the dtype and device of the probes.
        generator: random generator for the probes.
        num_probes: P, the number of probes.
        steps: number of Lanczos steps. ``steps * D`` numbers are stored for each probe; as many probes as fit into 2
            GiB are processed together.

    Returns:
        The nodes and weights; ``.trace(torch.log)``, for example, is the estimate for the logarithm.

    Raises:
        ArgumentError: a number of steps or probes is not positive.

    Source: Ubaru, Chen & Saad (2017), Alg. 1; Hutchinson (1989).

    Example:
        >>> diagonal, generator = torch.tensor([1.0, 2.0, 3.0]), torch.Generator()
        >>> trace_of_function(lambda v: v * diagonal, diagonal, generator).trace(torch.sqrt).value
        4.146...
    """
    for name, count in (("num_probes", num_probes), ("steps", steps)):
        check_count(name, count)
    shape = num_probes, len(like)
    signs = torch.randint(2, shape, generator=generator, device=generator.device, dtype=like.dtype)
    signs = signs.mul_(2).sub_(1).to(like.device)
    nodes, weights = torch.zeros(2, num_probes, steps, dtype=torch.float64).unbind()
    together = max(1, _BASIS_BYTES // (steps * len(like) * like.element_size()))
    for start in range(0, num_probes, together):
        some = signs[start : start + together]
        process = LanczosProcess(operator, some, steps)
        while not process.finished:
            process.advance()
        for p in range(len(some)):
            values, vectors = torch.linalg.eigh(process.tridiagonal(p))
            nodes[start + p, : len(values)] = values
            weights[start + p, : len(values)] = vectors[0].square()
    return SpectralQuadrature(nodes, weights, len(like))


_BLOCK = 16  # vectors applied together
_BUDGET = 400  # maximum number of applications, to which 20 per pair are added


@dataclass(frozen=True)
class Eigenpairs:
    r"""The eigenpairs found, with :math:`A v_i \approx \lambda_i v_i` and orthonormal :math:`v_i`.

    Attributes:
        values: eigenvalues ``[k]``, in descending order.
        vectors: the rows v, ``[k, D]``.
        residuals: :math:`|A v_i - \lambda_i v_i|`, ``[k]``; an eigenvalue lies within this distance of each value.
        converged: whether every residual is within the tolerance, or the space contains all D directions.
        applications: number of vectors to which the operator was applied.
    """

    values: Tensor
    vectors: Tensor
    residuals: Tensor
    converged: bool
    applications: int


def top_eigenpairs(operator: Operator, like: Tensor, k: int, *, tolerance: float = 1e-4) -> Eigenpairs:
    r"""Return the k algebraically largest eigenvalues of a symmetric matrix and their eigenvectors.

    The space V grows by one block Q at a time: the part of :math:`A Q_-` that is orthogonal to V, where :math:`Q_-` is
    the previous block. The pairs are the eigenpairs of :math:`H = V A V^\top`. Both V and :math:`A V` are stored, so
    the residuals do not require another application of A. When V is full, it restarts from its best vectors.

    Status: exact up to the tolerance if ``converged``; the error of a well-separated value is its squared residual
    divided by the gap. Copies of an eigenvalue with multiplicity above 16 may be missed.

    Args:
        operator: A, symmetric; positive semi-definite in the usual case of a Gauss-Newton matrix.
        like: vector ``[D]`` with the dtype and device to use.
        k: number of pairs, at most D.
        tolerance: bound on the residuals relative to the largest ``|value|``; float32 reaches about 1e-6.

    Source: Wu & Simon (2000) for the thick restart; Golub & Van Loan (2013), Section 10.3, for blocks.

    Example:
        >>> diagonal = torch.arange(1.0, 101.0)
        >>> top_eigenpairs(lambda v: v * diagonal, diagonal, 3).values.round(decimals=2)
        tensor([100.,  99.,  98.])
    """
    dim = len(like)
    block = min(k, _BLOCK)
    generator = torch.Generator().manual_seed(0)
    budget, applications = 20 * k + _BUDGET, 0
    keep, capacity = k + block, min(dim, 2 * k + 4 * block)
    basis = products = like.new_empty(0, dim)
    q = _orthonormal(gaussian_rows(block, dim, like, generator), basis, 0.0)
    while True:
        product = apply(operator, q)
        applications += len(q)
        basis, products = torch.cat([basis, q]), torch.cat([products, product])
        projected = (basis @ products.T).cpu().double()
        values, vectors = torch.linalg.eigh(0.5 * (projected + projected.T))
        scale, best = float(values.abs().max()), vectors.T.flip(0)[:keep].to(like)
        top, found, moved = values.flip(0)[:k].to(like), best @ basis, best @ products
        residuals = (moved[:k] - top.unsqueeze(1) * found[:k]).norm(dim=1)
        converged = len(values) >= k and float(residuals.max()) <= tolerance * scale
        if converged or len(basis) == dim or applications >= budget:
            return Eigenpairs(top, found[:k], residuals, converged or len(basis) == dim, applications)
        following = _orthonormal(product, basis, scale)
        # The space is invariant, but it is too small or may lack the largest eigenvalues: add random directions.
        if not len(following):
            following = _orthonormal(gaussian_rows(block, dim, like, generator), basis, 0.0)
        if len(basis) + len(following) > capacity and len(basis) > keep:
            basis, products = found, moved
        q = following[: dim - len(basis)]


def _orthonormal(rows: Tensor, basis: Tensor, scale: float) -> Tensor:
    """Return an orthonormal basis of the components of the rows that are orthogonal to ``basis``.

    Directions that may be rounding errors of numbers of size ``scale`` are left out.
    """
    for _ in range(2):
        rows = rows - (rows @ basis.T) @ basis
        q, r = torch.linalg.qr(rows.T)
        real = r.diagonal().abs() > 32 * torch.finfo(rows.dtype).eps * scale
        rows, scale = q.T[real], 0.0
    return rows
