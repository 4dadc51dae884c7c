# SPDX-License-Identifier: Apache-2.0
"""A state of training kept in memory, to go back to."""

import copy
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.training.routes import Route

__all__ = ["Snapshot", "copy_weights", "restore_weights"]


def copy_weights(route: Route) -> dict[str, Tensor]:
    """Copy parameters and buffers, by name."""
    return {name: tensor.clone() for name, tensor in route.tensors().items()}


def restore_weights(route: Route, weights: dict[str, Tensor]) -> None:
    """Write ``weights`` into the tensors that exist, so that optimizers and Pyro's store still hold them."""
    current = route.tensors()
    with torch.no_grad():
        for name, value in weights.items():
            if name in current:
                current[name].copy_(value)


class Snapshot:
    """Weights, optimizer and ELBO at the end of an epoch.

    Args:
        route: what is being trained.
        epoch: the epoch that has just ended; 0 before the first.
    """

    def __init__(self, route: Route, epoch: int) -> None:
        self.epoch = epoch
        self._weights = copy_weights(route)
        self._optimizer = copy.deepcopy(route.optimizer_state())
        self._elbo: Any = None
        if hasattr(route.elbo, "state_dict"):
            self._elbo = copy.deepcopy(route.elbo.state_dict())

    def restore_weights(self, route: Route) -> None:
        """Put parameters and buffers back."""
        restore_weights(route, self._weights)

    def restore(self, route: Route) -> None:
        """Put everything back, and drop the gradients of the step that failed."""
        self.restore_weights(route)
        route.load_optimizer_state(self._optimizer)
        if self._elbo is not None:
            route.elbo.load_state_dict(copy.deepcopy(self._elbo))
        for parameter in route.parameters().values():
            parameter.grad = None
