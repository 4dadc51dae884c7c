# SPDX-License-Identifier: Apache-2.0
"""What went bad when a loss is not finite."""

import math
from typing import Any

import torch

from pyro_dvi.training.batches import non_finite_inputs
from pyro_dvi.training.routes import Route

__all__ = ["diagnose", "non_finite_parameters"]


def non_finite_parameters(route: Route) -> list[str]:
    """Names of parameters that hold NaN or infinities."""
    return [name for name, value in route.parameters().items() if not bool(torch.isfinite(value).all())]


def diagnose(route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name the inputs, parameters, terms and gradients that are not finite, causes before effects."""
    parameters = non_finite_parameters(route)
    gradients = [
        name
        for name, value in route.parameters().items()
        if value.grad is not None and not bool(torch.isfinite(value.grad).all())
    ]
    terms = [
        f"{name}={float(value):g}"
        for name, value in getattr(route.elbo, "terms", {}).items()
        if name != "loss" and not math.isfinite(float(value))
    ]
    findings = [
        ("inputs of this batch", non_finite_inputs(args, kwargs)),
        ("parameters", parameters),
        ("terms of the loss", terms),
        # Gradients of a loss that is not finite are all bad; they only tell something while all else is fine.
        ("gradients", [] if parameters or terms else gradients),
    ]
    text = "; ".join(f"{what}: {_shortened(names)}" for what, names in findings if names)
    return (
        f"Not finite: {text}." if text else "Inputs, parameters and the known terms of the loss are finite."
    )


def _shortened(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
