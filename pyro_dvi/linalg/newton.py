# SPDX-License-Identifier: Apache-2.0
"""Minimise a smooth function, convex or not, by gradients and Hessian-vector products."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count, check_positive
from pyro_dvi.errors import ArgumentError, NonFiniteError, NotPositiveDefiniteError
from pyro_dvi.linalg.conjugate_gradients import conjugate_gradients
from pyro_dvi.linalg.metric import SmoothFunction
from pyro_dvi.linalg.smallest_eigenpair import Eigenpair, smallest_eigenpair


@dataclass(frozen=True)
class Minimum:
    r"""Where :func:`minimise_newton` ended.

    Attributes:
        x: the point, ``[D]``.
        value: U there.
        gradient_norm: of the gradient there.
        newton_decrement: :math:`g^\top P^{-1} g`, the squared distance to the minimum in posterior standard deviations:
            before the last step, with :math:`|r|^2/\lambda_{\min}` for the residual r of that step, or
            :math:`|g|^2/\lambda_{\min}` after it where that bound is smaller; infinite where P showed negative
            curvature.
        smallest_eigenvalue: of the Hessian there, with the residual of the pair; None where the search ended before it
            was looked for.
        iterations: steps.
        applications: Hessian-vector products.
        evaluations: of value and gradient.
        converged: the decrement is within the tolerance, and the Hessian positive definite as far as the Lanczos
            recursion from a random start shows.
        reason: why the search ended, as a sentence.
    """

    x: Tensor
    value: float
    gradient_norm: float
    newton_decrement: float
    smallest_eigenvalue: Eigenpair | None
    iterations: int
    applications: int
    evaluations: int
    converged: bool
    reason: str


def minimise_newton(
    problem: SmoothFunction,
    start: Tensor,
    *,
    tolerance: float = 1e-10,
    max_iterations: int = 200,
    krylov_steps: int = 200,
    callback: Callable[[int, float, float, float], None] | None = None,
) -> Minimum:
    r"""Find a local minimum with positive definite Hessian, matrix-free.

    .. math:: x \leftarrow x - t\,s, \qquad |P s - g| \le \eta\,|g|, \quad t = 1, \tfrac12, \tfrac14, \dots

    :class:`~pyro_dvi.linalg.metric.InMetric` gives a badly scaled function better coordinates.

    Conjugate gradients give the step s, and shorter ones are tried until U falls by a tenth of what its parabola says.
    Where they meet a direction of negative curvature, the search goes along that one, as far as the last time and
    twice as far after each success. At rest, the Lanczos recursion looks for negative curvature from a random start,
    and the search goes on along it.

    Where the predicted decrease is below what the rounding of U can show, gradients judge a step; the search ends when
    they no longer fall.

    Status: superlinear convergence to a local minimum; which one depends on the start. A negative eigenvalue that
    ``krylov_steps`` of the Lanczos recursion do not reveal is not seen.

    Args:
        problem: see :class:`~pyro_dvi.linalg.metric.SmoothFunction`.
        start: ``[D]``; its dtype and device are used.
        tolerance: on the Newton decrement :math:`g^\top P^{-1} g`, in squared posterior standard deviations.
        max_iterations: steps at most.
        krylov_steps: of the Lanczos recursion, for which ``krylov_steps * D`` numbers are held; conjugate gradients
            may take ten times as many.
        callback: called after each step with its number, the value and the norm of the gradient after it, and the
            Newton decrement before it.

    Raises:
        ArgumentError: an option or a shape is wrong.
        NonFiniteError: value or gradient at the start, or a product, is NaN or infinite.

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
        >>> found.x.abs(), found.converged
        (tensor([1., 0.]), True)
    """
    if start.dim() != 1 or not start.is_floating_point():
        raise ArgumentError(f"start is a real vector [D], got {start.dtype} of shape {tuple(start.shape)}")
    check_positive("tolerance", tolerance)
    check_count("max_iterations", max_iterations)
    check_count("krylov_steps", krylov_steps)
    search = _Search(problem, start.detach(), krylov_steps)
    return search.run(tolerance, max_iterations, callback or (lambda *state: None))


class _Search:
    """The state of one minimisation."""

    _STALLS = 10  # steps without a smaller gradient, where rounding hides the values, that end the search
    _HALVINGS = 30  # of a step

    def __init__(self, problem: SmoothFunction, start: Tensor, krylov_steps: int) -> None:
        self.problem, self.krylov_steps = problem, krylov_steps
        self.applications = self.evaluations = 0
        self.x = start
        self.value, self.gradient = self.evaluate(start)
        if not math.isfinite(self.value) or not bool(self.gradient.isfinite().all()):
            raise NonFiniteError(
                "the function or its gradient is NaN or infinite at the start of the minimisation"
            )
        self.reach = max(1.0, float(start.norm()))  # of the next step along negative curvature
        self.first_size = self.best_size = self.size
        self.stalls = 0

    @property
    def size(self) -> float:
        return float(self.gradient.norm())

    @property
    def resolution(self) -> float:
        """Differences of values below this are rounding error."""
        return 10 * torch.finfo(self.x.dtype).eps * abs(self.value)

    def evaluate(self, x: Tensor) -> tuple[float, Tensor]:
        self.evaluations += 1
        value, gradient = self.problem.value_and_gradient(x)
        gradient = gradient.detach().to(x)
        if gradient.shape != x.shape:
            raise ArgumentError(f"the gradient has shape {tuple(gradient.shape)}, the point {tuple(x.shape)}")
        return float(value.detach()), gradient

    def product(self, vectors: Tensor) -> Tensor:
        self.applications += len(vectors)
        return self.problem.product(self.x, vectors)

    def run(
        self, tolerance: float, max_iterations: int, callback: Callable[[int, float, float, float], None]
    ) -> Minimum:
        decrement, lowest, iteration = math.inf, None, 0
        floor = math.inf  # the smallest eigenvalue, once it was looked for
        reason = f"{max_iterations} steps did not suffice"
        while iteration < max_iterations:
            iteration += 1
            lowest = None
            decrement, residual, moved = self.newton_step(tolerance)
            callback(iteration, self.value, self.size, decrement)
            if decrement + residual**2 / floor > tolerance and moved:
                continue
            lowest = smallest_eigenpair(self.product, len(self.x), steps=self.krylov_steps, like=self.x)
            if lowest.value < -lowest.resolution:
                if self.go(self.downhill(lowest.vector), self.reach, lowest.value):
                    continue
                reason = "negative curvature remains, but rounding hides the decrease along it; use float64"
                break
            if lowest.value <= lowest.resolution:
                reason = "the Hessian is singular to rounding: some direction has no curvature"
                break
            floor = max(lowest.value - lowest.residual, 0.5 * lowest.value)
            decrement = min(decrement + residual**2 / floor, self.size**2 / floor)
            if decrement <= tolerance:
                reason = "the Newton decrement is within the tolerance"
                break
            if not moved:
                reason = (
                    f"rounding in {self.x.dtype} hides further progress; use float64 or a larger tolerance"
                )
                break
        return Minimum(
            self.x,
            self.value,
            self.size,
            decrement,
            lowest,
            iteration,
            self.applications,
            self.evaluations,
            decrement <= tolerance and lowest is not None and lowest.value > lowest.resolution,
            reason,
        )

    def newton_step(self, tolerance: float) -> tuple[float, float, bool]:
        """Take one step; return the Newton decrement before it, its residual, and whether there was any to take."""
        size = self.size
        if size == 0:
            return 0.0, 0.0, True
        self.first_size = self.first_size or size
        forcing = min(0.1, math.sqrt(size / self.first_size))
        try:
            solution = conjugate_gradients(
                self.product,
                -self.gradient.unsqueeze(0),
                tolerance=forcing,
                max_iterations=10 * self.krylov_steps,
            )
        except NotPositiveDefiniteError as error:
            assert error.direction is not None and error.curvature is not None
            direction = self.downhill(error.direction / error.direction.norm())
            return math.inf, 0.0, self.go(direction, self.reach, error.curvature)
        step = solution.x[0]
        decrement, residual = -float(step @ self.gradient), float(solution.residuals[0]) * size
        if decrement <= tolerance:
            self.take_if_smaller(step)
            return decrement, residual, True
        return decrement, residual, self.go(step, 1.0, decrement) and self.stalls < self._STALLS

    def downhill(self, direction: Tensor) -> Tensor:
        return -direction if float(direction @ self.gradient) > 0 else direction

    def go(self, direction: Tensor, length: float, curvature: float) -> bool:
        """Go along a direction downhill as far as U falls by a tenth of what its parabola says; return whether it does.

        Where rounding hides the decrease, the trapezoid rule with the slopes at both ends, exact to third order, or a
        smaller gradient decides.
        """
        slope = float(direction @ self.gradient)
        for _ in range(self._HALVINGS):
            value, gradient = self.evaluate(self.x + length * direction)
            decrease, size = self.value - value, float(gradient.norm())
            expected = -slope * length - 0.5 * curvature * length**2
            resolved = expected > self.resolution
            if not resolved or (curvature < 0 and abs(decrease) <= self.resolution):
                decrease = -0.5 * length * float((self.gradient + gradient) @ direction)
            enough = decrease >= 0.1 * expected or (not resolved and size < self.best_size)
            if enough and math.isfinite(value) and math.isfinite(size):
                self.x, self.value, self.gradient = self.x + length * direction, value, gradient
                self.stalls = 0 if resolved or size < 0.9 * self.best_size else self.stalls + 1
                self.best_size = size if resolved else min(size, self.best_size)
                if curvature < 0:
                    self.reach = 2 * length
                return True
            if not resolved and curvature > 0:
                return False
            length *= 0.5
        return False

    def take_if_smaller(self, step: Tensor) -> None:
        """Take the last step where it makes the gradient smaller."""
        value, gradient = self.evaluate(self.x + step)
        if float(gradient.norm()) < self.size and value - self.value <= self.resolution:
            self.x, self.value, self.gradient = self.x + step, value, gradient
