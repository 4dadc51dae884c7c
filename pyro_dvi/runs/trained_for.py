# SPDX-License-Identifier: Apache-2.0
"""The prediction rule and temperature with which a guide was trained, recorded on the guide by its objective."""

import inspect
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dvi.core.file_format import FORMAT_VERSION, check_format_version

_RULE, _TEMPERATURE = "_pyro_dvi_trained_for", "_pyro_dvi_temperature"


def check_trainable(guide: Any, objective: Any) -> None:
    """Raise an error for an objective that would not train a guide, or would train only a part of it.

    The guide checks this in its method ``check_objective(objective)``; if the loss is a function, the argument is None.

    Raises:
        GuideError: if the guide rejects the objective.
    """
    check = getattr(
        type(guide), "check_objective", None
    )  # of the class, because a failed look into a module is slow
    if check is not None:
        check(guide, objective)


def trained_for(guide: Any) -> Any:
    """Return the prediction rule, or its name, for which the guide was trained; None before training."""
    return getattr(_owner(guide), _RULE, None)


def temperature_of(guide: Any) -> float:
    """Return the temperature at which the guide was trained; 1 before training."""
    return float(getattr(_owner(guide), _TEMPERATURE, 1.0))


def note_trained_for(guide: Any, rule: Any, temperature: float = 1.0) -> None:
    """Record a rule (or its name) and a temperature on a guide; if handlers wrap the guide, on the guide itself."""
    owner = _owner(guide)
    if (rule, temperature) != (getattr(owner, _RULE, None), getattr(owner, _TEMPERATURE, 1.0)):
        with suppress(AttributeError):  # raised by an object with slots
            setattr(owner, _RULE, rule)
            setattr(owner, _TEMPERATURE, temperature)


def encoded(rule: Any, temperature: float = 1.0) -> Tensor:
    """Return format version, rule name and temperature as one tensor, so that a ``state_dict`` can copy and compare it.

    Example:
        >>> decoded(encoded("AtMean", 0.1))
        ('AtMean', 0.1)
    """
    name = "" if rule is None else rule if isinstance(rule, str) else type(rule).__name__
    text = f"{FORMAT_VERSION} {name[:32]} {temperature!r}"
    return torch.tensor(list(text.encode()[:64].ljust(64, b"\0")), dtype=torch.uint8)


def decoded(state: Tensor) -> tuple[str | None, float]:
    """Return the name of the rule and the temperature that :func:`encoded` has encoded.

    Raises:
        CheckpointError: if the state was written by a later release.
    """
    version, _, rest = bytes(list(state)).rstrip(b"\0").decode().partition(" ")
    check_format_version("the state of the guide", int(version))
    name, _, temperature = rest.partition(" ")
    return name or None, float(temperature)


def _owner(guide: Any) -> Any:
    if isinstance(guide, nn.Module):
        return guide
    inner = inspect.unwrap(guide)
    return getattr(inner, "__self__", inner)
