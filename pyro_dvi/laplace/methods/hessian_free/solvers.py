# SPDX-License-Identifier: Apache-2.0
r"""U pulled aside by a function of the latents, and how the minimum is found.

.. math:: U_\lambda(u) = U(u) - \lambda\, r(u)

To first order its minimum moves from the mode by :math:`\lambda P^{-1} \nabla r`: what the Gaussian's covariance does
to a gradient, read off a second fit.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.choice import check_count
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.conjugate_gradient import check_tolerance
from pyro_dvi.linalg import conjugate_gradients

__all__ = [
    "Adam",
    "FineTuning",
    "LBFGS",
    "NewtonCG",
    "OutputTilt",
    "Solver",
    "Tilt",
    "TiltedEnergy",
    "solve_at_mode",
]


class Tilt(ABC):
    """A function r of the flat vector."""

    @abstractmethod
    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return r, a scalar, and its gradient [D]."""

    def tilted(self, local: LocalEnergy, point: Tensor, strength: float) -> tuple[Tensor, Tensor]:
        r"""Return :math:`U - \lambda r` and its gradient at a point; up to a constant."""
        value, gradient = local.energy.at(point).value_and_gradient
        pull, direction = self.value_and_gradient(point)
        return value - strength * pull, gradient - strength * direction


class OutputTilt(Tilt):
    r"""A weighted sum of outputs, :math:`r = \sum_{bk} c_{bk} f_k(x_b)`.

    Args:
        query: the outputs f.
        weights: c, ``[B, K]``.
    """

    def __init__(self, query: Query, weights: Tensor) -> None:
        self.query, self.weights = query, weights

    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return r and its gradient."""
        with torch.enable_grad():
            u = point.detach().requires_grad_()
            total = (self.weights * self.query.at(u)).sum()
            (gradient,) = torch.autograd.grad(total, u)
        return total.detach(), gradient


@dataclass(frozen=True)
class TiltedEnergy:
    r"""The problem of one fit: minimise :math:`U - \lambda r`.

    Attributes:
        local: U around the mode.
        tilt: r.
        strength: :math:`\lambda`, of either sign.
    """

    local: LocalEnergy
    tilt: Tilt
    strength: float

    def value_and_gradient(self, point: Tensor) -> tuple[Tensor, Tensor]:
        """Return value and gradient at a flat vector [D]."""
        return self.tilt.tilted(self.local, point, self.strength)


class Solver(ABC):
    """How the minimum of a tilted energy is found, from the mode of the untilted one."""

    def directions(self, local: LocalEnergy, gradients: Tensor) -> Tensor:
        r"""Return :math:`P^{-1} \nabla r` for rows ``[S, D]``, as well as the solver has use for.

        It gives the scale :math:`\hat\sigma = \sqrt{\nabla r^\top P^{-1} \nabla r}` that steps are measured in; a rough
        one will do here.

        Raises:
            NotPositiveDefiniteError: P is not positive definite: the mode is no minimum.
        """
        return solve_at_mode(local, gradients, 1e-2)

    @abstractmethod
    def minimise(
        self, problems: Sequence[TiltedEnergy], directions: Tensor, length: float
    ) -> tuple[Tensor, Tensor]:
        """Return the minima as rows ``[S, D]``, and which of them were found, ``[S]``.

        Args:
            problems: S tilted energies around one mode.
            directions: from :meth:`directions`, ``[S, D]``: the minima lie at about ``mode + strength * direction``.
            length: their distance from the mode, in posterior standard deviations along the tilt.
        """


def solve_at_mode(local: LocalEnergy, rows: Tensor, tolerance: float) -> Tensor:
    """Return the rows times the inverse of the Hessian of U, ``[S, D]``, by conjugate gradients."""
    return conjugate_gradients(local.hessian, rows, tolerance=tolerance).x


_ROUNDING = 0.03  # corrections, relative to the step, that may be rounding


@dataclass(frozen=True)
class NewtonCG(Solver):
    r"""Newton's method with the Hessian at the mode, by conjugate gradients.

    .. math:: u \leftarrow u - P^{-1}\,\bigl(\nabla U(u) - \lambda \nabla r(u)\bigr), \qquad
        u_0 = \hat u + \lambda P^{-1} \nabla r(\hat u)

    The Hessian is known by its products only. As the minima lie a small step from the mode, its Hessian serves at all
    of them: many tilts share one graph and one run of conjugate gradients, and the first solve serves both signs.
    Corrections shrink by a factor that is proportional to the step.

    A correction d changes a variance by at most the relative amount :math:`|d|_P / \text{step}`, by the inequality of
    Cauchy and Schwarz. The search ends where the next correction would be below the tolerance, going by the last two.
    In float32 rounding may keep them above it; corrections that no longer shrink are then accepted up to 3 %. Above
    that the step is too large for the Hessian at the mode, and a smaller one is tried.

    Status: the minimum, to the tolerance.

    Args:
        tolerance: relative error that may be left in a variance, where rounding allows.
        solve_tolerance: relative residual of each run of conjugate gradients; later corrections make up for it.
        max_corrections: Newton steps after the first one at most.

    Raises:
        ArgumentError: an option is out of range.

    Source: Kelley (1995), Section 5.4.1, for the chord method; Nocedal & Wright (2006), Alg. 7.1, for Newton-CG.
    """

    tolerance: float = 2e-3
    solve_tolerance: float = 1e-3
    max_corrections: int = 10

    def __post_init__(self) -> None:
        check_tolerance("tolerance", self.tolerance)
        check_tolerance("solve_tolerance", self.solve_tolerance)
        check_count("max_corrections", self.max_corrections)

    def directions(self, local: LocalEnergy, gradients: Tensor) -> Tensor:
        """Return the first Newton steps for strength one."""
        return solve_at_mode(local, gradients, self.solve_tolerance)

    def minimise(
        self, problems: Sequence[TiltedEnergy], directions: Tensor, length: float
    ) -> tuple[Tensor, Tensor]:
        """Return the minima, and where the corrections shrink; see :meth:`Solver.minimise`."""
        local = problems[0].local
        strengths = directions.new_tensor([problem.strength for problem in problems])
        points = local.point + strengths.unsqueeze(-1) * directions
        found = torch.zeros(len(problems), dtype=torch.bool)
        active = torch.arange(len(problems))
        before = points.new_full((len(problems),), length)
        for _ in range(self.max_corrections):
            downhill = -torch.stack([problems[s].value_and_gradient(points[s])[1] for s in active.tolist()])
            corrections = solve_at_mode(local, downhill, self.solve_tolerance)
            points[active] += corrections
            sizes = (downhill * corrections).sum(-1).sqrt()  # in posterior standard deviations
            following = sizes * (sizes / before).clamp(max=1)
            stalled = (sizes > 0.5 * before) & (sizes <= _ROUNDING * length)
            done = ((following <= self.tolerance * length) | stalled).cpu()
            hopeless = ((sizes > before) & ~stalled).cpu() & ~done
            found[active[done]] = True
            left = ~(done | hopeless)
            if not bool(left.any()):
                break
            active, before = active[left], sizes[left.to(sizes.device)]
        return points, found


class FineTuning(Solver):
    """One problem after the other by an optimizer of torch, whose result is called a minimum wherever it ends."""

    steps: int

    @abstractmethod
    def optimizer(self, u: Tensor) -> torch.optim.Optimizer:
        """Return the optimizer of a flat vector."""

    def minimise(
        self, problems: Sequence[TiltedEnergy], directions: Tensor, length: float
    ) -> tuple[Tensor, Tensor]:
        """Return where the optimizer ends, and call all of it found; see :meth:`Solver.minimise`."""
        found = torch.stack([self._fine_tuned(problem) for problem in problems])
        return found, torch.ones(len(problems), dtype=torch.bool)

    def _fine_tuned(self, problem: TiltedEnergy) -> Tensor:
        u = problem.local.point.clone().requires_grad_()
        optimizer = self.optimizer(u)

        def closure() -> Tensor:
            value, u.grad = problem.value_and_gradient(u.detach())
            return value

        for _ in range(self.steps):
            optimizer.step(closure)  # type: ignore[arg-type]
        return u.detach()


@dataclass(frozen=True)
class LBFGS(FineTuning):
    """Fine-tune each tilted energy from the mode by limited-memory BFGS with a strong Wolfe line search.

    Status: the minimum of small problems in float64, for several times the work of :class:`NewtonCG`. Nothing checks
    that it was found: gradients alone say little about flat directions, and rounding in float32 ends the search early.

    Args:
        max_iterations: of each fit.
        history: pairs of steps and gradient changes that are kept.

    Source: Liu & Nocedal (1989).
    """

    max_iterations: int = 200
    history: int = 20

    steps = 1

    def optimizer(self, u: Tensor) -> torch.optim.Optimizer:
        """Return one that does the whole search in one step."""
        return torch.optim.LBFGS(
            [u],
            max_iter=self.max_iterations,
            history_size=self.history,
            tolerance_grad=1e-12,
            tolerance_change=1e-16,
            line_search_fn="strong_wolfe",
        )


@dataclass(frozen=True)
class Adam(FineTuning):
    """Fine-tune each tilted energy from the mode as networks are trained.

    Status: the flat directions of a network take far more steps than training does, so that the variance is usually
    wrong by more than 10 %, without a sign of it. Of use for comparison with the literature; take :class:`NewtonCG`.

    Args:
        steps: of each fit; one costs a gradient of all data.
        learning_rate: in units of the unconstrained latents; the default suits steps that are as small as ours.

    Source: McInerney & Kallus (2024) for fine-tuning from the mode; Kingma & Ba (2015).
    """

    steps: int = 1000
    learning_rate: float = 1e-4

    def optimizer(self, u: Tensor) -> torch.optim.Optimizer:
        """Return Adam."""
        return torch.optim.Adam([u], lr=self.learning_rate)
