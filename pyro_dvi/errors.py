# SPDX-License-Identifier: Apache-2.0
"""Exceptions and warnings, grouped by who can fix the cause.

The message of every exception names the site, function or file concerned, and states a remedy. Each class also derives
from the built-in exception that callers would expect.
"""

import re
import sys
import warnings
from typing import Any

_LIBRARIES = {"contextlib", "functools", "pyro", "pyro_dvi", "torch"}


class PyroDviError(Exception):
    """Base class of all exceptions that the library raises deliberately."""

    def __init__(self, *args: Any) -> None:
        # Pyro's trace recreates errors that pass through it and appends the shapes of all sites.
        super().__init__(
            *(re.sub(r"\s*Trace Shapes:[\s\S]*", "", a) if isinstance(a, str) else a for a in args)
        )


class ArgumentError(PyroDviError, ValueError):
    """An argument has an invalid value, such as zero epochs or a negative step size."""


class ModelError(PyroDviError, ValueError):
    """The model cannot be used this way: it has no observed site, a discrete latent, or an unsuitable prior."""


class ParameterError(ModelError, ArithmeticError):
    """A distribution of the model rejects its parameters: a noise scale is negative, or weights are too large."""


class GuideError(PyroDviError, ValueError):
    """The guide does not fit the model or the objective: sites are dependent, missing or superfluous."""


class DataError(PyroDviError, ValueError):
    """The data are invalid: NaN values, labels out of range, an empty loader, or an unscaled minibatch."""


class UnsupportedError(PyroDviError, NotImplementedError):
    """No rule exists for a function, module or distribution; the message names it and explains how to add a rule."""


class MissingQuantityError(UnsupportedError, AttributeError):
    """A prediction lacks a quantity, such as class probabilities in regression; ``hasattr`` is then False."""


class CaptureError(PyroDviError, RuntimeError):
    """Captured training steps have gone on with an outdated value that the model reads; the message names the step."""


class NonFiniteError(PyroDviError, FloatingPointError):
    """A loss, gradient or variance became NaN or infinite.

    If the error ended training, ``epoch`` and ``step`` are those in which it occurred, and ``history`` is the record of
    training up to then.
    """

    history: Any = None
    epoch: int | None = None
    step: int | None = None


class NotPositiveDefiniteError(PyroDviError, ArithmeticError):
    """A matrix that must be positive definite is not.

    If a direction of zero or negative curvature was found, ``direction`` contains it. ``curvature`` is then the
    Rayleigh quotient of this direction, or the eigenvalue that revealed it.
    """

    def __init__(self, *args: Any, direction: Any = None, curvature: float | None = None) -> None:
        super().__init__(*args)
        self.direction, self.curvature = direction, curvature


class NotConvergedError(PyroDviError, ArithmeticError):
    """An iteration ended before it reached its tolerance; the message states the tolerance that it reached."""


class UnconvergedError(NotConvergedError):
    """The mode of a Laplace approximation is not a minimum: training, or ``guide.polish``, ended too early.

    ``guide.fit`` sets ``diagnosis``, and ``guide.polish`` sets ``report``.
    """

    diagnosis: Any = None
    report: Any = None


class CheckpointError(PyroDviError, RuntimeError):
    """A checkpoint is missing, invalid, or does not match the objects into which it is loaded."""


class MissingLibraryError(PyroDviError, ImportError):
    """A library that only some functions need is not installed; the message names the command that installs it."""


class DviWarning(UserWarning):
    """Something works but is probably not what the user intended."""


def warn(message: str) -> None:
    """Issue a ``DviWarning`` that points to a line of the user's code, however deeply the call is nested.

    This line is the innermost one outside this library, Pyro and torch, for example a line of the model.

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
