# SPDX-License-Identifier: Apache-2.0
"""The record that a mode is a minimum, and policies of a fit around a mode that is none."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import Tensor

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.errors import UnconvergedError, warn
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.passes import same_data
from pyro_dvi.laplace.energy.precision import GGN, Hessian
from pyro_dvi.laplace.fitted import PointMass
from pyro_dvi.laplace.methods.conjugate_gradient import ConjugateGradient
from pyro_dvi.laplace.methods.method import Method
from pyro_dvi.laplace.mode.diagnosis import Diagnosis, diagnose, kinks, sound
from pyro_dvi.laplace.mode.search import GOOD_ENOUGH, Polished


@dataclass(frozen=True)
class Certificate:
    r"""A record that a mode is a minimum, or stationary; any move of the mode ends it.

    Attributes:
        point: the mode, and the U that it belongs to, with its data and its model.
        sites: the sites of which all entries varied.
        curvature: ``"Hessian"`` for a minimum with a positive definite Hessian; ``"GGN"`` where there is only no slope.
        decrement: :math:`g^\top P^{-1} g` with that matrix, from above.
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


Decision = tuple[Method, Diagnosis | None]
"""The method to fit with, and the findings about the mode; None if it was not examined."""


class Unconverged(ABC):
    """A policy for modes that are no minimum."""

    @abstractmethod
    def look(self, wanted: Method, energy: Energy, known: Certificate | None) -> Decision:
        """Return the method to fit with, and the findings about the mode; None if it was not examined.

        Args:
            wanted: the requested method.
            energy: U, of which the mode should be a minimum.
            known: an earlier record about the mode.
        """


@dataclass(frozen=True)
class Accept(Unconverged):
    """Fit without a check that the mode is a minimum.

    A random model, or a U that is NaN or infinite, is refused nevertheless. Methods with the Hessian also refuse a
    matrix that they find not to be positive definite.
    """

    def look(self, wanted: Method, energy: Energy, known: Certificate | None) -> Decision:
        """Return the requested method."""
        if not known:
            sound(energy)
        return wanted, None


@dataclass(frozen=True)
class Refuse(Unconverged):
    r"""Raise an error where the precision is the Hessian, whose Gaussian exists at a minimum only.

    The Gauss-Newton matrix is positive definite anywhere, and its Gaussian belongs to the linearised model, so that
    there a warning is enough; it is given where a lower bound shows that the minimum is more than one posterior
    standard deviation away (:math:`g^\top P^{-1} g > 1`).

    A mode that ``polish``, ``diagnose`` or an earlier fit has found to be a minimum of the same U on the same data is
    not examined again. Where U has kinks, as for ReLU networks, the Hessian is refused as a precision.
    """

    def look(self, wanted: Method, energy: Energy, known: Certificate | None) -> Decision:
        """Return the requested method, and the diagnosis.

        Raises:
            UnconvergedError: the precision is the Hessian, and the mode no minimum, or U has kinks.
            ModelError: the model is random, or a latent NaN.
            NonFiniteError: U is NaN or infinite.
        """
        seen = None if known else sound(energy)
        if not wanted.needs_minimum:
            return wanted, None
        if not isinstance(wanted.precision, Hessian):
            return wanted, seen
        if known and known.curvature == "Hessian" and known.decrement <= GOOD_ENOUGH:
            return wanted, None
        found = Diagnosis(kinks=kinks(energy))
        if not found.kinks:
            found = diagnose(energy)
            if found.converged:
                return wanted, found
        return self._otherwise(wanted, found), found

    def _otherwise(self, wanted: Method, found: Diagnosis) -> Method:
        way = "fit(..., unconverged=UseGGN()) takes the Gauss-Newton matrix instead."
        error = UnconvergedError(
            f"{type(wanted).__name__}, whose precision is the Hessian, needs a mode that is a minimum. {found}\n{way}"
        )
        error.diagnosis = found
        raise error


@dataclass(frozen=True)
class UseGGN(Refuse):
    """Take the Gauss-Newton matrix in place of the Hessian, with a warning.

    Methods that know no other matrix than the Hessian, such as ``HessianFree()``, give way to ``ConjugateGradient()``.
    """

    def _otherwise(self, wanted: Method, found: Diagnosis) -> Method:
        changed: Any = wanted
        is_option = any(option.name == "precision" and option.init for option in fields(changed))
        other = replace(changed, precision=GGN()) if is_option else ConjugateGradient(GGN())
        by = "" if is_option else f", with {other!r} in the place of {type(wanted).__name__}"
        warn(f"the Gauss-Newton matrix takes the place of the Hessian in this fit{by}. {found}")
        return other


def chosen_policy(given: Unconverged | None) -> Unconverged:
    """Return the given policy, ``Refuse()`` by default.

    Raises:
        ArgumentError: it is not a policy object.
    """
    if given is not None:
        check_choice("unconverged", given, Unconverged, "Refuse(), UseGGN() or Accept()")
    return given or Refuse()
