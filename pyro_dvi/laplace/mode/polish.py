# SPDX-License-Identifier: Apache-2.0
"""From about the mode to the mode itself."""

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.choice import check_count, check_positive
from pyro_dvi.errors import DviWarning, NonFiniteError, PyroDviError, UnconvergedError
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.linalg import Minimum, minimise_newton
from pyro_dvi.progress import progress_bar

__all__ = ["Polished", "polish"]

_KRYLOV_STEPS = 200
_KRYLOV_BYTES = 2**31
_ROUNDING = 1e-2  # the decrement at which a mode is good enough where rounding allows no better one


@dataclass(frozen=True)
class Polished:
    r"""What :func:`polish` did.

    Attributes:
        mode: where it ended, flat, [D].
        value_before: U where it began.
        value: U where it ended.
        gradient_norm_before: of the gradient of U, in units of U per unit of the unconstrained latents.
        gradient_norm: where it ended.
        newton_decrement: :math:`g^\top P^{-1} g` before the last step: the squared distance to the minimum in posterior
            standard deviations.
        curvature: the matrix P of the decrement, ``"Hessian"`` or ``"GGN"``.
        smallest_eigenvalue: of the Hessian, relative to the prior precision where that is diagonal (1 is a direction
            that only the prior holds); None where the search ended before it was looked for.
        iterations: steps of Newton's method.
        evaluations: work in gradients of all data.
        converged: whether the mode is a minimum, as close as the tolerance or the rounding of the dtype says.
        reason: why the search ended.
    """

    mode: Tensor
    value_before: float
    value: float
    gradient_norm_before: float
    gradient_norm: float
    newton_decrement: float
    smallest_eigenvalue: float | None
    iterations: int
    evaluations: int
    converged: bool
    reason: str
    curvature: str = "Hessian"

    def __str__(self) -> str:
        lowest = "" if self.smallest_eigenvalue is None else f"{self.smallest_eigenvalue:.3g}"
        rows = (
            ("U", f"{self.value_before:.8g} -> {self.value:.8g}"),
            ("gradient norm", f"{self.gradient_norm_before:.3g} -> {self.gradient_norm:.3g}"),
            ("Newton decrement", f"{self.newton_decrement:.3g}"),
            ("smallest eigenvalue", lowest or "not computed"),
            ("work", f"{self.iterations} steps, {self.evaluations} gradients of all data"),
        )
        state = "converged" if self.converged else "not converged"
        return "\n".join([f"{state}: {self.reason}", *(f"  {name:<20} {text}" for name, text in rows)])


def polish(
    energy: Energy,
    keep: Callable[[Tensor], None],
    *,
    tolerance: float = 1e-10,
    max_iterations: int = 200,
    progress: bool = True,
    callback: Callable[[int, float, float, float], None] | None = None,
) -> Polished:
    r"""Minimise U by Newton's method with its true Hessian, by products only.

    .. math:: u \leftarrow u - P^{-1} g \quad\text{within a region of trust, until}\quad g^\top P^{-1} g \le \epsilon

    Saddle points are left along their negative curvature. See :func:`~pyro_dvi.linalg.minimise_newton`.

    Status: a local minimum with a positive definite Hessian, as far as 200 Lanczos steps show.

    Args:
        energy: U on fixed batches.
        keep: takes the best point so far, however the search ends; also after Ctrl-C or an error.
        tolerance: on the Newton decrement, in squared posterior standard deviations. Where rounding hides further
            progress, a decrement below 0.01 will do.
        max_iterations: steps at most.
        progress: show a progress bar where there is a terminal or notebook.
        callback: called after each step with its number, U, the norm of its gradient, and the decrement before.

    Raises:
        UnconvergedError: the search ended elsewhere; ``report`` holds what it did. The best point is kept.
        NonFiniteError: U is NaN or infinite where the search starts.
        ArgumentError: a tolerance or a count is not positive.
    """
    check_positive("tolerance", tolerance)
    check_count("max_iterations", max_iterations)
    start = energy.start
    spent = energy.evaluations
    local = energy.at(start)
    value, gradient = local.value_and_gradient  # raises where there is nothing to start from
    search = _Search(energy, start, float(value), float(gradient.norm()))
    minimum, reason = None, "interrupted"
    with progress_bar(progress, None, unit="step") as bar:

        def report(iteration: int, value: float, norm: float, decrement: float) -> None:
            search.iterations, search.decrement = iteration, decrement
            bar.update()
            bar.set_postfix_str(f"U {value:.6g}, gradient {norm:.2g}, decrement {decrement:.2g}")
            if callback is not None:
                callback(iteration, value, norm, decrement)

        try:
            minimum = minimise_newton(
                search,
                start,
                tolerance=tolerance,
                max_iterations=max_iterations,
                krylov_steps=max(
                    20, min(_KRYLOV_STEPS, _KRYLOV_BYTES // (len(start) * start.element_size()))
                ),
                preconditioner=local.prior_diagonal(),
                callback=report,
            )
            search.best = minimum.x, minimum.value, minimum.gradient_norm
            reason = minimum.reason
        except KeyboardInterrupt:
            warnings.warn(
                f"polish was interrupted after {search.iterations} steps; the guide keeps the best point so far",
                DviWarning,
                stacklevel=3,
            )
        finally:
            keep(search.best[0])
    found = Polished(
        mode=search.best[0],
        value_before=float(value),
        value=search.best[1],
        gradient_norm_before=float(gradient.norm()),
        gradient_norm=search.best[2],
        newton_decrement=search.decrement if minimum is None else minimum.newton_decrement,
        smallest_eigenvalue=None
        if minimum is None or minimum.smallest_eigenvalue is None
        else minimum.smallest_eigenvalue.value,
        iterations=search.iterations,
        evaluations=energy.evaluations - spent,
        converged=minimum is not None and _is_minimum(minimum),
        reason=reason,
    )
    if minimum is not None and not found.converged:
        raise _unconverged(found, start.dtype)
    return found


def _is_minimum(minimum: Minimum) -> bool:
    """Whether the search ended at a minimum, as far as the dtype lets it see."""
    lowest = minimum.smallest_eigenvalue
    positive = lowest is not None and lowest.value > lowest.resolution
    return minimum.converged or (positive and minimum.newton_decrement <= _ROUNDING)


def _unconverged(found: Polished, dtype: torch.dtype) -> UnconvergedError:
    way = "call guide.polish again, which goes on from here, with a larger max_iterations"
    if found.smallest_eigenvalue is not None:
        way = "give a prior that holds every direction"
        if dtype != torch.float64:
            way = "use float64 (model.double(), guide.double() and the data), or " + way
    error = UnconvergedError(
        f"polish ended without a minimum; the guide keeps the best point.\n{found}\nTo go on, {way}."
    )
    error.report = found
    return error


class _Search:
    """U as :func:`minimise_newton` sees it; remembers the best point.

    Args:
        energy: U.
        start: where the search begins.
        value: U there.
        gradient_norm: likewise.
    """

    def __init__(self, energy: Energy, start: Tensor, value: float, gradient_norm: float) -> None:
        self.energy = energy
        self.best = start, value, gradient_norm
        self.iterations, self.decrement = 0, math.inf

    def value_and_gradient(self, x: Tensor, /) -> tuple[Tensor, Tensor]:
        """U and its gradient; infinite where the model fails, so that a step which is too long is taken back."""
        try:
            value, gradient = self.energy.at(x).value_and_gradient
        except NonFiniteError:
            return self._outside(x)
        except ValueError as error:  # Pyro's validation, of a scale that became NaN, say
            if isinstance(error, PyroDviError):
                raise
            return self._outside(x)
        size = float(gradient.norm())
        if (float(value), size) < self.best[1:]:
            self.best = x.detach().clone(), float(value), size
        return value, gradient

    def product(self, x: Tensor, vectors: Tensor, /) -> Tensor:
        """Products with the Hessian of U."""
        return self.energy.at(x).hessian(vectors)

    @staticmethod
    def _outside(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_tensor(math.inf), torch.full_like(x, math.nan)
