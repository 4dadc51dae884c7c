# SPDX-License-Identifier: Apache-2.0
r"""Minimisation of smooth functions: a quasi-Newton method far from the minimum, then Newton's method.

Both use coordinates :math:`x = x_0 + R^{-1} y` of a metric :math:`M = R^\top R`, in which the Hessian is close to the
identity.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from pyro_dvi.errors import NonFiniteError, NotPositiveDefiniteError
from pyro_dvi.linalg.lanczos import Eigenpair, smallest_eigenpair
from pyro_dvi.linalg.operator import conjugate_gradients

_DECREASE, _SLOPE = 1e-4, 0.9  # Wolfe's conditions
_TRIALS = 12  # trials per line search


class SmoothFunction(Protocol):
    """A deterministic function U of a vector ``[D]``."""

    def value_and_gradient(self, x: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return U(x) and its gradient ``[D]``."""

    def product(self, x: Tensor, vectors: Tensor, /) -> Tensor:
        """Return the products ``[S, D]`` of the Hessian at x with the rows of ``vectors``."""


@dataclass(frozen=True)
class InMetric:
    r"""The function :math:`y \mapsto U(x_0 + R^{-1} y)`, in coordinates with the metric M.

    Attributes:
        problem: U.
        metric: M, similar to the Hessian of U. For each row y, ``coloured(rows)`` returns the displacement of x,
            :math:`R^{-1} y`. For each row g, ``whitened(rows)`` returns the gradient with respect to y,
            :math:`R^{-\top} g`.
        origin: :math:`x_0`, ``[D]``; displacements from it have smaller rounding errors.
    """

    problem: SmoothFunction
    metric: Any
    origin: Tensor

    def x(self, y: Tensor) -> Tensor:
        """Return the point x for the coordinates y."""
        return self.origin + self.metric.coloured(y.unsqueeze(0))[0]

    def value_and_gradient(self, y: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return U and its gradient with respect to y."""
        value, gradient = self.problem.value_and_gradient(self.x(y))
        return value, self.metric.whitened(gradient.detach().unsqueeze(0))[0]

    def product(self, y: Tensor, vectors: Tensor, /) -> Tensor:
        r"""Return products with the Hessian :math:`R^{-\top} P R^{-1}`, where P is the Hessian of U."""
        return self.metric.whitened(self.problem.product(self.x(y), self.metric.coloured(vectors)))


@dataclass(frozen=True)
class Descent:
    """Result of :func:`descend`.

    Attributes:
        x: the point, ``[D]``.
        value: U at this point.
        fallen: decrease of U. If rounding hides the decrease, it is estimated from the slopes.
        steps: number of steps.
        stuck: whether no step along the last direction decreased U.
    """

    x: Tensor
    value: float
    fallen: float
    steps: int
    stuck: bool


def descend(
    problem: SmoothFunction,
    start: Tensor,
    *,
    target: float,
    max_steps: int = 30,
    callback: Callable[[float, float], None] | None = None,
) -> Descent:
    r"""Minimise U with BFGS steps, in coordinates in which its Hessian is close to the identity.

    .. math:: x \leftarrow x - t\,B\,g, \qquad B_{+} = (1 - \rho s y^\top) B (1 - \rho y s^\top) + \rho s s^\top

    with initial :math:`B = 1`, the step s, the change y of the gradient along s, :math:`\rho = 1/s^\top y`, and t
    chosen to satisfy Wolfe's conditions. If rounding hides the change of U in a step, this change is estimated with the
    trapezoidal rule from the slopes at both ends of the step.

    Status: U decreases in every step, up to rounding; convergence is superlinear near a minimum. Saddle points are not
    detected.

    Args:
        problem: U; products are not used.
        start: starting point ``[D]``, at which U must be finite.
        target: stop when :math:`|g|^2` is at most this value.
        max_steps: maximum number of steps; ``2 * max_steps * D`` numbers are stored.
        callback: function that is called after each step with U and :math:`|g|^2`.

    Source: Nocedal & Wright (2006), Alg. 7.4 and Section 3.1.

    Example:
        >>> class Quartic:
        ...     def value_and_gradient(self, x):
        ...         return ((x - 1) ** 4).sum() / 4 + ((x - 1) ** 2).sum() / 2, (x - 1) ** 3 + x - 1
        >>> descend(Quartic(), torch.zeros(2), target=1e-8).x
        tensor([1., 1.])
    """
    value, gradient = _evaluated(problem, start)
    x, fallen, steps = start, 0.0, 0
    pairs: list[tuple[Tensor, Tensor]] = []
    while float(gradient @ gradient) > target and steps < max_steps:
        direction = _direction(pairs, gradient)
        found = _line_search(problem, x, value, gradient, direction, strict=True)
        if found is None and not pairs:
            return Descent(x, value, fallen, steps, True)
        if found is None:
            pairs.clear()
            continue
        step, decrease, value, after = found
        change = after - gradient
        if float(step @ change) > torch.finfo(x.dtype).eps * float(step.norm() * change.norm()):
            pairs.append((step, change))
        x, gradient, fallen, steps = x + step, after, fallen + decrease, steps + 1
        if callback is not None:
            callback(value, float(gradient @ gradient))
    return Descent(x, value, fallen, steps, False)


@dataclass(frozen=True)
class Minimum:
    r"""Result of :func:`minimise_newton`.

    Attributes:
        x: the point, ``[D]``.
        value: U at this point.
        newton_decrement: :math:`g^\top P^{-1} g`, the squared distance to the minimum in posterior standard deviations.
            It is the smaller of two numbers: the decrement before the last step, plus :math:`|r|^2/\lambda_{\min}` for
            the residual r of that step, and the bound :math:`|g|^2/\lambda_{\min}` after the last step. It is infinite
            if negative curvature was found.
        smallest_eigenvalue: smallest eigenpair of the Hessian at x; None if the search ended before it was computed.
        steps: number of steps.
        converged: whether the decrement is within the tolerance, and the Hessian is positive definite as far as the
            Lanczos recursion from a random start shows.
        reason: why the search ended, as a sentence.
    """

    x: Tensor
    value: float
    newton_decrement: float
    smallest_eigenvalue: Eigenpair | None
    steps: int
    converged: bool
    reason: str


def minimise_newton(
    problem: SmoothFunction,
    start: Tensor,
    *,
    tolerance: float = 1e-10,
    max_steps: int = 200,
    krylov_steps: int = 200,
    callback: Callable[[float, float], None] | None = None,
) -> Minimum:
    r"""Find a local minimum with a positive definite Hessian, without forming matrices.

    .. math:: x \leftarrow x - t\,s, \qquad |P s - g| \le \eta\,|g|

    The step s is computed with conjugate gradients, and its factor t is chosen to satisfy Wolfe's conditions. If
    conjugate gradients encounter a direction of negative curvature, the search follows this direction. At a stationary
    point, the Lanczos recursion looks for negative curvature from a random start. If it finds a direction of negative
    curvature, the search continues in this direction.

    Status: converges superlinearly to a local minimum, which depends on the start. ``krylov_steps`` Lanczos steps can
    miss a negative eigenvalue.

    Args:
        problem: see :class:`SmoothFunction`.
        start: starting point ``[D]``, which determines dtype and device.
        tolerance: bound on the Newton decrement :math:`g^\top P^{-1} g`, in squared posterior standard deviations.
        max_steps: maximum number of steps.
        krylov_steps: number of Lanczos steps, for which ``krylov_steps * D`` numbers are stored; conjugate gradients
            may take ten times as many steps.
        callback: function that is called after each step, with U after the step and the Newton decrement before the
            step.

    Raises:
        NonFiniteError: the value or gradient at the start, or a product, is NaN or infinite.

    Source: Nocedal & Wright (2006), Alg. 7.1.

    Example:
        >>> class Well:  # (a^2 - 1)^2 + b^2, with a saddle at the origin
        ...     def value_and_gradient(self, x):
        ...         a, b = x
        ...         return (a * a - 1) ** 2 + b * b, torch.stack([4 * a * (a * a - 1), 2 * b])
        ...
        ...     def product(self, x, vectors):
        ...         return vectors * torch.stack([12 * x[0] ** 2 - 4, torch.tensor(2.0)])
        >>> found = minimise_newton(Well(), torch.zeros(2))
        >>> found.x.abs().round(decimals=6), found.converged
        (tensor([1., 0.]), True)
    """
    x = start.detach()
    value, gradient = _evaluated(problem, x)
    if not math.isfinite(value) or not bool(gradient.isfinite().all()):
        raise NonFiniteError("the function or its gradient is NaN or infinite at the start")

    def product(vectors: Tensor) -> Tensor:
        return problem.product(x, vectors)

    first = float(gradient.norm())
    decrement, lowest, reason, steps = math.inf, None, f"{max_steps} steps were not enough", 0
    floor = math.inf  # smallest eigenvalue, once computed
    while steps < max_steps:
        size, steps, lowest = float(gradient.norm()), steps + 1, None
        direction, decrement, residual = _newton_direction(product, gradient, first, krylov_steps)
        # If rounding hides the decrease of the full step, shorter steps do not help.
        trials = 1 if 0.5 * decrement <= _resolution(x, value) else _TRIALS
        found = _line_search(problem, x, value, gradient, direction, trials) if size else None
        if found is not None:
            x, value, gradient = x + found[0], *found[2:]
        if callback is not None:
            callback(value, decrement)
        if found is not None and decrement + residual**2 / floor > tolerance:
            continue
        lowest = smallest_eigenpair(product, x, steps=krylov_steps)
        if lowest.value < -lowest.resolution:
            found = _line_search(problem, x, value, gradient, _downhill(lowest.vector, gradient))
            if found is not None:
                x, value, gradient, lowest = x + found[0], *found[2:], None
                continue
            reason = "negative curvature remains, but rounding hides the decrease along it; use float64"
        elif lowest.value <= lowest.resolution:
            reason = "the Hessian is numerically singular"
        else:
            floor = max(lowest.value - lowest.residual, 0.5 * lowest.value)
            decrement = min(decrement + residual**2 / floor, float(gradient.norm()) ** 2 / floor)
            if decrement <= tolerance:
                reason = "the Newton decrement is within the tolerance"
            elif found is not None:
                lowest = None
                continue
            else:
                reason = f"rounding in {x.dtype} prevents further progress; use float64 or a larger tolerance"
        break
    converged = decrement <= tolerance and lowest is not None and lowest.value > lowest.resolution
    return Minimum(x, value, decrement, lowest, steps, converged, reason)


def _newton_direction(
    product: Callable[[Tensor], Tensor], gradient: Tensor, first: float, krylov_steps: int
) -> tuple[Tensor, float, float]:
    """Return a descent direction (one of negative curvature, if found), the Newton decrement and the residual."""
    size = float(gradient.norm())
    if size == 0:
        return gradient, 0.0, 0.0
    forcing = min(0.1, math.sqrt(size / (first or size)))
    try:
        most = 10 * krylov_steps
        solution = conjugate_gradients(product, -gradient[None], tolerance=forcing, max_iterations=most)
    except NotPositiveDefiniteError as error:
        assert error.direction is not None
        return _downhill(error.direction / error.direction.norm(), gradient), math.inf, 0.0
    step = solution.x[0]
    return step, -float(step @ gradient), float(solution.residuals[0]) * size


def _downhill(direction: Tensor, gradient: Tensor) -> Tensor:
    return -direction if float(direction @ gradient) > 0 else direction


def _evaluated(problem: SmoothFunction, x: Tensor) -> tuple[float, Tensor]:
    value, gradient = problem.value_and_gradient(x)
    return float(value.detach()), gradient.detach().to(x)


def _resolution(x: Tensor, value: float) -> float:
    """Return the largest difference between two values of U that may be a rounding error."""
    return 10 * torch.finfo(x.dtype).eps * abs(value)


def _direction(pairs: list[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
    """Return -B g, computed with the two-loop recursion."""
    direction, weights = -gradient, []
    for step, change in reversed(pairs):
        weights.append((step @ direction) / (step @ change))
        direction = direction - weights[-1] * change
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        direction = direction + (weight - (change @ direction) / (step @ change)) * step
    return direction


def _line_search(
    problem: SmoothFunction,
    x: Tensor,
    value: float,
    gradient: Tensor,
    direction: Tensor,
    trials: int = _TRIALS,
    strict: bool = False,
) -> tuple[Tensor, float, float, Tensor] | None:
    """Return a step that meets Wolfe's conditions, the decrease of U, and U and its gradient after the step.

    If no trial meets the conditions, the longest step that decreased U is returned; with ``strict``, only if every
    trial decreased U. Otherwise, the result is None.
    """
    slope = float(gradient @ direction)
    low, high, length, longest = 0.0, math.inf, 1.0, None
    for _ in range(trials):
        new_value, new_gradient = _evaluated(problem, x + length * direction)
        new_slope = float(new_gradient @ direction)
        decrease = value - new_value
        if abs(decrease) <= _resolution(x, value):
            decrease = -0.5 * length * (slope + new_slope)
        if not decrease >= -_DECREASE * length * slope or not math.isfinite(new_slope):
            high = length
        else:
            longest = length * direction, decrease, new_value, new_gradient
            if new_slope >= _SLOPE * slope:
                return longest
            low = length
        if high == math.inf:
            length = 2 * length
        elif low == 0 and math.isfinite(decrease):  # minimum of the parabola through the known values
            length *= min(0.5, max(0.1, -0.5 * slope * length / -(decrease + slope * length)))
        else:
            length = 0.5 * (low + high)
    return longest if high == math.inf or not strict else None
