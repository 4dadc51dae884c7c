# SPDX-License-Identifier: Apache-2.0
"""Minimise a smooth function, convex or not, by gradients and Hessian-vector products."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.choice import check_count, check_positive
from pyro_dvi.errors import ArgumentError, NonFiniteError, NotPositiveDefiniteError
from pyro_dvi.linalg.conjugate_gradients import conjugate_gradients
from pyro_dvi.linalg.metric import SmoothFunction
from pyro_dvi.linalg.smallest_eigenpair import Eigenpair, smallest_eigenpair
from pyro_dvi.linalg.trust_region import KrylovModel, ModelStep

__all__ = ["Minimum", "minimise_newton"]


@dataclass(frozen=True)
class Minimum:
    r"""Where :func:`minimise_newton` ended.

    Attributes:
        x: the point, ``[D]``.
        value: U there.
        gradient_norm: of the gradient there.
        newton_decrement: :math:`g^\top P^{-1} g`, the squared distance to the minimum in posterior standard deviations:
            before the last step, or :math:`|g|^2/\lambda_{\min}` after it where that bound is smaller; infinite where P
            showed no positive curvature along g.
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

    .. math::
        x \leftarrow x + \operatorname*{arg\,min}_{|s| \le \Delta,\; s \in \mathcal{K}}
            g^\top s + \tfrac12 s^\top P s, \qquad
        \mathcal{K} = \operatorname{span}\{g,\, P g,\, P^2 g, \dots\}

    :class:`~pyro_dvi.linalg.metric.InMetric` gives a badly scaled function better coordinates.

    Far from a minimum the step follows all negative curvature that the Krylov space shows; a step that is refused is
    replaced by a shorter one on the same space, without a product. Near a minimum it is the truncated Newton step,
    which conjugate gradients finish where the space is too small. At rest, the Lanczos recursion looks for negative
    curvature from a random start, and the search goes on along it.

    Where the predicted decrease is below what the rounding of U can show, gradients judge a step; the search ends when
    they no longer fall.

    Status: superlinear convergence to a local minimum; which one depends on the start. A negative eigenvalue that
    ``krylov_steps`` of the Lanczos recursion do not reveal is not seen.

    Args:
        problem: see :class:`~pyro_dvi.linalg.metric.SmoothFunction`.
        start: ``[D]``; its dtype and device are used.
        tolerance: on the Newton decrement :math:`g^\top P^{-1} g`, in squared posterior standard deviations.
        max_iterations: steps at most.
        krylov_steps: dimension of the Krylov space; ``krylov_steps * D`` numbers are held.
        callback: called after each step with its number, the value and the norm of the gradient after it, and the
            Newton decrement before it.

    Raises:
        ArgumentError: an option or a shape is wrong.
        NonFiniteError: value or gradient at the start, or a product, is NaN or infinite.

    Source: Steihaug (1983); Gould, Lucidi, Roma & Toint (1999); Nocedal & Wright (2006), Alg. 4.1 and 7.2.

    Example:
        >>> class Well:  # (a^2 - 1)^2 + b^2, with a saddle at the origin
        ...     def value_and_gradient(self, x):
        ...         a, b = x
        ...         return (a * a - 1) ** 2 + b * b, torch.stack([4 * a * (a * a - 1), 2 * b])
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
    _HALVINGS = 30  # of a step along negative curvature

    def __init__(self, problem: SmoothFunction, start: Tensor, krylov_steps: int) -> None:
        self.problem, self.krylov_steps = problem, krylov_steps
        self.applications = self.evaluations = 0
        self.x = start
        self.value, self.gradient = self.evaluate(start)
        if not math.isfinite(self.value) or not bool(self.gradient.isfinite().all()):
            raise NonFiniteError(
                "the function or its gradient is NaN or infinite at the start of the minimisation"
            )
        self.radius = max(1.0, float(start.norm()))
        self.first_size = self.best_size = float(self.gradient.norm())
        self.stalls = 0

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

    @property
    def resolution(self) -> float:
        """Differences of values below this are rounding error."""
        return 10 * torch.finfo(self.x.dtype).eps * abs(self.value)

    # --- the search --------------------------------------------------------------------------------------

    def run(
        self, tolerance: float, max_iterations: int, callback: Callable[[int, float, float, float], None]
    ) -> Minimum:
        decrement, lowest, iteration = math.inf, None, 0
        reason = f"{max_iterations} steps did not suffice"
        while iteration < max_iterations:
            iteration += 1
            size = float(self.gradient.norm())
            decrement, moved = (0.0, True) if size == 0 else self.newton_step(size, tolerance)
            callback(iteration, self.value, float(self.gradient.norm()), decrement)
            if decrement > tolerance and moved:
                continue
            lowest = smallest_eigenpair(self.product, len(self.x), steps=self.krylov_steps, like=self.x)
            if lowest.value < -lowest.resolution:
                if self.leave_saddle(lowest):
                    lowest = None
                    continue
                reason = "negative curvature remains, but rounding hides the decrease along it; use float64"
            elif lowest.value <= lowest.resolution:
                reason = "the Hessian is singular to rounding: some direction has no curvature"
            elif decrement <= tolerance:
                reason = "the Newton decrement is within the tolerance"
            else:
                reason = (
                    f"rounding in {self.x.dtype} hides further progress; use float64 or a larger tolerance"
                )
            break
        positive = lowest is not None and lowest.value > lowest.resolution
        if lowest is not None and lowest.value > 2 * lowest.residual:
            decrement = min(decrement, float(self.gradient.norm()) ** 2 / (lowest.value - lowest.residual))
        return Minimum(
            self.x,
            self.value,
            float(self.gradient.norm()),
            decrement,
            lowest,
            iteration,
            self.applications,
            self.evaluations,
            decrement <= tolerance and positive,
            reason,
        )

    def newton_step(self, size: float, tolerance: float) -> tuple[float, bool]:
        """Take one step; return the Newton decrement before it, and whether there was any to take."""
        forcing = min(0.1, math.sqrt(size / self.first_size)) if self.first_size > 0 else 0.1
        model = KrylovModel(self.product, self.gradient, self.krylov_steps)
        step = model.grow(self.radius, forcing, tolerance)
        vector, decrement = model.vector(step), step.decrement
        if step.interior and model.exhausted and step.residual > forcing * size:
            vector = self.finished_by_conjugate_gradients(vector, forcing)
        if decrement <= tolerance:
            self.take_if_smaller(vector, size)
            return decrement, True
        while not self.accepts(vector, step):
            if step.decrease <= self.resolution:
                return decrement, False
            step = model.step(self.radius)
            vector = model.vector(step)
            if torch.equal(self.x + vector, self.x):
                return decrement, False
        return decrement, self.stalls < self._STALLS

    def finished_by_conjugate_gradients(self, vector: Tensor, forcing: float) -> Tensor:
        """Return the Newton step to the forcing, or the given one where it leaves the region of trust."""
        try:
            solution = conjugate_gradients(
                self.product,
                -self.gradient.unsqueeze(0),
                tolerance=forcing,
                start=vector.unsqueeze(0),
                max_iterations=10 * self.krylov_steps,
            )
        except NotPositiveDefiniteError:
            return vector
        return solution.x[0] if float(solution.x.norm()) <= self.radius else vector

    def accepts(self, vector: Tensor, step: ModelStep) -> bool:
        """Go along the step if the function falls as predicted; adapt the radius in either case."""
        value, gradient = self.evaluate(self.x + vector)
        length = float(vector.norm())
        size = float(gradient.norm())
        finite = math.isfinite(value) and math.isfinite(size)
        decrease = self.value - value
        resolved = step.decrease > self.resolution
        if not resolved:  # the trapezoid rule with the gradients at both ends is exact to third order
            decrease = -0.5 * float((self.gradient + gradient) @ vector)
        ratio = decrease / step.decrease if finite and step.decrease > 0 else -math.inf
        if ratio < 0.25 and (resolved or not step.interior):
            self.radius = 0.25 * length
        elif ratio > 0.75 and not step.interior:
            self.radius = max(self.radius, 2 * length)
        if ratio <= 1e-4 and (resolved or not size < self.best_size):
            return False
        self.x, self.value, self.gradient = self.x + vector, value, gradient
        self.stalls = 0 if resolved or size < 0.9 * self.best_size else self.stalls + 1
        self.best_size = size if resolved else min(size, self.best_size)
        return True

    def take_if_smaller(self, vector: Tensor, size: float) -> None:
        """Take the last step where it makes the gradient smaller."""
        value, gradient = self.evaluate(self.x + vector)
        if float(gradient.norm()) < size and value - self.value <= self.resolution:
            self.x, self.value, self.gradient = self.x + vector, value, gradient

    def leave_saddle(self, lowest: Eigenpair) -> bool:
        """Step along a direction of negative curvature, downhill; return whether the function shows a decrease."""
        direction = lowest.vector * (-1 if float(lowest.vector @ self.gradient) > 0 else 1)
        length = self.radius
        for _ in range(self._HALVINGS):
            value, gradient = self.evaluate(self.x + length * direction)
            decrease = self.value - value
            if abs(decrease) <= self.resolution:
                decrease = -0.5 * length * float((self.gradient + gradient) @ direction)
            if decrease >= 0.1 * abs(lowest.value) * length**2 and bool(gradient.isfinite().all()):
                self.x, self.value, self.gradient = self.x + length * direction, value, gradient
                self.radius, self.stalls, self.best_size = 2 * length, 0, float(gradient.norm())
                return True
            length *= 0.5
        return False
