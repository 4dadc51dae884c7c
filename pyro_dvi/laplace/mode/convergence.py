# SPDX-License-Identifier: Apache-2.0
"""What a fit does about a mode that is no minimum: a choice passed as an object."""

import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from pyro_dvi.choice import check_count, check_positive
from pyro_dvi.errors import DataError, DviWarning, ModelError, UnconvergedError
from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.precision import GGN, Hessian
from pyro_dvi.laplace.methods.conjugate_gradient import ConjugateGradient
from pyro_dvi.laplace.methods.posterior import Method
from pyro_dvi.laplace.mode.diagnosis import Diagnosis, diagnose, glance

__all__ = ["Accept", "Refuse", "Unconverged", "UseGGN"]


class Unconverged(ABC):
    """What to do about a mode that is no minimum."""

    @abstractmethod
    def method(self, wanted: Method, energies: Sequence[Energy]) -> Method:
        """Return the method to fit with.

        Args:
            wanted: the method that was asked for.
            energies: U as it is to be fitted; also U as it was trained, if that is another one: the mode may be a
                minimum of either.
        """


@dataclass(frozen=True)
class Accept(Unconverged):
    """Do not look. Methods with the Hessian still refuse one that is not positive definite, if they come across it."""

    def method(self, wanted: Method, energies: Sequence[Energy]) -> Method:
        """Return the method that was asked for."""
        return wanted


@dataclass(frozen=True)
class Refuse(Unconverged):
    r"""Raise an error where the precision is the Hessian, whose Gaussian exists at a minimum only.

    The Gauss-Newton matrix is positive definite anywhere, and its Gaussian belongs to the linearised model, so that
    there a warning is enough; it is given where a cheap lower bound shows that the minimum is more than one posterior
    standard deviation away (:math:`g^\top P^{-1} g > 1`).

    Args:
        tolerance: on the Newton decrement :math:`g^\top P^{-1} g`; see :meth:`~pyro_dvi.LaplaceGuide.diagnose`.
        steps: of the Lanczos recursion; up to 4 gradients of all data each.
    """

    tolerance: float = 1e-2
    steps: int = 100

    def __post_init__(self) -> None:
        check_positive("tolerance", self.tolerance)
        check_count("steps", self.steps)

    def method(self, wanted: Method, energies: Sequence[Energy]) -> Method:
        """Return the method that was asked for.

        Raises:
            UnconvergedError: the precision is the Hessian, and the mode no minimum.
        """
        if not wanted.needs_minimum:
            return wanted
        if not isinstance(wanted.curvature, Hessian):
            _warn_if_far(energies)
            return wanted
        found = _best([diagnose(energy, tolerance=self.tolerance, steps=self.steps) for energy in energies])
        return wanted if found.converged else self._otherwise(wanted, found)

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
        if found.randomness or found.non_finite:
            return super()._otherwise(wanted, found)
        changed: Any = wanted
        other = replace(changed, curvature=GGN()) if _has_curvature(wanted) else ConjugateGradient(GGN())
        by = (
            "" if type(other) is type(wanted) else f", with {other!r} in the place of {type(wanted).__name__}"
        )
        warnings.warn(
            f"the Gauss-Newton matrix takes the place of the Hessian in this fit{by}. {found}",
            DviWarning,
            stacklevel=4,
        )
        return other


def _has_curvature(method: Any) -> bool:
    """Whether the precision is a choice of the method."""
    return any(field.name == "curvature" and field.init for field in fields(method))


def _warn_if_far(energies: Sequence[Energy]) -> None:
    found = _best([glance(energy) for energy in energies])
    if found.non_finite:
        raise DataError(found.verdict)
    if found.randomness:
        raise ModelError(found.verdict)
    if found.newton_decrement is not None and not found.near:
        warnings.warn(
            f"the Gaussian is put around a mode that is no minimum. {found}", DviWarning, stacklevel=4
        )


def _best(found: list[Diagnosis]) -> Diagnosis:
    """Return the first that is converged, else the first."""
    return next((d for d in found if d.converged or d.near), found[0])
