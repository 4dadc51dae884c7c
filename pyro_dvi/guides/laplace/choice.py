# SPDX-License-Identifier: Apache-2.0
"""Check options that are objects: a class or a string in their place fails much later, with an error that misleads."""

import reprlib
from typing import Any

from pyro_dvi.errors import ArgumentError

__all__ = ["check_choice", "check_count"]


def check_choice(name: str, value: object, kind: type, examples: str) -> None:
    """Refuse what is no object of a kind.

    Args:
        name: of the option.
        value: what was given.
        kind: the class that it has to be of.
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


def check_count(name: str, value: Any) -> None:
    """Refuse what is no positive whole number.

    Raises:
        ArgumentError: it is something else.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{name} must be a positive whole number, not {reprlib.repr(value)}")
