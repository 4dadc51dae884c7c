# SPDX-License-Identifier: Apache-2.0
"""The record that a mode is a minimum, and the check before a fit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_dvi.errors import ArgumentError, UnconvergedError
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.passes import same_data
from pyro_dvi.laplace.energy.precision import Hessian
from pyro_dvi.laplace.fitted import PointMass
from pyro_dvi.laplace.methods.method import Method
from pyro_dvi.laplace.mode.diagnosis import Diagnosis, diagnose, kinks, sound
from pyro_dvi.laplace.mode.search import GOOD_ENOUGH, Polished


@dataclass(frozen=True)
class Certificate:
    r"""A record that a mode is a minimum or a stationary point; it expires when the mode changes.

    Attributes:
        point: the mode, with the U, data and model to which it belongs.
        sites: the sites of which all entries were optimised.
        curvature: ``"Hessian"`` for a minimum with a positive definite Hessian; ``"GGN"`` for a stationary point.
        decrement: upper bound on :math:`g^\top P^{-1} g`, where P is the matrix that ``curvature`` names.
    """

    point: PointMass
    sites: tuple[str, ...]
    curvature: str
    decrement: float

    @classmethod
    def of(cls, point: PointMass, energy: Energy, shown: Polished | Diagnosis) -> "Certificate":
        """Return the record for the result of a search or a diagnosis on all the data."""
        assert shown.newton_decrement is not None
        whole = tuple(name for name in energy.layout.names if name not in energy.layout.chosen)
        return cls(point, whole, shown.curvature, shown.newton_decrement)

    def is_of(self, point: PointMass) -> bool:
        """Return whether the record belongs to this mode of this U."""
        return point.change_since(self.point) is None

    def covers(self, energy: Energy, model: Callable[..., Any], latents: dict[str, Tensor]) -> bool:
        """Return whether the record is valid for these data and this model.

        A minimum over more sites is also a minimum over fewer.

        Args:
            energy: U.
            model: the model, with the scales as written in its code.
            latents: the constrained mode.
        """
        return (
            set(energy.layout.names) <= set(self.sites)
            and same_data(self.point.data, energy.passes.checksum)
            and (self.point.model is None or not self.point.model.differences(model, latents))
        )

    def state(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, for files."""
        return {**vars(self), "point": self.point.state()}

    @staticmethod
    def from_state(state: Mapping[str, Any] | None) -> "Certificate | None":
        """Restore an object from its :meth:`state`."""
        if state is None:
            return None
        return Certificate(**{**state, "point": PointMass.from_state(state["point"])})


def check_policy(unconverged: object) -> None:
    """Check the policy for modes that are not minima.

    Raises:
        ArgumentError: the policy is unknown.
    """
    if unconverged not in ("refuse", "accept"):
        raise ArgumentError(f'unconverged must be "refuse" or "accept", got {unconverged!r}')


def check_mode(policy: str, method: Method, energy: Energy, known: Certificate | None) -> Diagnosis | None:
    r"""Check whether the mode is a minimum; return the diagnosis, or None if no diagnosis was needed.

    The Gaussian of the Hessian exists only at a minimum. The Gauss-Newton matrix is positive definite everywhere, and
    its Gaussian belongs to the linearised model. For the Gauss-Newton matrix, there is therefore only a warning, and
    only if a lower bound shows that the minimum is more than one posterior standard deviation away
    (:math:`g^\top P^{-1} g > 1`). A mode that ``polish``, ``diagnose`` or an earlier fit found to be a minimum of the
    same U on the same data is not checked again.

    Args:
        policy: ``"refuse"`` raises an error if the precision is the Hessian, and either the mode is not a minimum or U
            has kinks (ReLU). ``"accept"`` checks only that U is finite and not random.
        method: representation of the Gaussian.
        energy: U, of which the mode should be a minimum.
        known: an earlier record for this mode, if there is one.

    Raises:
        UnconvergedError: the policy is ``"refuse"``, the precision is the Hessian, and the mode is not a minimum.
        ModelError: the model is random, or a latent is NaN.
        NonFiniteError: U is NaN or infinite.
    """
    seen = None if known else sound(energy)
    if policy == "accept":
        return None
    if not isinstance(method.precision, Hessian):
        return seen
    if known and known.curvature == "Hessian" and known.decrement <= GOOD_ENOUGH:
        return None
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
