# SPDX-License-Identifier: Apache-2.0
"""Diagnosis of a mode: its distance from a minimum, a remedy, and the check before a fit."""

import math
from contextlib import suppress
from dataclasses import dataclass, replace

import torch

from pyro_dvi.core.autograd_graph import graph_between, graph_of
from pyro_dvi.core.distributions import tensors_of
from pyro_dvi.core.kinks import kinks_among
from pyro_dvi.core.table import InNotebook
from pyro_dvi.core.undisturbed import undisturbed
from pyro_dvi.errors import (
    ArgumentError,
    ModelError,
    NotPositiveDefiniteError,
    UnconvergedError,
    UnsupportedError,
)
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, Hessian, PrecisionMatrix
from pyro_dvi.laplace.fitted import KnownMinimum, same_value
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method
from pyro_dvi.linalg.lanczos import Eigenpair, smallest_eigenpair
from pyro_dvi.linalg.operator import conjugate_gradients


@dataclass(frozen=True)
class Diagnosis(InNotebook):
    r"""Result of :meth:`~pyro_dvi.LaplaceGuide.diagnose`: the distance of the mode from a minimum.

    Attributes:
        value: U at the mode.
        gradient_norm: norm of the gradient of U.
        kinks: functions with kinks between the latents and U (such as ReLU), which the Hessian ignores.
        newton_decrement: :math:`g^\top P^{-1} g`, the squared distance to the minimum in posterior standard deviations.
            The mean of a linear functional of the latents is off by at most the square root of the decrement, in
            standard deviations of this functional. The decrement is estimated from above: for a residual r of conjugate
            gradients, :math:`|r|^2 / \lambda_{\min}` is added, with the smallest eigenvalue found. None if it was not
            computed.
        decrement_at_least: a lower bound on the decrement.
        curvature: the matrix P of the decrement, ``"Hessian"`` or ``"GGN"``.
        smallest_eigenvalue: smallest eigenvalue found of the Hessian of U, with its residual. It is an upper bound, so
            a negative value proves negative curvature. None if it was not computed.
        in_prior_units: whether the eigenvalue is relative to the prior precision; it is then 1 in directions without
            data.
        tolerance: bound on the decrement.
    """

    value: float = math.nan
    gradient_norm: float = math.nan
    kinks: tuple[str, ...] = ()
    newton_decrement: float | None = None
    decrement_at_least: float = 0.0
    curvature: str = "Hessian"
    smallest_eigenvalue: Eigenpair | None = None
    in_prior_units: bool = False
    tolerance: float = 1e-2

    @property
    def at_saddle(self) -> bool:
        """Whether the curvature in some direction is negative, or zero up to rounding."""
        lowest = self.smallest_eigenvalue
        return lowest is not None and lowest.value <= lowest.resolution

    @property
    def near(self) -> bool:
        """Whether the point is stationary within the tolerance, in the norm of :attr:`curvature`."""
        return self.newton_decrement is not None and self.newton_decrement <= self.tolerance

    @property
    def converged(self) -> bool:
        """Whether the mode is a minimum within the tolerance, with a positive definite Hessian."""
        lowest = self.smallest_eigenvalue
        return self.near and self.curvature == "Hessian" and lowest is not None and not self.at_saddle

    @property
    def verdict(self) -> str:
        """The result in words, with a remedy."""
        if self.at_saddle:
            bends = "The mode is not a minimum: U, minus the log posterior, has negative curvature in some direction"
            return f"{bends}. Train further, run guide.polish(batches), or use GGN()."
        if self.converged:
            return "Converged: a minimum with a positive definite Hessian."
        if not self.kinks:
            return self._distance
        return (
            f"{self._distance} U has kinks ({', '.join(self.kinks)}), which the Hessian ignores and at which the "
            "gradient need not vanish. Use GGN(), which does not require a minimum; to avoid kinks, use "
            f"{without_kinks(self.kinks)}."
        )

    @property
    def _distance(self) -> str:
        if self.newton_decrement is None:
            return ""
        low, high = math.sqrt(max(self.decrement_at_least, 0.0)), math.sqrt(self.newton_decrement)
        if self.near:
            return f"Stationary: a stationary point is {high:.2g} standard deviations of {self.curvature}() away."
        least = " at least" if high > 1.1 * low else ""
        if self.decrement_at_least > self.tolerance:
            away = f"the minimum is{least} {low:.3g} posterior standard deviations away"
            return f"Not converged: {away}. Train further or run guide.polish(batches)."
        away = f"the minimum is between {low:.2g} and {high:.2g} posterior standard deviations away"
        return f"Undecided: {away}. guide.diagnose(batches, steps=...) is more precise."

    def __str__(self) -> str:
        rows = [("value of U", f"{self.value:.8g}"), ("gradient norm", f"{self.gradient_norm:.3g}")]
        if self.newton_decrement is not None:
            low, high = self.decrement_at_least, self.newton_decrement
            span = f"{high:.3g}" if high <= 1.1 * low else f"{low:.3g} to {high:.3g}, an estimate"
            rows.append(("Newton decrement", f"{span} ({self.curvature})"))
        if self.smallest_eigenvalue is not None:
            lowest = self.smallest_eigenvalue
            unit = " prior precisions" if self.in_prior_units else ""
            text = f"{lowest.value:.3g} ± {lowest.residual:.1g}{unit} (Hessian)"
            rows.append(("smallest eigenvalue", text))
        known = [] if math.isnan(self.gradient_norm) else rows
        return "\n".join([self.verdict.strip(), *(f"  {name:<20} {text}" for name, text in known)])


def diagnose(energy: Energy, *, tolerance: float = 1e-2, steps: int = 200) -> Diagnosis:
    r"""Check the mode with the true Hessian of U or, if U has kinks, with the Gauss-Newton matrix.

    The eigenvalue costs at most :math:`2 \cdot \text{steps}` full-data gradients. The decrement costs the same, unless
    the gradient alone shows that the decrement is within the tolerance.

    Status: the eigenvalue is an upper bound, so ``steps`` Lanczos steps can miss negative curvature; the decrement is
    an estimate that uses this eigenvalue.

    Args:
        energy: U on fixed batches.
        tolerance: bound on the Newton decrement; 0.01 means a tenth of a posterior standard deviation.
        steps: number of Lanczos steps and of conjugate-gradient steps.

    Raises:
        ModelError: the model is random, or a latent is NaN.
        NonFiniteError: U is NaN or infinite.
    """
    with undisturbed():
        found = replace(sound(energy), kinks=kinks(energy), tolerance=tolerance)
        local = energy.at(energy.start)
        if found.kinks:
            return _with_decrement(found, local, GGN(), steps)
        lowest, in_units = smallest_in_prior_units(local, steps, 1e-4), local.prior_diagonal is not None
        found = replace(found, smallest_eigenvalue=lowest, in_prior_units=in_units)
        if not found.at_saddle:
            try:
                return _with_decrement(found, local, Hessian(), steps)
            except NotPositiveDefiniteError as error:  # a direction that the Lanczos recursion missed
                assert error.curvature is not None
                found = replace(found, smallest_eigenvalue=replace(lowest, value=error.curvature))
        return found


def smallest_in_prior_units(local: LocalEnergy, steps: int, tolerance: float) -> Eigenpair:
    """Return the smallest eigenpair of the Hessian, relative to the prior precision if it is diagonal."""
    scale = local.prior_scale
    return smallest_eigenpair(
        lambda v: scale * local.hessian(scale * v), local.point, steps=steps, tolerance=tolerance
    )


@undisturbed()
def kinks(energy: Energy) -> tuple[str, ...]:
    """Return the names of functions with kinks between the latents and U, in alphabetical order.

    Names of functions in densities include their place, such as ``"abs in the likelihood"`` for a Laplace distribution.

    Status: only the first batch, at the mode, is examined; see :func:`~pyro_dvi.core.kinks.kinks_among`.

    Example:
        >>> import pyro_dvi as dvi
        >>> net = torch.nn.Sequential(
        ...     torch.nn.Linear(1, 20), torch.nn.ReLU(), torch.nn.Linear(20, 1)
        ... )
        >>> _ = torch.manual_seed(0)
        >>> guide = dvi.LaplaceGuide(
        ...     dvi.regressor(dvi.to_bayesian_(net), num_data=9, noise_scale=0.1)
        ... )
        >>> batches = [(torch.linspace(-1, 1, 9)[:, None], torch.zeros(9, 1))]
        >>> kinks(guide.energy(batches)), kinks(guide.energy(batches, subset="net.2.*"))
        (('relu',), ())
    """
    with torch.enable_grad():
        graph = energy.at(energy.start).first
        run, log_likelihood = graph.run, graph.run.log_likelihood()
        nodes = graph_between(graph.values, [log_likelihood, run.log_prior])
    outputs = graph_of(tensor for site in run.sites for tensor in tensors_of(site.fn))
    likelihood = graph_of([log_likelihood])
    found = set()
    for node, name in kinks_among(nodes):
        where = "" if node in outputs else " in the likelihood" if node in likelihood else " in a prior"
        found.add(name + where)
    return tuple(sorted(found))


def without_kinks(found: tuple[str, ...]) -> str:
    """Return a phrase that explains how to avoid the kinks."""
    of_networks = "smooth_activations_(net) before training"
    of_densities = "a density that is smooth at its mode, such as StudentT or Normal instead of Laplace"
    ways = {of_densities if " in " in name else of_networks for name in found}
    return " and ".join(sorted(ways, reverse=True))


@undisturbed()
@torch.enable_grad()
def sound(energy: Energy) -> Diagnosis:
    """Return the value of U and the norm of its gradient, after checking that the model is deterministic.

    Raises:
        ModelError: the model is random, or a latent is NaN.
        NonFiniteError: U is NaN or infinite.
    """
    bad = [name for name, u in energy.locs.items() if not bool(torch.isfinite(u).all())]
    if bad:
        raise ModelError(f"latent {bad[0]!r} has NaN or infinite values: train with a lower learning rate")
    local = energy.at(energy.start)
    value, gradient = local.value_and_gradient
    if "repeats itself" not in energy.known:
        batch = energy.passes.first()
        again = energy.graph(*energy.run(batch, energy.start))
        # The first batch of a shuffled loader differs from pass to pass.
        first = energy.graph(*energy.run(batch, energy.start)) if energy.passes.reordered else local.first
        if not same_value(first.energy.item(), again.energy.item(), gradient.dtype):
            raise ModelError(
                "The model is random: in evaluation mode, two runs at the same latents differ, so there is no minimum. "
                "Remove calls such as dropout(x, training=True) or torch.rand from the model."
            )
        energy.known.add("repeats itself")
    return Diagnosis(value=float(value), gradient_norm=float(gradient.norm()), tolerance=1.0)


def check_policy(unconverged: object) -> None:
    """Check the policy for modes that are not minima.

    Raises:
        ArgumentError: the policy is unknown.
    """
    if unconverged not in ("refuse", "accept"):
        raise ArgumentError(f'unconverged must be "refuse" or "accept", got {unconverged!r}')


def check_mode(policy: str, method: Method, energy: Energy, known: KnownMinimum | None) -> Diagnosis | None:
    r"""Check whether the mode is a minimum; return the diagnosis, or None if no diagnosis was needed.

    The Gaussian of the Hessian exists only at a minimum. The Gauss-Newton matrix is positive definite everywhere, and
    its Gaussian belongs to the linearised model. For the Gauss-Newton matrix, the caller therefore only issues a
    warning, and only if a lower bound shows that the minimum is more than one posterior standard deviation away
    (:math:`g^\top P^{-1} g > 1`).

    Args:
        policy: ``"refuse"`` raises an error if the precision is the Hessian, and either the mode is not a minimum or U
            has kinks (ReLU). ``"accept"`` checks only that U is finite and not random.
        method: representation of the Gaussian.
        energy: U, of which the mode should be a minimum.
        known: the minimum that ``polish``, ``diagnose`` or an earlier fit found at this mode; None if there is none.

    Raises:
        UnconvergedError: the policy is ``"refuse"``, the precision is the Hessian, and the mode is not a minimum.
        ModelError: the model is random, or a latent is NaN.
        NonFiniteError: U is NaN or infinite.
    """
    found = sound(energy)
    if policy == "accept" or (known and known.is_of(energy)):
        return None
    if not isinstance(method.precision, Hessian):
        return found
    found = Diagnosis(kinks=kinks(energy))
    if not found.kinks:
        found = diagnose(energy)
    if not found.converged:
        error = UnconvergedError(
            f"{type(method).__name__} has the Hessian as precision, so the mode must be a minimum. {found}"
        )
        error.diagnosis = found
        raise error
    return found


def distance_by(posterior: LaplacePosterior, energy: Energy) -> Diagnosis:
    r"""Return the distance to the minimum, in standard deviations of a Gaussian with the Gauss-Newton matrix.

    .. math:: v = \tilde P^{-1} g, \qquad g^\top P^{-1} g \ge \frac{(g^\top v)^2}{v^\top P v}

    If the estimate :math:`g^\top v` exceeds 1, one product with P gives the lower bound. If the Gaussian cannot solve
    directly, the prior precision is used instead.

    Args:
        posterior: the Gaussian around the mode, whose precision :math:`\tilde P` approximates P.
        energy: U.
    """
    local = energy.at(energy.start)
    gradient, least = local.gradient.unsqueeze(0), 0.0
    step = gradient * local.prior_scale.square()
    with suppress(UnsupportedError):
        step = step if posterior.stored is None else posterior.solve(gradient)
    decrement = float((step * gradient).sum())
    if decrement > 1:
        least = decrement**2 / float((step * GGN().product(local, step)).sum())
    return Diagnosis(
        value=float(local.value),
        gradient_norm=float(gradient.norm()),
        kinks=kinks(energy) if least > 1 else (),
        newton_decrement=max(decrement, least),
        decrement_at_least=least,
        curvature="GGN",
        tolerance=1.0,
    )


def _with_decrement(found: Diagnosis, local: LocalEnergy, matrix: PrecisionMatrix, steps: int) -> Diagnosis:
    r"""Add bounds on :math:`g^\top P^{-1} g`, in coordinates in which the prior precision is one.

    For an x from conjugate gradients with residual r, the decrement is :math:`g^\top x + r^\top P^{-1} r`. The
    eigenvalues of the Gauss-Newton precision are at least one, because of the prior; the smallest eigenvalue of the
    Hessian was computed before.
    """
    diagonal, lowest, scale = local.prior_diagonal, found.smallest_eigenvalue, local.prior_scale
    floor = 0.0 if diagonal is None else 1.0
    if isinstance(matrix, Hessian) and lowest is not None:
        shown = lowest.value - lowest.residual
        floor = shown if diagonal is None else min(shown, 1.0)  # a larger value comes from too few steps
    gradient = scale * local.gradient
    size = float(gradient.norm())
    enough = 0.1 * math.sqrt(found.tolerance * floor) / max(size, 1e-300) if floor > 0 else 1e-3
    solution = conjugate_gradients(
        lambda v: scale * matrix.product(local, scale * v),
        gradient.unsqueeze(0),
        tolerance=enough,
        max_iterations=steps,
    )
    least = float(solution.x[0] @ gradient)
    rest = (float(solution.residuals[0]) * size) ** 2 / floor if floor > 0 else math.inf
    name = type(matrix).__name__
    return replace(found, newton_decrement=least + rest, decrement_at_least=least, curvature=name)
