# SPDX-License-Identifier: Apache-2.0
"""Minimise a smooth function, convex or not, by gradients and Hessian-vector products."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyro_dvi.choice import check_count, check_positive
from pyro_dvi.errors import ArgumentError, NonFiniteError, NotPositiveDefiniteError
from pyro_dvi.linalg.conjugate_gradients import conjugate_gradients
from pyro_dvi.linalg.smallest_eigenpair import Eigenpair, smallest_eigenpair
from pyro_dvi.linalg.trust_region import KrylovModel, ModelStep

__all__ = ["Minimum", "SmoothFunction", "minimise_newton"]


class SmoothFunction(Protocol):
    """What :func:`minimise_newton` has to know of a function U of ``[D]``; the same U at each call."""

    def value_and_gradient(self, x: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return U(x) and its gradient ``[D]``."""

    def product(self, x: Tensor, vectors: Tensor, /) -> Tensor:
        """Return the products ``[S, D]`` of the Hessian at x with the rows of ``vectors``."""


@dataclass(frozen=True)
class Minimum:
    r"""Where :func:`minimise_newton` ended.

    Attributes:
        x: the point, ``[D]``.
        value: U there.
        gradient_norm: of the gradient there.
        newton_decrement: :math:`g^\top P^{-1} g` before the last step, the squared distance to the minimum in posterior
            standard deviations; infinite where P showed no positive curvature along g.
        smallest_eigenvalue: of the Hessian there, in the coordinates of the preconditioner, with the residual of the
            pair; None where the search ended before it was looked for. Its sign does not depend on the coordinates.
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
    preconditioner: Tensor | None = None,
    callback: Callable[[int, float, float, float], None] | None = None,
) -> Minimum:
    r"""Find a local minimum with positive definite Hessian, matrix-free.

    .. math::
        x \leftarrow x + \operatorname*{arg\,min}_{|s|_M \le \Delta,\; s \in \mathcal{K}}
            g^\top s + \tfrac12 s^\top P s, \qquad
        \mathcal{K} = \operatorname{span}\{M^{-1} g,\, (M^{-1}P) M^{-1} g, \dots\}

    Far from a minimum the step follows all negative curvature that the Krylov space shows; a step that is refused is
    replaced by a shorter one on the same space, without a product. Near a minimum it is the truncated Newton step,
    which conjugate gradients finish where the space is too small. At rest, the Lanczos recursion looks for negative
    curvature from a random start, and the search goes on along it.

    Where the predicted decrease is below what the rounding of U can show, gradients judge a step; the search ends when
    they no longer fall.

    Status: superlinear convergence to a local minimum; which one depends on the start. A negative eigenvalue that
    ``krylov_steps`` of the Lanczos recursion do not reveal is not seen.

    Args:
        problem: see :class:`SmoothFunction`.
        start: ``[D]``; its dtype and device are used.
        tolerance: on the Newton decrement :math:`g^\top P^{-1} g`, in squared posterior standard deviations.
        max_iterations: steps at most.
        krylov_steps: dimension of the Krylov space; ``krylov_steps * D`` numbers are held.
        preconditioner: positive diagonal of M, ``[D]``, close to P's in scale; the prior precision is a good one.
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
    if preconditioner is not None and (
        preconditioner.shape != start.shape or not bool((preconditioner > 0).all())
    ):
        raise ArgumentError("the preconditioner is a positive diagonal with the shape of the start")
    search = _Search(problem, start.detach(), preconditioner, krylov_steps)
    return search.run(tolerance, max_iterations, callback or (lambda *state: None))


class _Search:
    """The state of one minimisation, in the coordinates y = M^(1/2) x, where the region of trust is a ball."""

    _STALLS = 10  # steps without a smaller gradient, where rounding hides the values, that end the search

    def __init__(
        self, problem: SmoothFunction, start: Tensor, preconditioner: Tensor | None, krylov_steps: int
    ) -> None:
        self.problem, self.krylov_steps = problem, krylov_steps
        self.scale = None if preconditioner is None else preconditioner.detach().to(start).rsqrt()
        self.applications = self.evaluations = 0
        self.y = start if self.scale is None else start / self.scale
        self.value, self.gradient = self.evaluate(self.y)
        if not math.isfinite(self.value) or not bool(self.gradient.isfinite().all()):
            raise NonFiniteError(
                "the function or its gradient is NaN or infinite at the start of the minimisation"
            )
        self.radius = max(1.0, float(self.y.norm()))
        self.first_size = self.best_size = float(self.gradient.norm())
        self.stalls = 0

    # --- the function in these coordinates ---------------------------------------------------------------

    def unscaled(self, y: Tensor) -> Tensor:
        return y if self.scale is None else y * self.scale

    def evaluate(self, y: Tensor) -> tuple[float, Tensor]:
        self.evaluations += 1
        value, gradient = self.problem.value_and_gradient(self.unscaled(y))
        gradient = gradient.detach().to(y)
        if gradient.shape != y.shape:
            raise ArgumentError(f"the gradient has shape {tuple(gradient.shape)}, the point {tuple(y.shape)}")
        return float(value.detach()), self.unscaled(gradient)

    def product(self, vectors: Tensor) -> Tensor:
        self.applications += len(vectors)
        return self.unscaled(self.problem.product(self.unscaled(self.y), self.unscaled(vectors)))

    @property
    def resolution(self) -> float:
        """Differences of values below this are rounding error."""
        return 10 * torch.finfo(self.y.dtype).eps * abs(self.value)

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
            callback(iteration, self.value, self.gradient_norm(), decrement)
            if decrement > tolerance and moved:
                continue
            lowest = smallest_eigenpair(self.product, len(self.y), steps=self.krylov_steps, like=self.y)
            if lowest.value < -lowest.resolution:
                if self.leave_saddle(lowest):
                    continue
                reason = "negative curvature remains, but rounding hides the decrease along it; use float64"
            elif lowest.value <= lowest.resolution:
                reason = "the Hessian is singular to rounding: some direction has no curvature"
            elif decrement <= tolerance:
                reason = "the Newton decrement is within the tolerance"
            else:
                reason = (
                    f"rounding in {self.y.dtype} hides further progress; use float64 or a larger tolerance"
                )
            break
        positive = lowest is not None and lowest.value > lowest.resolution
        return Minimum(
            self.unscaled(self.y),
            self.value,
            self.gradient_norm(),
            decrement,
            lowest,
            iteration,
            self.applications,
            self.evaluations,
            decrement <= tolerance and positive,
            reason,
        )

    def gradient_norm(self) -> float:
        return float((self.gradient if self.scale is None else self.gradient / self.scale).norm())

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
            if step.interior and step.decrease <= self.resolution:
                return decrement, False
            step = model.step(self.radius)
            vector = model.vector(step)
            if torch.equal(self.y + vector, self.y):
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
        value, gradient = self.evaluate(self.y + vector)
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
        self.y, self.value, self.gradient = self.y + vector, value, gradient
        self.stalls = 0 if resolved or size < 0.9 * self.best_size else self.stalls + 1
        self.best_size = size if resolved else min(size, self.best_size)
        return True

    def take_if_smaller(self, vector: Tensor, size: float) -> None:
        """Take the last step where it makes the gradient smaller."""
        value, gradient = self.evaluate(self.y + vector)
        if float(gradient.norm()) < size and value - self.value <= self.resolution:
            self.y, self.value, self.gradient = self.y + vector, value, gradient

    def leave_saddle(self, lowest: Eigenpair) -> bool:
        """Step along a direction of negative curvature, downhill; return whether the function shows a decrease."""
        direction = lowest.vector * (-1 if float(lowest.vector @ self.gradient) > 0 else 1)
        length = self.radius
        while 0.5 * abs(lowest.value) * length**2 > self.resolution:
            value, gradient = self.evaluate(self.y + length * direction)
            if value <= self.value - 0.1 * abs(lowest.value) * length**2 and bool(gradient.isfinite().all()):
                self.y, self.value, self.gradient = self.y + length * direction, value, gradient
                self.radius, self.stalls, self.best_size = 2 * length, 0, float(gradient.norm())
                return True
            length *= 0.5
        return False
