# SPDX-License-Identifier: Apache-2.0
"""What can go wrong, by who has to act.

Every exception names the site, function or file that it is about and says what to do next. Each class also
derives from the built-in exception that a careful caller would already catch.
"""

import re
import sys
import warnings
from typing import Any

_LIBRARIES = {"contextlib", "functools", "pyro", "pyro_dvi", "torch"}


class PyroDviError(Exception):
    """Base class of everything that the library raises on purpose."""

    def __init__(self, *args: Any) -> None:
        # Pyro's trace makes errors that pass through it anew, with the shapes of all sites.
        super().__init__(
            *(re.sub(r"\s*Trace Shapes:[\s\S]*", "", a) if isinstance(a, str) else a for a in args)
        )


class ArgumentError(PyroDviError, ValueError):
    """An option has a value that it cannot have: zero epochs, a negative step size, a schedule out of order."""


class ModelError(PyroDviError, ValueError):
    """The model cannot be used this way: no observed site, a discrete latent, an unsuitable prior."""


class ParameterError(ModelError, ArithmeticError):
    """A distribution of the model refuses its parameters: a negative noise, or weights that have grown too large."""


class GuideError(PyroDviError, ValueError):
    """The guide does not fit the model or the objective: a dependent posterior, a site too few or too many."""


class DataError(PyroDviError, ValueError):
    """The data cannot be right: NaN, labels out of range, an empty loader, a minibatch without its scale."""


class DeviceError(PyroDviError, RuntimeError):
    """Data and parameters live on different devices."""


class UnsupportedError(PyroDviError, NotImplementedError):
    """A function, module or distribution for which no rule exists, named together with the way to add one."""


class NonFiniteError(PyroDviError, FloatingPointError):
    """A loss, gradient or variance became NaN or infinite.

    Where training stopped for it, ``history`` holds what was recorded until then, ``epoch`` and ``step`` say where.
    """

    history: Any = None
    epoch: int | None = None
    step: int | None = None


class NotPositiveDefiniteError(PyroDviError, ArithmeticError):
    """A matrix that has to be positive definite is not.

    Where a direction of zero or negative curvature was found, ``direction`` holds it, and ``curvature`` its Rayleigh
    quotient (or the eigenvalue that gave the matrix away).
    """

    def __init__(self, *args: Any, direction: Any = None, curvature: float | None = None) -> None:
        super().__init__(*args)
        self.direction, self.curvature = direction, curvature


class NotConvergedError(PyroDviError, ArithmeticError):
    """An iteration ended before it reached its tolerance; the message says how far it came."""


class UnconvergedError(NotConvergedError):
    """The mode of a Laplace approximation is no minimum: training, or ``guide.polish``, ended too early.

    ``diagnosis`` holds what ``guide.fit`` found out about it, ``report`` what ``guide.polish`` did.
    """

    diagnosis: Any = None
    report: Any = None


class CheckpointError(PyroDviError, RuntimeError):
    """A checkpoint is missing, foreign or does not fit the objects it should be loaded into."""


class DviWarning(UserWarning):
    """Something works but is probably not what was meant."""


def warn(message: str) -> None:
    """Warn at the line that called the library, however deep below it this is.

    That line is the innermost of no library, one of a model that is just being run, say.

    Example:
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn("the data set is small")
        >>> caught[0].category.__name__, str(caught[0].message)
        ('DviWarning', 'the data set is small')
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, DviWarning, stacklevel=level)
