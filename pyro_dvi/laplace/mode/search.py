# SPDX-License-Identifier: Apache-2.0
"""The search for a minimum of U, or for a stationary point if U has kinks."""

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count, check_positive
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import InNotebook
from pyro_dvi.errors import (
    DviWarning,
    ModelError,
    NonFiniteError,
    NotPositiveDefiniteError,
    PyroDviError,
    UnconvergedError,
    UnsupportedError,
    warn,
)
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, prior_diagonal
from pyro_dvi.laplace.methods.full_and_low_rank import DensePosterior
from pyro_dvi.laplace.methods.kronecker_factored import (
    DiagonalPosterior,
    KroneckerFactored,
    likelihood_diagonal,
)
from pyro_dvi.laplace.methods.method import RootPosterior
from pyro_dvi.laplace.mode.diagnosis import kinks, smallest_in_prior_units, without_kinks
from pyro_dvi.linalg.minimise import Descent, InMetric, Minimum, descend, minimise_newton
from pyro_dvi.linalg.operator import conjugate_gradients

_DENSE = 2000  # maximum number of latents for which a matrix is refactorised about every thirty gradients


def metric_at(local: LocalEnergy) -> RootPosterior:
    """Return the Gauss-Newton matrix of U, or its Kronecker factors; both are positive definite at any point.

    This takes K backward passes for K outputs. The matrix itself is used if it is small and its rows are cheap. The
    diagonal is used if the latents have no Kronecker factors, and the prior precision is used if the model has no
    Gauss-Newton matrix (``pyro.factor``).

    Args:
        local: U with its derivatives at a point.
    """
    try:
        if len(local.point) <= _DENSE and (matrix := GGN().from_examples(local)) is not None:
            with suppress(NotPositiveDefiniteError):
                return DensePosterior(local.point, matrix)
        with suppress(NotPositiveDefiniteError, UnsupportedError), warnings.catch_warnings():
            warnings.simplefilter("ignore", DviWarning)  # about sites with a diagonal precision
            return KroneckerFactored().fit(local)
        diagonal = prior_diagonal(local, "polish") + likelihood_diagonal(local)
        # 1 for latents for which neither the prior nor the data have positive curvature.
        return DiagonalPosterior(local.point, torch.where(diagonal > 0, diagonal, 1.0))
    except (ModelError, UnsupportedError):
        return DiagonalPosterior(local.point, local.prior_scale.square().reciprocal())


GOOD_ENOUGH = 1e-2
"""A decrement at which predictions are off by at most a tenth of their standard deviations."""

_NEAR = 1e-6  # squared gradient norm, in the metric, below which Newton's method takes over
_STEPS = 30  # quasi-Newton steps before the metric is recomputed
_NEWTON_STEPS = 5  # Newton steps before the metric is recomputed
_NEGLIGIBLE = 1e-6  # decrease of U, in nats, below which another round is not worth its cost
_KRYLOV_STEPS = 200


@dataclass(frozen=True)
class Polished(InNotebook):
    r"""Result of :meth:`~pyro_dvi.LaplaceGuide.polish`.

    Attributes:
        mode: the last point, flat, [D].
        value_before: U at the start.
        value: U at the mode.
        gradient_norm: norm of the gradient of U at the mode.
        newton_decrement: :math:`g^\top P^{-1} g` at the mode, the squared distance to the minimum in posterior standard
            deviations; infinite if P is not positive definite.
        curvature: the matrix P of the decrement: ``"Hessian"``, or ``"GGN"`` if U has kinks.
        smallest_eigenvalue: smallest eigenvalue of the Hessian. If the prior precision is diagonal, the eigenvalue is
            relative to it, and is 1 in directions without data. None if the search ended before it was computed.
        steps: number of steps.
        gradients: cost in full-data gradients.
        converged: whether the mode is a minimum with a positive definite Hessian and a decrement below the tolerance or
            0.01; if U has kinks, whether it is a stationary point.
        reason: why the search ended.
    """

    mode: Tensor
    value_before: float
    value: float
    gradient_norm: float
    steps: int
    gradients: int
    newton_decrement: float
    curvature: str
    reason: str
    converged: bool = False
    smallest_eigenvalue: float | None = None

    def __str__(self) -> str:
        lowest, down = self.smallest_eigenvalue, math.isinf(self.newton_decrement)
        decrement = "none, because U has negative curvature" if down else f"{self.newton_decrement:.3g}"
        rows = {
            "U": f"{self.value_before:.8g} -> {self.value:.8g}",
            "gradient norm": f"{self.gradient_norm:.3g}",
            "Newton decrement": f"{decrement} ({self.curvature})",
            "smallest eigenvalue": "not computed" if lowest is None else f"{lowest:.3g}",
            "work": f"{self.steps} steps, {self.gradients} full-data gradients",
        }
        state = "converged" if self.converged else "not converged"
        return "\n".join([f"{state}: {self.reason}", *(f"  {k:<20} {text}" for k, text in rows.items())])


class BudgetSpent(Exception):
    """The budget of gradients is exhausted."""


class Search:
    r"""A minimisation of U that records the best point and counts gradients.

    Quasi-Newton steps in the metric of the Gauss-Newton matrix, which is recomputed every thirty steps, follow curved
    valleys at a cost of one or two gradients per step. Newton's method in this metric then finds the minimum.

    Args:
        energy: U.
        max_gradients: budget of the search, in full-data gradients, those for the metric included.
        report: function that is called after each step with U and the decrement (far from the minimum, an estimate: the
            squared norm of the gradient in the metric).

    Attributes:
        first_value: U at the start.
        best: the point with the lowest U so far, with U and the norm of its gradient.
        steps: number of steps.
    """

    def __init__(self, energy: Energy, max_gradients: int, report: Callable[[float, float], None]) -> None:
        self.energy, self.report = energy, report
        self.before, self.max_gradients = energy.work.done, max_gradients
        self.limit: float = self.before + max_gradients
        start = energy.at(energy.start)
        self.best = start.point, float(start.value), float(start.gradient.norm())  # raises if U is not finite
        self.first_value = self.best[1]
        self.steps = 0
        self.decrement = math.nan

    def ended(self, **outcome: Any) -> Polished:
        """Return the report so far, with the given attributes of :class:`Polished`."""
        mode, value, norm = self.best
        return Polished(
            mode=mode,
            value_before=self.first_value,
            value=value,
            gradient_norm=norm,
            steps=self.steps,
            gradients=round(self.energy.work.done - self.before),
            **outcome,
        )

    # --- U as a SmoothFunction ----------------------------------------------------------------------

    def value_and_gradient(self, x: Tensor, /) -> tuple[Tensor, Tensor]:
        """Return U and its gradient; infinite if the model fails, so that line searches shorten the step."""
        self._spend()
        try:
            value, gradient = self.energy.at(x).value_and_gradient
        except (NonFiniteError, ValueError) as error:  # ValueError: Pyro's validation, of a NaN scale
            if isinstance(error, PyroDviError) and not isinstance(error, ArithmeticError):
                raise
            return x.new_tensor(math.inf), torch.full_like(x, math.nan)
        size = float(gradient.norm())
        if (float(value), size) < self.best[1:]:
            self.best = x.detach().clone(), float(value), size
        return value, gradient

    def product(self, x: Tensor, vectors: Tensor, /) -> Tensor:
        """Return products with the Hessian of U."""
        self._spend()
        return self.energy.at(x).hessian(vectors)

    def _spend(self) -> None:
        if self.energy.work.done >= self.limit:
            raise BudgetSpent

    def _in_metric(self, x: Tensor) -> InMetric:
        return InMetric(self, metric_at(self.energy.at(x)), x)

    # --- minimum --------------------------------------------------------------------------------------------

    def minimum(self, tolerance: float) -> Polished:
        """Move to a minimum with a positive definite Hessian, and keep it as the best point."""
        x, near, wanted, spent = self.best[0], _NEAR, tolerance, ""
        try:
            while True:
                before = self.best[1]
                x, down = self._descent(x, near)
                if down.steps == _STEPS and not down.stuck and down.fallen >= _NEGLIGIBLE:
                    continue  # stay with quasi-Newton steps
                x, found = self._newton(x, wanted, _NEWTON_STEPS)
                if found.smallest_eigenvalue is not None:
                    break
                if before - found.value < _NEGLIGIBLE:
                    wanted = max(wanted, GOOD_ENOUGH)
                near /= 100
        except BudgetSpent:
            self.limit = math.inf
            spent = f"{self.max_gradients} gradients were not enough for a tolerance of {tolerance:.1g}"
            x, found = self._newton(self.best[0], GOOD_ENOUGH, 1)
        local, lowest, value = self.energy.at(x), found.smallest_eigenvalue, None
        self.best = x, found.value, float(local.gradient.norm())
        converged = False
        if lowest is not None:
            value = smallest_in_prior_units(local, _KRYLOV_STEPS, 0.1).value
            positive = lowest.value > lowest.resolution and value > 0
            converged = positive and found.newton_decrement <= max(GOOD_ENOUGH, tolerance)
        return self.ended(
            newton_decrement=found.newton_decrement,
            curvature="Hessian",
            smallest_eigenvalue=value,
            converged=converged,
            reason=spent or found.reason,
        )

    def _descent(self, x: Tensor, target: float) -> tuple[Tensor, Descent]:
        local = self._in_metric(x)
        down = descend(local, torch.zeros_like(x), target=target, max_steps=_STEPS, callback=self._step)
        return local.x(down.x), down

    def _newton(self, x: Tensor, tolerance: float, steps: int) -> tuple[Tensor, Minimum]:
        local = self._in_metric(x)
        options: Any = {"tolerance": tolerance, "max_steps": steps, "callback": self._step}
        found = minimise_newton(local, torch.zeros_like(x), **options)
        return local.x(found.x), found

    def _step(self, value: float, decrement: float) -> None:
        self.steps, self.decrement = self.steps + 1, decrement
        self.report(value, decrement)

    # --- stationary point with kinks ---------------------------------------------------------------------

    def rest(self, kinked: tuple[str, ...]) -> Polished:
        """Move to a stationary point in the norm of the Gauss-Newton matrix, or until kinks stop the search."""
        x, target, reason, decrement = self.best[0], GOOD_ENOUGH / 2, "", math.inf
        try:
            while not reason:
                x, down = self._descent(x, target)
                if down.steps < _STEPS and not down.stuck:
                    decrement, target = self._gauss_newton_decrement(x), target / 10
                    if decrement <= GOOD_ENOUGH:
                        reason = "stationary in the norm of the Gauss-Newton matrix"
                elif down.stuck or down.fallen <= GOOD_ENOUGH / 2:
                    reason = f"stopped at kinks of {', '.join(kinked)}"
        except BudgetSpent:
            self.limit, reason = math.inf, f"{self.max_gradients} gradients were not enough"
        if decrement > GOOD_ENOUGH:
            decrement = self._gauss_newton_decrement(self.best[0])
        converged = decrement <= GOOD_ENOUGH
        return self.ended(newton_decrement=decrement, curvature="GGN", converged=converged, reason=reason)

    def _gauss_newton_decrement(self, x: Tensor) -> float:
        local, metric = self.energy.at(x), self._in_metric(x).metric
        gradient = metric.whitened(local.gradient.unsqueeze(0))
        try:
            solution = conjugate_gradients(
                lambda rows: metric.whitened(local.ggn(metric.coloured(rows))),
                gradient,
                tolerance=0.1,
                max_iterations=_KRYLOV_STEPS,
            )
        except NotPositiveDefiniteError:
            return math.inf
        return float((solution.x * gradient).sum())


def polish(
    energy: Energy, keep: Callable[[Tensor], None], *, tolerance: float, max_gradients: int, progress: bool
) -> Polished:
    """Move to a minimum of U, and verify it with the true Hessian; see :meth:`~pyro_dvi.LaplaceGuide.polish`.

    Args:
        energy: U on fixed batches.
        keep: function that is called with the best point so far when the search ends, even after Ctrl-C or an error.
        tolerance: bound on the Newton decrement, in squared posterior standard deviations. If rounding prevents further
            progress, or the budget is exhausted, a decrement below 0.01 is accepted.
        max_gradients: budget of full-data gradients for the search; verification may take a few hundred more.
        progress: show a progress bar where there is a terminal or notebook.

    Raises:
        UnconvergedError: the search did not end at a minimum; ``report`` describes it. The best point is kept.
        NonFiniteError: U is NaN or infinite at the start.
        ArgumentError: a tolerance or a count is not positive.
    """
    check_positive("tolerance", tolerance)
    check_count("max_gradients", max_gradients)
    work, spent = energy.work, energy.work.done
    with progress_bar(progress, max_gradients, unit="gradient") as bar:
        # This function must not refer to the search, because the search refers to it.
        def report(value: float, decrement: float) -> None:
            bar.update(round(work.done - spent) - bar.n)
            bar.set_postfix_str(f"U {value:.6g}, decrement {decrement:.2g}")

        search = Search(energy, max_gradients, report)
        kinked = kinks(energy)
        try:
            found = search.rest(kinked) if kinked else search.minimum(tolerance)
        except KeyboardInterrupt:
            warn(f"polish was interrupted after {search.steps} steps; the guide keeps the best point so far")
            curvature = "GGN" if kinked else "Hessian"
            return search.ended(newton_decrement=search.decrement, curvature=curvature, reason="interrupted")
        finally:
            keep(search.best[0])
    if kinked and not found.converged:
        why = f"polish: {found.reason}; the guide keeps the best point. U has kinks ({', '.join(kinked)})"
        warn(
            f"{why}: fit with GGN(), which does not require a minimum; to avoid kinks, use {without_kinks(kinked)}."
        )
    elif not found.converged:
        ways = {
            "gradients": "longer training, more max_gradients, a narrower prior or, after normalisation layers, GGN()",
            "": "float64, or a prior that constrains every direction",
        }
        way = next(way for word, way in ways.items() if word in found.reason)
        error = UnconvergedError(
            f"polish ended without a minimum; the best point is kept.\n{found}\nTry {way}."
        )
        error.report = found
        raise error
    return found
