# SPDX-License-Identifier: Apache-2.0
"""What the options of natural-gradient optimizers may be."""

import inspect
import math
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

from pyro_dvi.choice import check_positive
from pyro_dvi.errors import ArgumentError

__all__ = ["check_options", "refuse_unknown"]

_NOT_HERE = {
    "weight_decay": "The Normal prior of the model plays its role: to_bayesian_(net, prior_scale=...).",
    "formulation": "VOGN and OGN have several formulations, this one has one.",
    "momentum": "Its decay rate is the first of betas.",
    "eps": "damping is what it adds to the denominator.",
}


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options that all these optimizers have.

    Raises:
        ArgumentError: naming the first that is out of range.
    """
    for name in ("lr", "data_augmentation", "deterministic_lr", "clip_radius", "initial_curvature"):
        value = options[name]
        if value is not None or name not in ("clip_radius", "initial_curvature"):
            check_positive(name, value)
    betas, damping = options["betas"], options["damping"]
    warmup_steps, total_steps = options["warmup_steps"], options["total_steps"]
    if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(map(_is_decay_rate, betas))):
        raise ArgumentError(
            f"betas must be two numbers in [0, 1), the decay rates of momentum and curvature as in (0.9, 0.999), got "
            f"{betas!r}"
        )
    if not (_is_finite(damping) and damping >= 0):
        raise ArgumentError(f"damping must be a finite number of at least 0, got {damping!r}")
    if not (_is_whole(warmup_steps) and warmup_steps >= 0):
        raise ArgumentError(f"warmup_steps must be a whole number of at least 0, got {warmup_steps!r}")
    if total_steps is not None and not (_is_whole(total_steps) and total_steps >= 1):
        raise ArgumentError(f"total_steps must be a whole number of at least 1, got {total_steps!r}")


def refuse_unknown(optimizer: type, unknown: Iterable[str]) -> None:
    """Refuse options that an optimizer has not.

    Raises:
        ArgumentError: naming those that it has.
    """
    for name in unknown:
        known = sorted(
            {
                parameter.name
                for base in optimizer.__mro__
                if base.__module__.startswith("pyro_dvi.") and "__init__" in vars(base)
                for parameter in inspect.signature(vars(base)["__init__"]).parameters.values()
                if parameter.kind is parameter.KEYWORD_ONLY
            }
        )
        advice = _NOT_HERE.get(name, "")
        raise ArgumentError(
            f"{optimizer.__name__} has no option {name!r}. {advice}{' ' if advice else ''}Its options are "
            f"{', '.join(known)}."
        )


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and math.isfinite(value)


def _is_decay_rate(value: Any) -> bool:
    return isinstance(value, Real) and 0 <= float(value) < 1


def _is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
