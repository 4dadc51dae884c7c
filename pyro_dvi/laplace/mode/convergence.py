# SPDX-License-Identifier: Apache-2.0
"""The record that a mode is a minimum, and its check before a fit."""

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
    r"""A record that a mode is a minimum, or stationary; it expires when the mode changes.

    Attributes:
        point: the mode, and the U that it belongs to, with its data and its model.
        sites: the sites of which all entries varied.
        curvature: ``"Hessian"`` for a minimum with a positive definite Hessian; ``"GGN"`` for a stationary point.
        decrement: :math:`g^\top P^{-1} g` with this matrix, an upper bound.
    """

    point: PointMass
    sites: tuple[str, ...]
    curvature: str
    decrement: float

    @classmethod
    def of(cls, point: PointMass, energy: Energy, shown: Polished | Diagnosis) -> "Certificate":
        """Return the record of a search or a diagnosis on all the data."""
        assert shown.newton_decrement is not None
        whole = tuple(name for name in energy.layout.names if name not in energy.layout.chosen)
        return cls(point, whole, shown.curvature, shown.newton_decrement)

    def is_of(self, point: PointMass) -> bool:
        """Return True if the record is about this mode of this U."""
        return point.change_since(self.point) is None

    def covers(self, energy: Energy, model: Callable[..., Any], latents: dict[str, Tensor]) -> bool:
        """Return True if the record holds for these data and this model; a minimum over more sites is one over fewer.

        Args:
            energy: U.
            model: the model, with every scale as it is written.
            latents: the mode, constrained.
        """
        return (
            set(energy.layout.names) <= set(self.sites)
            and same_data(self.point.data, energy.passes.checksum)
            and (self.point.model is None or not self.point.model.differences(model, latents))
        )

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values, for files."""
        return {**vars(self), "point": self.point.state()}

    @staticmethod
    def from_state(state: Mapping[str, Any] | None) -> "Certificate | None":
        """Return the object that :meth:`state` describes."""
        if state is None:
            return None
        return Certificate(**{**state, "point": PointMass.from_state(state["point"])})


def check_policy(unconverged: object) -> None:
    """Raise an error for an unknown policy for modes that are not minima.

    Raises:
        ArgumentError: it is none.
    """
    if unconverged not in ("refuse", "accept"):
        raise ArgumentError(f'unconverged must be "refuse" or "accept", not {unconverged!r}')


def check_mode(policy: str, method: Method, energy: Energy, known: Certificate | None) -> Diagnosis | None:
    r"""Check if the mode is a minimum; return the diagnosis if there was one.

    The Gaussian of the Hessian exists only at a minimum. The Gauss-Newton matrix is positive definite anywhere, and its
    Gaussian belongs to the linearised model, so there is only a warning if a lower bound shows that the minimum is more
    than one posterior standard deviation away (:math:`g^\top P^{-1} g > 1`). A mode that ``polish``, ``diagnose`` or an
    earlier fit has found to be a minimum of the same U on the same data is not checked again.

    Args:
        policy: ``"refuse"`` raises an error if the precision is the Hessian and the mode is not a minimum, or U has
            kinks (ReLU); ``"accept"`` checks only that U is finite and not random.
        method: represents the Gaussian.
        energy: U, of which the mode should be a minimum.
        known: an earlier record about it.

    Raises:
        UnconvergedError: by ``"refuse"``.
        ModelError: the model is random, or a latent NaN.
        NonFiniteError: U is NaN or infinite.
    """
    seen = None if known else sound(energy)
    if policy == "accept" or not method.needs_minimum:
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
            f"{type(method).__name__}, whose precision is the Hessian, needs a mode that is a minimum. {found}"
        )
        error.diagnosis = found
        raise error
    return found
