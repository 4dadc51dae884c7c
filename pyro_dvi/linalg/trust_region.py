# SPDX-License-Identifier: Apache-2.0
"""A quadratic model of a function, minimised within a radius on a Krylov space."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.linalg.lanczos import LanczosProcess
from pyro_dvi.linalg.operator import Operator

__all__ = ["KrylovModel", "ModelStep", "minimise_within"]


def minimise_within(values: Tensor, gradient: Tensor, radius: float) -> tuple[Tensor, float]:
    r"""Minimise a quadratic function in the eigenbasis of its Hessian, within a ball.

    .. math::
        \min_{|h| \le \Delta} \sum_i g_i h_i + \tfrac12 \lambda_i h_i^2: \qquad
        h_i = -\frac{g_i}{\lambda_i + \sigma}, \quad \sigma \ge \max(0, -\lambda_{\min}), \quad
        \sigma\,(\Delta - |h|) = 0

    Status: exact to rounding, the hard case included (no part of the gradient along the smallest eigenvalue).

    Args:
        values: the eigenvalues, ascending, ``[k]``.
        gradient: g in the eigenbasis, ``[k]``.
        radius: the radius of the ball, positive.

    Returns:
        h and sigma; sigma is zero where the minimum lies inside.

    Source: Moré & Sorensen (1983).

    Example:
        >>> h, sigma = minimise_within(torch.tensor([-1.0, 2.0]), torch.tensor([0.0, 1.0]), 2.0)
        >>> round(float(h.norm()), 4), round(sigma, 4)
        (2.0, 1.0)
    """

    def at(sigma: float) -> Tensor:
        return -gradient / (values + sigma)

    lowest = float(values[0])
    if lowest > 0 and float(at(0.0).norm()) <= radius:
        return at(0.0), 0.0
    floor = max(0.0, -lowest)
    below = 4 * torch.finfo(values.dtype).eps * float(values.abs().max()) + torch.finfo(values.dtype).tiny
    above = float(gradient.norm()) / radius + 2 * below  # here |h| <= radius
    if (
        float(at(floor + below).norm()) < radius
    ):  # the hard case: what is missing goes along the lowest eigenvector
        h = at(floor + below)
        h[0] = torch.copysign((radius**2 - h[1:].square().sum()).sqrt(), h[0])
        return h, floor + below
    for _ in range(100):  # bisection on a logarithmic scale: the root may be many decades below its bound
        middle = (below * above) ** 0.5
        if float(at(floor + middle).norm()) > radius:
            below = middle
        else:
            above = middle
    return at(floor + above), floor + above


@dataclass(frozen=True)
class ModelStep:
    """A minimiser of the model within the radius.

    Attributes:
        coefficients: of the step in the basis of the Krylov space.
        decrease: by how much the model falls, not negative.
        interior: whether the radius does not matter: the model is convex on the space and its minimum inside.
        residual: how much of the condition for a minimum lies outside the space.
        decrement: g'A^-1 g, with a bound on what the space does not show yet; infinite unless interior.
    """

    coefficients: Tensor
    decrease: float
    interior: bool
    residual: float
    decrement: float


class KrylovModel:
    r"""The model :math:`m(s) = g^\top s + \tfrac12 s^\top A s` on the growing Krylov space of g.

    Once the space is there, a step for another radius costs no application. Negative curvature is no exception here:
    the step then ends on the boundary, along all the directions of negative curvature that the space has shown.

    Args:
        operator: A, symmetric, perhaps indefinite.
        gradient: g, ``[D]``, not zero.
        capacity: the largest dimension of the space.

    Source: Gould, Lucidi, Roma & Toint (1999), with the basis kept and re-orthogonalised.
    """

    def __init__(self, operator: Operator, gradient: Tensor, capacity: int) -> None:
        self._size = float(gradient.norm())
        self._process = LanczosProcess(operator, gradient.unsqueeze(0), capacity)

    @property
    def exhausted(self) -> bool:
        """Whether the space can grow no more although it is not invariant."""
        return self._process.finished and self._process.tridiagonal().remainder > 0

    def grow(self, radius: float, forcing: float, tolerance: float) -> ModelStep:
        """Enlarge the space until the step's residual is within ``forcing * |g|``.

        A decrement that may be within the tolerance is computed until that is settled.
        """
        next_look = 1
        while True:
            self._process.advance()
            if self._process.steps < next_look and not self._process.finished:
                continue
            next_look = self._process.steps + 1 + self._process.steps // 10
            step = self.step(radius)
            settled = step.decrement <= tolerance or 2 * step.decrease > tolerance
            if self._process.finished or (step.residual <= forcing * self._size and settled):
                return step

    def step(self, radius: float) -> ModelStep:
        """Return the minimiser within the radius, on the space as it is."""
        reduced = self._process.tridiagonal()
        values, vectors = torch.linalg.eigh(reduced.dense())
        gradient = self._size * vectors[0]
        h, sigma = minimise_within(values, gradient, radius)
        coefficients = vectors @ h
        decrease = -float((gradient * h + 0.5 * values * h.square()).sum())
        residual = reduced.remainder * abs(float(coefficients[-1]))
        interior = sigma == 0
        decrement = 2 * decrease + residual**2 / float(values[0]) if interior else float("inf")
        return ModelStep(coefficients, max(decrease, 0.0), interior, residual, decrement)

    def vector(self, step: ModelStep) -> Tensor:
        """Return the step itself, ``[D]``."""
        basis = self._process.tridiagonal().basis
        return step.coefficients.to(basis) @ basis
