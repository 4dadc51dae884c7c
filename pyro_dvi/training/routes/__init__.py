# SPDX-License-Identifier: Apache-2.0
"""The two ways to train, Pyro's SVI and an ELBOModule with a torch optimizer, behind one interface."""

from typing import Any

from pyro.infer import SVI
from pyro.infer.elbo import ELBOModule
from torch.optim import Optimizer

from pyro_dvi.errors import ArgumentError
from pyro_dvi.training.routes.base import Route
from pyro_dvi.training.routes.elbo_module import ModuleRoute
from pyro_dvi.training.routes.svi import SVIRoute

__all__ = ["ModuleRoute", "Route", "SVIRoute", "route_of"]


def route_of(target: Any, optimizer: Optimizer | None = None, *, train: bool = True) -> Route:
    """Choose the route for what was passed as ``svi``.

    Raises:
        ArgumentError: if it is neither an SVI nor an ELBOModule, or the optimizer is missing or superfluous.
    """
    if isinstance(target, SVI):
        if optimizer is not None:
            raise ArgumentError("An SVI brings its own optimizer; optimizer= is for elbo(model, guide).")
        return SVIRoute(target)
    if isinstance(target, ELBOModule):
        if optimizer is None and train:
            raise ArgumentError(
                "An ELBOModule needs a torch optimizer: fit(elbo(model, guide), loader, epochs, "
                "optimizer=torch.optim.Adam(parameter_groups(elbo(model, guide), base=1e-3)))."
            )
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise ArgumentError(
                "optimizer must be a torch.optim.Optimizer for an ELBOModule, got "
                f"{type(optimizer).__name__}. Pyro's optimizers go into pyro.infer.SVI."
            )
        return ModuleRoute(target, optimizer)
    raise ArgumentError(
        "Expected pyro.infer.SVI(model, guide, optim, loss), or elbo(model, guide) together with "
        f"optimizer=, got {type(target).__name__}."
    )
