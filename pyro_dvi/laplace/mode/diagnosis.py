# SPDX-License-Identifier: Apache-2.0
"""Is the mode a minimum, and if not, why?"""

import inspect
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from pyro_dvi.errors import ModelError, NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, Hessian, PrecisionMatrix
from pyro_dvi.linalg import Eigenpair, conjugate_gradients, smallest_eigenpair
from pyro_dvi.undisturbed import undisturbed

__all__ = ["Diagnosis", "diagnose", "glance"]

_COLLINEAR = 0.99  # cosine above which the prior's gradient explains that of the likelihood
_ANOTHER_WEIGHT = 0.05  # relative difference from which another kl_weight is worth mentioning


@dataclass(frozen=True)
class Diagnosis:
    r"""What is known about the mode, without moving it.

    Attributes:
        non_finite: latents that hold NaN or infinities; everything below is then unknown.
        value: U at the mode.
        randomness: by how much two evaluations of U at the same point differ beyond rounding; zero in a proper model.
        gradient_norm: of the gradient of U.
        newton_decrement: :math:`g^\top P^{-1} g`, the squared distance to the minimum in posterior standard deviations;
            no functional of the latents has its mean shifted by more standard deviations than its square root. None
            where P is not positive definite.
        decrement_is_bound: the decrement is a lower bound only.
        curvature: the matrix P of the decrement, ``"Hessian"`` or ``"GGN"``.
        smallest_eigenvalue: of the Hessian of U, with its residual; an upper bound, so that a negative one is a proof.
            None where it was not looked for.
        in_prior_units: the eigenvalue is relative to the prior precision: 1 is a direction that only the prior holds.
        kl_weight: with which U is made.
        fitting_kl_weight: the weight for which this point is about a minimum, if it is clearly another one.
        stochastic_modules: dropout and batch normalisation that the model holds in training mode; here they ran in
            evaluation mode.
        tolerance: on the decrement.
    """

    non_finite: tuple[str, ...] = ()
    value: float = math.nan
    randomness: float = 0.0
    gradient_norm: float = math.nan
    newton_decrement: float | None = None
    decrement_is_bound: bool = False
    curvature: str = "Hessian"
    smallest_eigenvalue: Eigenpair | None = None
    in_prior_units: bool = False
    kl_weight: float = 1.0
    fitting_kl_weight: float | None = None
    stochastic_modules: tuple[str, ...] = ()
    tolerance: float = 1e-2

    @property
    def at_saddle(self) -> bool:
        """Whether some direction has negative curvature, or none to rounding."""
        lowest = self.smallest_eigenvalue
        return lowest is not None and lowest.value <= lowest.resolution

    @property
    def near(self) -> bool:
        """Whether the minimum is within the tolerance as far as the decrement shows."""
        return self.newton_decrement is not None and self.newton_decrement <= self.tolerance

    @property
    def converged(self) -> bool:
        """Whether this is a minimum within the tolerance, with a positive definite Hessian."""
        return (
            not self.non_finite
            and not self.randomness
            and self.smallest_eigenvalue is not None
            and not self.at_saddle
            and self.near
            and not self.decrement_is_bound
        )

    @property
    def verdict(self) -> str:
        """What is the matter, in words, and what to do."""
        if self.non_finite:
            return f"NaN or infinite values in {', '.join(self.non_finite)}: drop or replace them."
        if self.randomness:
            return (
                "The model is random: two runs at the same latents differ. Modules run in evaluation mode, so that "
                "some function draws numbers itself (dropout(x, training=True), torch.rand in the model). Make it "
                "deterministic; no minimum can be found otherwise."
            )
        if self.fitting_kl_weight is not None:
            return (
                f"The mode seems to be that of kl_weight={self.fitting_kl_weight:.3g}, not {self.kl_weight:.3g}: its "
                "likelihood and prior balance for that weight. Give LaplaceGuide the kl_weight of training (a loss "
                "that was divided by something counts), or polish."
            )
        modules = (
            ""
            if not self.stochastic_modules
            else f" {self.stochastic_modules[0]} and other dropout or batch normalisation was in training mode, so "
            "that the objective of training was another function: polish in any case."
        )
        if self.at_saddle:
            return (
                "The mode is no minimum: minus the log posterior bends down in some direction. Train further or run "
                f"guide.polish(batches); GGN() is a precision that does without.{modules}"
            )
        if self.converged:
            return "Converged: a minimum with a positive definite Hessian."
        if self.near:
            return "As near to a minimum as this look shows; guide.diagnose(batches) looks closer."
        distance = "" if self.newton_decrement is None else f" {math.sqrt(self.newton_decrement):.3g}"
        least = " at least" if self.decrement_is_bound else ""
        return (
            f"Not converged: the minimum is{least}{distance} posterior standard deviations away. Train further or run "
            f"guide.polish(batches).{modules}"
        )

    def __str__(self) -> str:
        rows = [("value of U", f"{self.value:.8g}"), ("gradient norm", f"{self.gradient_norm:.3g}")]
        if self.newton_decrement is not None:
            bound = "at least " if self.decrement_is_bound else ""
            rows.append(("Newton decrement", f"{bound}{self.newton_decrement:.3g} ({self.curvature})"))
        if self.smallest_eigenvalue is not None:
            lowest = self.smallest_eigenvalue
            unit = " prior precisions" if self.in_prior_units else ""
            rows.append(
                ("smallest eigenvalue", f"{lowest.value:.3g} ± {lowest.residual:.1g}{unit} (Hessian)")
            )
        known = rows if not self.non_finite else []
        return "\n".join([self.verdict, *(f"  {name:<20} {text}" for name, text in known)])


def diagnose(energy: Energy, *, tolerance: float = 1e-2, steps: int = 200) -> Diagnosis:
    r"""Look at U around the mode with its true Hessian.

    The cost is at most :math:`2 \cdot \text{steps}` gradients of all data for the eigenvalue, and as many for the
    decrement.

    Status: the eigenvalue is an upper bound, so that negative curvature which ``steps`` of the Lanczos recursion do not
    reveal is not seen.

    Args:
        energy: U on fixed batches.
        tolerance: on the Newton decrement; 0.01 is a tenth of a posterior standard deviation.
        steps: of the Lanczos recursion, and of conjugate gradients.
    """
    with undisturbed():
        found = _first_look(energy, tolerance)
        if found.non_finite or found.randomness:
            return found
        local = energy.at(energy.start)
        diagonal = local.prior_diagonal()
        scale = torch.ones_like(local.point) if diagonal is None else diagonal.rsqrt()
        lowest = smallest_eigenpair(
            lambda v: scale * local.hessian(scale * v),
            len(local.point),
            steps=steps,
            tolerance=1e-4,
            like=local.point,
        )
        found = replace(found, smallest_eigenvalue=lowest, in_prior_units=diagonal is not None)
        choices: list[PrecisionMatrix] = [GGN()] if found.at_saddle else [Hessian(), GGN()]
        for curvature in choices:
            try:
                return _with_decrement(found, local, curvature, steps)
            except (NotPositiveDefiniteError, ModelError):  # ModelError: no Gauss-Newton matrix
                continue
        return replace(found, fitting_kl_weight=_fitting_kl_weight(local))


def glance(energy: Energy, *, tolerance: float = 1.0, steps: int = 3) -> Diagnosis:
    """Look at U around the mode without its Hessian, for about ``2 * steps + 4`` gradients of all data.

    A few steps of conjugate gradients with the Gauss-Newton matrix give a lower bound of the Newton decrement, so that
    a bound above the tolerance shows that training has not converged; one below shows nothing.

    Args:
        energy: U on fixed batches.
        tolerance: on the bound; 1 is a whole posterior standard deviation.
        steps: of conjugate gradients.
    """
    with undisturbed():
        found = _first_look(energy, tolerance)
        if found.non_finite or found.randomness:
            return found
        try:
            return _with_decrement(found, energy.at(energy.start), GGN(), steps)
        except NotPositiveDefiniteError:
            return found


def _first_look(energy: Energy, tolerance: float) -> Diagnosis:
    """Return what two values and one gradient show."""
    found = Diagnosis(kl_weight=energy.kl_weight, tolerance=tolerance)
    bad = [f"latent {name!r}" for name, u in energy.locs.items() if not bool(torch.isfinite(u).all())]
    if bad:
        return replace(found, non_finite=tuple(bad))
    first, second = (float(energy.value(energy.start)) for _ in range(2))
    rounding = math.sqrt(torch.finfo(energy.start.dtype).eps) * (1 + abs(first))
    randomness = abs(first - second) if abs(first - second) > rounding else 0.0
    found = replace(found, value=first, randomness=randomness, stochastic_modules=_in_training(energy.model))
    if randomness:
        return found
    return replace(found, gradient_norm=float(energy.at(energy.start).gradient.norm()))


def _in_training(model: Any) -> tuple[str, ...]:
    model = inspect.unwrap(model)  # without other scales
    modules = model.named_modules() if isinstance(model, nn.Module) else ()
    return tuple(
        name or type(m).__name__
        for name, m in modules
        if m.training and isinstance(m, (_BatchNorm, _DropoutNd))
    )


def _with_decrement(
    found: Diagnosis, local: LocalEnergy, curvature: PrecisionMatrix, steps: int
) -> Diagnosis:
    """Add g' P^-1 g, and whether it is a lower bound: the iterates of conjugate gradients rise towards it."""
    gradient = local.gradient
    solution = conjugate_gradients(
        lambda v: curvature.product(local, v),
        gradient.unsqueeze(0),
        tolerance=1e-3,
        max_iterations=steps,
        preconditioner=local.prior_diagonal(),
    )
    decrement = float(solution.x[0] @ gradient)
    return replace(
        found,
        newton_decrement=decrement,
        decrement_is_bound=not solution.converged,
        curvature=type(curvature).__name__,
        fitting_kl_weight=None if decrement <= found.tolerance else _fitting_kl_weight(local),
    )


def _fitting_kl_weight(local: LocalEnergy) -> float | None:
    r"""Return the weight k' for which the gradients of likelihood and prior cancel, if there is another one.

    With :math:`g = g_L/\beta + g_P`, a minimum for :math:`\beta'` has :math:`g_L = -\beta' g_P`.
    """
    weight = local.energy.kl_weight
    prior = local.prior_gradient.cpu().double()
    likelihood = weight * (local.gradient.cpu().double() - prior)
    product, sizes = float(likelihood @ prior), float(likelihood.norm() * prior.norm())
    if not sizes or -product < _COLLINEAR * sizes:
        return None
    found = -product / float(prior @ prior)
    return found if abs(found / weight - 1) > _ANOTHER_WEIGHT else None
