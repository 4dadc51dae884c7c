# SPDX-License-Identifier: Apache-2.0
"""What went bad when a loss is not finite."""

import math
from typing import Any

import torch

from pyro_dvi.batches import non_finite_inputs
from pyro_dvi.handlers.explained import non_finite
from pyro_dvi.training.routes import Route

__all__ = ["diagnose", "non_finite_tensors"]


def non_finite_tensors(route: Route) -> list[str]:
    """Names of parameters and buffers that should be finite and are not."""
    # Copies of weights are detached and do not say whether they are trained.
    parameters = {f"parameter {name}": value for name, value in route.parameters().items()}
    return non_finite({**route.tensors(), **parameters})


def diagnose(route: Route, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Name what is not finite among inputs, state, terms and gradients, causes before effects, and the way out."""
    inputs = non_finite_inputs(args, kwargs)
    tensors = non_finite_tensors(route)
    parameters = [name.removeprefix("parameter ") for name in tensors if name.startswith("parameter ")]
    buffers = [name.removeprefix("buffer ") for name in tensors if name.startswith("buffer ")]
    terms = [
        f"{name}={float(value):g}"
        for name, value in getattr(route.elbo, "terms", {}).items()
        if name != "loss" and not math.isfinite(float(value))
    ]
    gradients = [
        name
        for name, value in route.parameters().items()
        if value.grad is not None and not bool(torch.isfinite(value.grad).all())
    ]
    findings = [
        ("inputs of this batch", inputs),
        ("parameters", parameters),
        ("buffers", buffers),
        ("terms of the loss", terms),
        # The gradients of a loss that is not finite are bad as a matter of course.
        ("gradients", [] if inputs or parameters or terms else gradients),
    ]
    text = "; ".join(f"{what}: {_shortened(names)}" for what, names in findings if names)
    found = f"Not finite: {text}."
    if not text:
        sizes = {
            name: float(value.detach().abs().max())
            for name, value in route.parameters().items()
            if value.numel()
        }
        largest = max(sizes, key=sizes.__getitem__, default="none")
        found = (
            "Inputs, parameters and the known terms of the loss are finite; the largest parameter is "
            f"{largest} (up to {sizes.get(largest, 0.0):.3g})."
        )
    if inputs:
        return f"{found} Drop or mask those values."
    return (
        f"{found} Lower the learning rate (that of posterior scales first: scale_multiplier), warm up the KL weight, "
        "clip gradients (ClippedAdam), or train in float64."
    )


def _shortened(names: list[str], limit: int = 5) -> str:
    rest = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + rest
