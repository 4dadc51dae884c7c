# SPDX-License-Identifier: Apache-2.0
"""The prediction rule that a guide was trained for, which its objective records on the guide."""

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

_ATTRIBUTE = "_pyro_dvi_trained_for"


def check_trainable(guide: Any, objective: Any) -> None:
    """Refuse an objective that would train nothing of a guide, or only a part.

    A guide says so by its method ``check_objective(objective)``, which raises; None stands for a function.

    Raises:
        GuideError: the guide refuses the objective.
    """
    getattr(guide, "check_objective", lambda _: None)(objective)


def trained_for(guide: Any) -> Any:
    """Return the rule that the guide's objective trained it for, or the name of one; None before training."""
    return getattr(_owner(guide), _ATTRIBUTE, None)


def note_trained_for(guide: Any, rule: Any) -> None:
    """Record a rule, or the name of one, on a guide, below handlers around it."""
    if rule != trained_for(guide):
        with suppress(AttributeError):  # an object with slots
            setattr(_owner(guide), _ATTRIBUTE, rule)


def encoded(rule: Any) -> Tensor:
    """Return the name of a rule as a tensor of one size, which all that handles states can copy and compare.

    Example:
        >>> decoded(encoded("AtMean"))
        'AtMean'
    """
    name = "" if rule is None else rule if isinstance(rule, str) else type(rule).__name__
    return torch.tensor(list(name.encode()[:64].ljust(64, b"\0")), dtype=torch.uint8)


def decoded(name: Tensor) -> str | None:
    """Return the name that :func:`encoded` was given."""
    return bytes(list(name)).rstrip(b"\0").decode() or None


def _owner(guide: Any) -> Any:
    inner = inspect.unwrap(guide)
    return getattr(inner, "__self__", inner)
