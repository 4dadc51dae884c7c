# SPDX-License-Identifier: Apache-2.0
"""Metrics between two epochs, without a trace in the training."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pyro_dvi.core.batches import batches, with_rows
from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.training.random_state import preserve_random_state
from pyro_dvi.training.routes import Route


def validation_metrics(
    route: Route, validate: Callable[[], Any] | Iterable[Any], device: torch.device | None
) -> dict[str, float]:
    """Evaluate a callable's metrics, or the mean loss over a loader, in evaluation mode.

    A loss is that of the data set it is an estimate for: with a plate of N training examples, every validation batch
    of M examples is scaled by N/M, and batches count by their size.

    Raises:
        ArgumentError: if the callable returns neither a number nor a mapping of numbers.
        DataError: if the loader is empty.
    """
    with _preserved_modes(route) as parts, preserve_random_state(validate):
        for part in parts:
            part.eval()
        if callable(validate):
            return _as_metrics(validate())
        total = weight = 0.0
        for args, kwargs in batches(validate, device):
            rows = with_rows((*args, *kwargs.values()))
            size = 1 if rows is None else len(rows)
            total, weight = total + size * route.evaluate(args, kwargs), weight + size
        if not weight:
            raise DataError("validate: the loader yielded no batch.")
        return {"loss": total / weight}


@contextmanager
def training_mode(route: Route) -> Iterator[None]:
    """Train what is in evaluation mode as a whole; a module that is frozen within a training model stays frozen."""
    with _preserved_modes(route) as parts:
        for part in parts:
            if not part.training:
                part.train()
        yield


@contextmanager
def _preserved_modes(route: Route) -> Iterator[list[nn.Module]]:
    """Give model, guide and what they call, and put each of their modules back into its own mode afterwards."""
    parts = [*route.modules().values(), *route.loose_modules]
    modes = [(module, module.training) for part in parts for module in part.modules()]
    try:
        yield parts
    finally:
        for module, training in modes:
            module.training = training


def _as_metrics(result: Any) -> dict[str, float]:
    metrics = result if isinstance(result, Mapping) else {"loss": result}
    try:
        return {str(name): float(value) for name, value in metrics.items()}
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"validate must return a number or a mapping from names to numbers, got {type(result).__name__} ({error})."
        ) from error
