# SPDX-License-Identifier: Apache-2.0
"""Check options that are objects, counts or positive: another thing in their place fails later, and misleads."""

import math
import reprlib
from numbers import Integral, Real
from typing import Any

from pyro_dvi.errors import ArgumentError


def check_choice(name: str, value: object, kind: type | tuple[type, ...], examples: str) -> None:
    """Refuse what is no object of a kind.

    Args:
        name: of the option.
        value: what was given.
        kind: the class that it has to be of, or several.
        examples: what to pass.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, kind):
        return
    hint = (
        f" itself: write {value.__name__}(...)" if isinstance(value, type) and issubclass(value, kind) else ""
    )
    what = f"the class {value.__name__}{hint}" if isinstance(value, type) else reprlib.repr(value)
    raise ArgumentError(f"{name} must be an object such as {examples}, not {what}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Refuse what is no whole number of things, or too few of them.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        what = "a positive whole number" if least == 1 else f"a whole number of at least {least}"
        raise ArgumentError(f"{name} must be {what}, not {reprlib.repr(value)}")


def check_positive(name: str, value: Any) -> None:
    """Refuse what is no finite number above zero.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 < float(value) < math.inf:
        raise ArgumentError(f"{name} must be a positive number, not {reprlib.repr(value)}")


def check_kl_weight(name: str, value: Any) -> None:
    """Refuse what is no finite number of zero or more.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise ArgumentError(
            f"{name} must be a finite number >= 0, not {reprlib.repr(value)}: as a weight of the KL divergence, 1 is "
            "the Bayesian posterior, smaller values temper it, 0 switches the prior off"
        )
