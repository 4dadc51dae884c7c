# SPDX-License-Identifier: Apache-2.0
"""The rule of prediction that a posterior was trained for: objectives record its name on their guide."""

import inspect
from contextlib import suppress
from typing import Any

__all__ = ["RULES", "note_trained_for", "trained_for"]

# None: trained neither by an objective of this library nor by ``fit``.
RULES = (None, "AtMean", "Moments", "Samples")
_ATTRIBUTE = "_pyro_dvi_trained_for"


def trained_for(guide: Any) -> str | None:
    """Return the name of the rule that the guide's objective trained it for, or None."""
    return getattr(_owner(guide), _ATTRIBUTE, None)


def note_trained_for(guide: Any, rule: str | None) -> None:
    """Record the name of a rule on a guide, below handlers around it."""
    if rule != trained_for(guide):
        with suppress(AttributeError):  # an object with slots
            setattr(_owner(guide), _ATTRIBUTE, rule)


def _owner(guide: Any) -> Any:
    inner = inspect.unwrap(guide)
    return getattr(inner, "__self__", inner)
