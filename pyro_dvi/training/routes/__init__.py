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

__all__ = ["ModuleRoute", "Route", "SVIRoute", "check_target", "route_of"]


def check_target(target: Any) -> None:
    """Refuse what is neither an SVI nor an ELBOModule, and an SVI whose loss is a class.

    Raises:
        ArgumentError: with the lines to write.
    """
    loss = target.loss if isinstance(target, SVI) else None
    if isinstance(loss, type):
        raise ArgumentError(f"The loss of the SVI is the class {loss.__name__}: write loss={loss.__name__}()")
    if not isinstance(target, SVI | ELBOModule):
        raise ArgumentError(
            "Expected pyro.infer.SVI(model, guide, optim, loss), or elbo(model, guide) together with optimizer=, got "
            f"{type(target).__name__}. Write\n"
            "    svi = SVI(model, guide, dvi.optim.Adam(dvi.learning_rates(1e-2)), loss=dvi.TaylorELBO())\n"
            "    dvi.fit(svi, loader, epochs=20)"
        )


def route_of(target: Any, optimizer: Optimizer | None = None, *, train: bool = True) -> Route:
    """Choose the route for what was passed as ``svi``.

    Raises:
        ArgumentError: if :func:`check_target` refuses it, or the optimizer is missing or superfluous.
    """
    check_target(target)
    if isinstance(target, SVI):
        if optimizer is not None:
            raise ArgumentError("An SVI brings its own optimizer; optimizer= is for elbo(model, guide).")
        return SVIRoute(target)
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
