# SPDX-License-Identifier: Apache-2.0
r"""Coordinates :math:`x = x_0 + R^{-1} y` in which a function is about round."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError


class SmoothFunction(Protocol):
    """What a search has to know of a function U of ``[D]``; the same U at each call."""

    def value_and_gradient(self, x: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return U(x) and its gradient ``[D]``."""

    def product(self, x: Tensor, vectors: Tensor, /) -> Tensor:
        """Return the products ``[S, D]`` of the Hessian at x with the rows of ``vectors``."""


class Metric(Protocol):
    r"""A positive definite matrix :math:`M = R^\top R` by a root, for rows ``[S, D]``."""

    def coloured(self, rows: Tensor) -> Tensor:
        r"""Return :math:`R^{-1} y`, a displacement of x, for each row y."""

    def whitened(self, rows: Tensor) -> Tensor:
        r"""Return :math:`R^{-\top} g`, the gradient with respect to y, for each gradient g with respect to x."""


class DiagonalMetric:
    """A diagonal M.

    Args:
        diagonal: of M, positive, ``[D]``.

    Raises:
        ArgumentError: an entry is not positive.
    """

    def __init__(self, diagonal: Tensor) -> None:
        if diagonal.dim() != 1 or not bool((diagonal > 0).all()):
            raise ArgumentError("the metric is a positive diagonal [D]")
        self._inverse_root = diagonal.detach().rsqrt()

    def coloured(self, rows: Tensor) -> Tensor:
        """Return displacements of x."""
        return rows * self._inverse_root

    whitened = coloured


class CholeskyMetric:
    r"""A dense :math:`M = L L^\top`.

    Args:
        factor: L, lower triangular, ``[D, D]``.
    """

    def __init__(self, factor: Tensor) -> None:
        self._factor = factor.detach()

    def coloured(self, rows: Tensor) -> Tensor:
        """Return displacements of x."""
        return torch.linalg.solve_triangular(self._factor, rows, upper=False, left=False)

    def whitened(self, rows: Tensor) -> Tensor:
        """Return gradients with respect to y."""
        return torch.linalg.solve_triangular(self._factor.mT, rows, upper=True, left=False)


@dataclass(frozen=True)
class InMetric:
    r"""The function :math:`y \mapsto U(x_0 + R^{-1} y)`, in whose coordinates the norm is that of M.

    Attributes:
        problem: U.
        metric: M, close to the Hessian of U in scale.
        origin: :math:`x_0`, ``[D]``: displacements from it lose nothing to rounding.

    Example:
        >>> class Bowl:  # 50 a^2 + b^2 / 2
        ...     def value_and_gradient(self, x):
        ...         return 50 * x[0] ** 2 + x[1] ** 2 / 2, torch.stack([100 * x[0], x[1]])
        ...
        ...     def product(self, x, vectors):
        ...         return vectors * torch.tensor([100.0, 1.0])
        >>> round_bowl = InMetric(Bowl(), DiagonalMetric(torch.tensor([100.0, 1.0])), torch.ones(2))
        >>> (
        ...     round_bowl.value_and_gradient(torch.zeros(2))[1],
        ...     round_bowl.product(torch.zeros(2), torch.eye(2)),
        ... )
        (tensor([10.,  1.]), tensor([[1., 0.],
                [0., 1.]]))
    """

    problem: SmoothFunction
    metric: Metric
    origin: Tensor

    def x(self, y: Tensor) -> Tensor:
        """Return the point itself."""
        return self.origin + self.metric.coloured(y.unsqueeze(0))[0]

    def value_and_gradient(self, y: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return U and its gradient with respect to y."""
        value, gradient = self.problem.value_and_gradient(self.x(y))
        return value, self.metric.whitened(gradient.detach().unsqueeze(0))[0]

    def product(self, y: Tensor, vectors: Tensor, /) -> Tensor:
        r"""Return products with :math:`R^{-\top} P R^{-1}`."""
        return self.metric.whitened(self.problem.product(self.x(y), self.metric.coloured(vectors)))
