# SPDX-License-Identifier: Apache-2.0
"""Names of variables and dimensions: plates become dimensions, and unknown names are answered by close ones."""

import difflib
from collections.abc import Iterable, Sequence
from typing import Any

from pyro_dvi.errors import ArgumentError

__all__ = ["close_names", "listed", "plate_names", "safe_name"]


def safe_name(name: str) -> str:
    """Return the name without slashes, which would become groups of the file."""
    return name.replace("/", ".")


def close_names(name: object, names: Iterable[str]) -> list[str]:
    """Return the names most like ``name``; the first ten where none is."""
    known = list(names)
    return difflib.get_close_matches(str(name), known, n=3, cutoff=0.4) or known[:10]


def listed(option: str, names: str | Sequence[str]) -> list[str]:
    """Return one name or several as a list.

    Raises:
        ArgumentError: anything else.
    """
    found = [names] if isinstance(names, str) else names
    if not isinstance(found, (list, tuple)) or not all(isinstance(name, str) for name in found):
        raise ArgumentError(f"{option} is a name or a list of names, not {names!r}")
    return list(found)


def plate_names(node: Any, shape: Sequence[int]) -> list[str | None]:
    """Name the dimensions of a site's value after its plates.

    Args:
        node: the site in a trace of the model.
        shape: of its value.

    Returns:
        one entry a dimension, None where no plate is responsible.
    """
    names: list[str | None] = [None] * len(shape)
    for frame in node["cond_indep_stack"]:
        if not frame.vectorized:
            continue
        dim = frame.dim - len(node["fn"].event_shape)
        if len(shape) >= -dim and shape[dim] == frame.size:
            names[dim] = safe_name(frame.name)
    return names
