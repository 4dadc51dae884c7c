# SPDX-License-Identifier: Apache-2.0
"""Finding the rule of a distribution class in a table."""

import inspect
from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["Found", "find_rule"]


class Found(NamedTuple):
    """A rule, and the names of its parameters."""

    rule: Callable
    names: frozenset[str]


def find_rule(table: Mapping[type, Callable], family: type) -> Found | None:
    """Return the rule of the class, or of a parent whose density it has.

    Pyro's classes keep the name of torch's. Any other subclass may redefine the density, as NanMaskedNormal does, and
    is served only if it does not.

    Args:
        table: distribution class to rule.
        family: the class.
    """
    for parent in family.__mro__:
        if parent in table:
            density = getattr(family, "log_prob", None)
            if family.__name__ != parent.__name__ and density is not getattr(parent, "log_prob", None):
                return None
            names = inspect.signature(table[parent]).parameters
            return Found(table[parent], frozenset(names))
    return None
