# SPDX-License-Identifier: Apache-2.0
"""The two targets of training: Pyro's SVI, and an ELBOModule with a torch optimizer."""

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import pyro
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuide
from pyro.infer.elbo import ELBO, ELBOModule
from pyro.infer.util import zero_grads
from torch import Tensor
from torch.optim import Optimizer

from pyro_dvi.errors import ArgumentError, GuideError, UnsupportedError
from pyro_dvi.objectives.recorded_step import Outcome
from pyro_dvi.optim.joint_optim import JointOptim, load_state, torch_optimizer
from pyro_dvi.optim.learning_rates import check_parts, is_uninitialised
from pyro_dvi.training.routes import Route, finite


class SVIRoute(Route):
    """Training with :class:`pyro.infer.SVI` under Pyro's global parameter store."""

    kind = "SVI"

    def __init__(self, svi: SVI) -> None:
        if pyro.settings.get("module_local_params"):
            raise UnsupportedError(
                "pyro.infer.SVI does not work with module_local_params=True. Train elbo(model, guide): "
                "fit(elbo(model, guide), loader, epochs, optimizer=torch.optim.Adam(parameter_groups(...)))."
            )
        self.svi = svi
        owner = getattr(svi.loss, "__self__", None)
        elbo = owner if isinstance(owner, ELBO) else None
        super().__init__(svi.model, svi.guide, elbo, svi.loss, svi.optim)

    def _takes_outcomes(self) -> bool:
        return type(self.svi).step is SVI.step and self.svi.loss_and_grads == self.elbo.loss_and_grads

    def _update(self, outcome: Outcome) -> None:
        outcome.hand_over()
        store = pyro.get_param_store()
        parameters = [store._params[name] for name in outcome.names]
        self.svi.optim(parameters)
        zero_grads(parameters)

    def _ordinary_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Take a step like ``svi.step``, but check the loss before the update.

        After the update, a NaN would have spread to all parameters, so its cause could not be reported.
        """
        svi = self.svi
        if type(svi).step is not SVI.step:  # a subclass with its own steps
            return finite(svi.step(*args, **kwargs))
        with poutine.trace(param_only=True) as capture, self._observed(args, kwargs):
            loss = svi.loss_and_grads(self._trained_model(args, kwargs), svi.guide, *args, **kwargs)
        # If a loss that is not an ELBO has a gradient, Pyro differentiates it; otherwise Pyro silently does nothing.
        by_pyro = getattr(svi.loss_and_grads, "__qualname__", "").startswith("SVI.")
        if by_pyro and not getattr(loss, "requires_grad", False):
            raise ArgumentError(
                f"The loss of the SVI, {svi.loss!r}, has no gradient. Write loss=elbo instead of loss=elbo.loss. A "
                "loss function of your own must return a tensor that depends on the parameters."
            )
        value = finite(loss)
        sites: Any = capture.trace.nodes.values()
        parameters = {site["value"].unconstrained() for site in sites}
        svi.optim(parameters)
        zero_grads(parameters)
        return value

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state by parameter name, including loaded states of parameters that no step has updated yet."""
        return {**self.svi.optim._state_waiting_to_be_consumed, **self.svi.optim.get_state()}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load the state, even for parameters that were already updated, which Pyro's ``set_state`` leaves out."""
        optim, state, store = self.svi.optim, copy.deepcopy(state), pyro.get_param_store()
        self._rate = None
        for parameter, held in () if isinstance(optim, JointOptim) else optim.optim_objs.items():
            own = state.pop(store.param_name(parameter) or "", None)
            if own is not None:
                load_state(held, own)
        optim.set_state(state)

    def optimizer_groups(self) -> Iterator[tuple[str, Optimizer, int]]:
        """Yield the groups of the torch optimizers, for parameters that a step has updated."""
        store = pyro.get_param_store()
        for parameter, optimizer in self.svi.optim.optim_objs.items():
            name = (store.param_name(parameter) or "").replace("$$$", ".")
            yield name, torch_optimizer(optimizer), 0

    def store_parameters(self) -> dict[str, Tensor]:
        """Return the store's parameters that this SVI has updated.

        If the model or the guide is a function and no step has been taken yet, return all parameters in the store.
        Parameters of modules are left out in both cases.
        """
        modules = self.modules()
        owned = {id(parameter) for part in modules.values() for parameter in part.parameters()}
        stepped = {id(parameter) for parameter in self.svi.optim.optim_objs}
        everything = len(modules) < 2 and not stepped
        return {
            name: value
            for name, value in pyro.get_param_store().named_parameters()
            if id(value) not in owned and (everything or id(value) in stepped)
        }


class ModuleRoute(Route):
    """Training of an :class:`~pyro.infer.elbo.ELBOModule` with a torch optimizer.

    Raises:
        GuideError: if the optimizer lacks parameters that are to be trained.
    """

    kind = "ELBOModule"

    def __init__(self, module: ELBOModule, optimizer: Any, train: bool) -> None:
        super().__init__(module.model, module.guide, module.elbo, module.elbo.loss, optimizer)  # type: ignore[attr-defined]
        self.module = module
        check_parts(module)
        held = {name for name, *_ in self.optimizer_groups()} if train else set()
        missing = [name for name, p in self.parameters().items() if p.requires_grad and name not in held]
        uninitialised = isinstance(self.guide, AutoGuide) and is_uninitialised(self.guide)
        if train and (missing or uninitialised):
            what = ", ".join(missing[:5]) or f"those of {type(self.guide).__name__}, which has none yet"
            raise GuideError(
                f"The optimizer lacks {len(missing) or 'the'} parameters of the model and guide: {what}. Call "
                "guide(*batch) before you build the optimizer, or freeze parameters with requires_grad_(False)."
            )

    def _takes_outcomes(self) -> bool:
        own = vars(self.module)
        return not any(own[name] for name in own if name.endswith("hooks"))

    def _update(self, outcome: Outcome) -> None:
        self.steered.zero_grad(set_to_none=True)
        outcome.hand_over()
        self.steered.step()

    def _ordinary_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Take a training step in the usual torch way."""
        self.steered.zero_grad(set_to_none=True)
        with self._observed(args, kwargs):
            model = self._trained_model(args, kwargs)
            own = model is self.model
            loss = (self.module if own else partial(self.elbo.differentiable_loss, model, self.guide))(
                *args, **kwargs
            )
        value = finite(loss)
        loss.backward()
        self.steered.step()
        return value

    def optimizer_state(self) -> dict[str, Any]:
        """Return the state of the torch optimizer."""
        return {} if self.steered is None else self.steered.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load ``state`` into the torch optimizer."""
        self.steered.load_state_dict(copy.deepcopy(state))

    def optimizer_groups(self) -> Iterator[tuple[str, Optimizer, int]]:
        """Yield the groups of the torch optimizer."""
        held = {id(p): i for i, group in enumerate(self.steered.param_groups) for p in group["params"]}
        for name, parameter in self.parameters().items():
            if id(parameter) in held:
                yield name, self.steered, held[id(parameter)]


def route_of(target: Any, optimizer: Optimizer | None = None, *, train: bool = True) -> Route:
    """Return the route of an SVI or ELBOModule; a route is returned unchanged.

    Raises:
        ArgumentError: if ``target`` is neither an SVI nor an ELBOModule, if the loss of the SVI is a class, or if the
            optimizer is missing or superfluous.
    """
    if isinstance(target, Route):
        return target
    loss = target.loss if isinstance(target, SVI) else None
    if isinstance(loss, type):
        raise ArgumentError(f"The loss of the SVI is the class {loss.__name__}: write loss={loss.__name__}()")
    if not isinstance(target, SVI | ELBOModule):
        raise ArgumentError(
            f"Expected SVI(model, guide, optimizer, loss), or elbo(model, guide), not {type(target).__name__}"
        )
    if isinstance(target, SVI):
        if optimizer is not None:
            raise ArgumentError(
                "An SVI has its own optimizer; optimizer= can only be passed for elbo(model, guide)."
            )
        return SVIRoute(target)
    if not isinstance(optimizer, Optimizer) and (train or optimizer is not None):
        raise ArgumentError(
            "An ELBOModule needs a torch optimizer, such as torch.optim.Adam(parameter_groups(elbo(model, guide), "
            f"base=1e-3)), not {type(optimizer).__name__}. Pyro's optimizers work only with pyro.infer.SVI."
        )
    return ModuleRoute(target, optimizer, train)
