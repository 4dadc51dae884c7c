# SPDX-License-Identifier: Apache-2.0
"""Sites of a guide chosen by patterns of their names."""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from pyro_dvi.errors import ArgumentError

__all__ = ["sites_named"]


def sites_named(argument: str, patterns: str | Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the sites that fit a pattern, in their order.

    Args:
        argument: of the user's call, for the message.
        patterns: one or several.
        names: all sites.

    Raises:
        ArgumentError: a pattern fits none.
    """
    patterns = [patterns] if isinstance(patterns, str) else list(patterns)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ArgumentError(
                f"{argument} names {pattern!r}, which is no site of the guide; there are {names}"
            )
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)]
