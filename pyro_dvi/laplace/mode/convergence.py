# SPDX-License-Identifier: Apache-2.0
"""What a fit does about a mode that is no minimum: a choice passed as an object."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, replace
from typing import Any

from pyro_dvi.core.arguments import check_choice, check_count, check_positive
from pyro_dvi.errors import UnconvergedError, warn
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.precision import GGN, Hessian
from pyro_dvi.laplace.methods.conjugate_gradient import ConjugateGradient
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method
from pyro_dvi.laplace.mode.certificate import Certificate
from pyro_dvi.laplace.mode.diagnosis import Diagnosis, diagnose, distance_by, look_at_kinks, sound


class Unconverged(ABC):
    """What to do about a mode that is no minimum."""

    @abstractmethod
    def look(
        self, wanted: Method, energy: Energy, known: Certificate | None
    ) -> tuple[Method, Diagnosis | None]:
        """Return the method to fit with, and what was seen of the mode; None: nobody looked.

        Args:
            wanted: the method that was asked for.
            energy: the U that the mode should be a minimum of.
            known: what was shown of it before.
        """


@dataclass(frozen=True)
class Accept(Unconverged):
    """Fit without looking whether the mode is a minimum.

    A random model, or a U that is NaN or infinite, is refused nevertheless. Methods with the Hessian also refuse one
    that is not positive definite, if they come across it.
    """

    def look(
        self, wanted: Method, energy: Energy, known: Certificate | None
    ) -> tuple[Method, Diagnosis | None]:
        """Return the method that was asked for."""
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
    not looked at again. Where U has kinks, as that of ReLU networks, no Hessian is taken for a precision.

    Args:
        tolerance: on the Newton decrement :math:`g^\top P^{-1} g`; see :meth:`~pyro_dvi.LaplaceGuide.diagnose`.
        steps: of the Lanczos recursion, and of conjugate gradients; up to 2 gradients of all data each.
    """

    tolerance: float = 1e-2
    steps: int = 200

    def __post_init__(self) -> None:
        check_positive("tolerance", self.tolerance)
        check_count("steps", self.steps)

    def look(
        self, wanted: Method, energy: Energy, known: Certificate | None
    ) -> tuple[Method, Diagnosis | None]:
        """Return the method that was asked for, and the diagnosis.

        Raises:
            UnconvergedError: the precision is the Hessian, and the mode no minimum, or U has kinks.
            ModelError: the model is random, or a latent NaN.
            NonFiniteError: U is NaN or infinite.
        """
        seen = None if known else sound(energy)
        if not wanted.needs_minimum:
            return wanted, None
        if not isinstance(wanted.curvature, Hessian):
            return wanted, seen
        if known and known.curvature == "Hessian" and known.decrement <= self.tolerance:
            return wanted, None
        found = look_at_kinks(energy)
        if not found.kinks:
            found = diagnose(energy, tolerance=self.tolerance, steps=self.steps)
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

    Args:
        tolerance: as for :class:`Refuse`.
        steps: likewise.
    """

    def _otherwise(self, wanted: Method, found: Diagnosis) -> Method:
        changed: Any = wanted
        other = replace(changed, curvature=GGN()) if _has_curvature(wanted) else ConjugateGradient(GGN())
        by = (
            "" if type(other) is type(wanted) else f", with {other!r} in the place of {type(wanted).__name__}"
        )
        warn(f"the Gauss-Newton matrix takes the place of the Hessian in this fit{by}. {found}")
        return other


def _has_curvature(method: Any) -> bool:
    """Whether the precision is a choice of the method."""
    return any(field.name == "curvature" and field.init for field in fields(method))


def warned_if_far(found: Diagnosis, posterior: LaplacePosterior, energy: Energy) -> Diagnosis:
    """Return what is known of the mode with the distance that the Gaussian shows, if that is not known yet.

    Warns:
        DviWarning: the minimum is more than a standard deviation away.
    """
    if found.newton_decrement is None:
        found = distance_by(posterior, found, energy.at(energy.start))
        if found.decrement_at_least > found.tolerance:
            warn(f"the Gaussian is put around a mode that is no minimum. {found}")
    return found


def chosen_policy(given: Unconverged | None) -> Unconverged:
    """Return what was given, ``Refuse()`` by default.

    Raises:
        ArgumentError: something else than an object was given.
    """
    if given is not None:
        check_choice("unconverged", given, Unconverged, "Refuse(), UseGGN() or Accept()")
    return given or Refuse()
