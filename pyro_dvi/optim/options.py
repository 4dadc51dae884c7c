# SPDX-License-Identifier: Apache-2.0
"""What the options of optimizers may be."""

import inspect
import math
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

from torch.optim import Optimizer

from pyro_dvi.core.arguments import check_count, check_positive
from pyro_dvi.errors import ArgumentError

_NOT_HERE = {
    "weight_decay": "The Normal prior of the model plays its role: to_bayesian_(net, prior_scale=...).",
    "formulation": "VOGN and OGN have several formulations, this one has one.",
    "momentum": "Its decay rate is the first of betas.",
    "eps": "damping is what it adds to the denominator.",
}


def in_a_dictionary(constructor: type[Optimizer]) -> str:
    """Say where the options of the Pyro optimizer go that makes optimizers of a class of torch."""
    name = constructor.__name__
    pyro_name, module = name.removesuffix("Optimizer"), constructor.__module__.rpartition(".")[0]
    return (
        f"{pyro_name} is the optimizer for SVI, and takes a dictionary of options: {pyro_name}({{'lr': ...}}). Where a "
        "class of torch's optimizers is wanted, as in pyro.optim.ExponentialLR({'optimizer': ...}), or for elbo(model, "
        f"guide), use {module}.{name}."
    )


def check_optim_args(optim_args: Any, constructor: type[Optimizer]) -> None:
    """Check that the options of a Pyro optimizer are a dictionary, or a function that returns one.

    Raises:
        ArgumentError: something else was given.
    """
    if not (isinstance(optim_args, dict) or callable(optim_args)):
        raise ArgumentError(
            f"optim_args must be a dict of options, got {reprlib.repr(optim_args)}. {in_a_dictionary(constructor)}"
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Check the options that all natural-gradient optimizers have.

    Raises:
        ArgumentError: naming the first that is out of range.
    """
    optional = ("max_step", "initial_curvature", "total_steps")
    given = {name: value for name, value in options.items() if value is not None or name not in optional}
    for name in ("lr", "data_augmentation", "deterministic_lr", "max_step", "initial_curvature"):
        if name in given:
            check_positive(name, given[name])
    for name, least in (("warmup_steps", 0), ("total_steps", 1)):
        if name in given:
            check_count(name, given[name], least)
    betas, damping = options["betas"], options["damping"]
    if not (isinstance(betas, tuple | list) and len(betas) == 2 and all(_is_in(0, b, 1) for b in betas)):
        raise ArgumentError(
            f"betas must be two numbers in [0, 1), the decay rates of momentum and curvature as in (0.9, 0.999), got "
            f"{betas!r}"
        )
    if not _is_in(0, damping, math.inf):
        raise ArgumentError(f"damping must be a finite number of at least 0, got {damping!r}")


def refuse_unknown(optimizer: type, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Refuse options that an optimizer has not.

    Raises:
        ArgumentError: naming those that it has: the known ones, which all have, and its own.
    """
    for name in unknown:
        own = inspect.signature(optimizer).parameters.values()
        names = sorted({*known, *(one.name for one in own if one.kind is one.KEYWORD_ONLY)})
        advice = f" {_NOT_HERE[name]}" if name in _NOT_HERE else ""
        raise ArgumentError(
            f"{optimizer.__name__} has no option {name!r}.{advice} Its options are {', '.join(names)}."
        )


def _is_in(least: float, value: Any, end: float) -> bool:
    return isinstance(value, Real) and least <= float(value) < end
