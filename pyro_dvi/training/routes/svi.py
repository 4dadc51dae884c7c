# SPDX-License-Identifier: Apache-2.0
"""Training by Pyro's SVI."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pyro
from pyro.infer import SVI
from pyro.infer.elbo import ELBO
from torch import Tensor
from torch.optim import Optimizer

from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.optim.joint_optim import JointOptim, load_state, torch_optimizer
from pyro_dvi.training.routes.base import Route, finite


class SVIRoute(Route):
    """Training by :class:`pyro.infer.SVI` under Pyro's global parameter store."""

    kind = "SVI"

    def __init__(self, svi: SVI) -> None:
        if pyro.settings.get("module_local_params"):
            raise UnsupportedError(
                "pyro.infer.SVI does not work with pyro.settings module_local_params=True: its optimizers "
                "look parameters up in the global store. Train elbo(model, guide) with a torch optimizer "
                "instead: fit(elbo(model, guide), loader, epochs, "
                "optimizer=torch.optim.Adam(parameter_groups(...)))."
            )
        self.svi = svi
        owner = getattr(svi.loss, "__self__", None)
        super().__init__(svi.model, svi.guide, owner if isinstance(owner, ELBO) else None, svi.optim)

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Take a step with ``svi.step``."""
        with _checked_before_update(self.svi):
            loss = self.svi.step(*args, **kwargs)
        return finite(loss)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Evaluate with ``svi.evaluate_loss``."""
        return float(self.svi.evaluate_loss(*args, **kwargs))

    def optimizer_state(self) -> dict[str, Any]:
        """State per parameter name, with what a load left for parameters that are still to be stepped."""
        return {**self.svi.optim._state_waiting_to_be_consumed, **self.svi.optim.get_state()}

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load at once for parameters that were stepped before; the ``set_state`` of Pyro's own never reaches those."""
        optim, state, store = self.svi.optim, copy.deepcopy(state), pyro.get_param_store()
        self._rate = None
        for parameter, held in () if isinstance(optim, JointOptim) else optim.optim_objs.items():
            own = state.pop(store.param_name(parameter) or "", None)
            if own is not None:
                load_state(held, own)
        optim.set_state(state)

    @property
    def optimizer_name(self) -> str:
        """Names of the torch classes inside the Pyro optimizer."""
        optim = self.svi.optim
        parts = (getattr(optim, "pt_scheduler_constructor", None), optim.pt_optim_constructor)
        return " of ".join(
            getattr(part, "__name__", type(part).__name__) for part in parts if part is not None
        )

    def optimizer_groups(self) -> Iterator[tuple[str, Optimizer, int]]:
        """The groups of the torch optimizers of parameters that were stepped."""
        store = pyro.get_param_store()
        for parameter, optimizer in self.svi.optim.optim_objs.items():
            name = (store.param_name(parameter) or "").replace("$$$", ".")
            yield name, torch_optimizer(optimizer), 0

    def store_parameters(self) -> dict[str, Tensor]:
        """Parameters that this SVI has stepped; the whole store where functions have taken no step yet."""
        store = pyro.get_param_store()
        owned = {id(parameter) for part in self.modules().values() for parameter in part.parameters()}
        stepped = {id(parameter) for parameter in self.svi.optim.optim_objs}
        everything = len(self.modules()) < 2 and not stepped
        return {
            name: value
            for name, value in store.named_parameters()
            if id(value) not in owned and (everything or id(value) in stepped)
        }


@contextmanager
def _checked_before_update(svi: SVI) -> Iterator[None]:
    """Look at the loss between the gradients and the optimizer of ``svi.step``.

    ``svi.step`` reports its loss when the update is done, and a NaN has by then spread to all parameters:
    what went bad first could not be told any more.
    """
    inner: Callable[..., Any] = svi.loss_and_grads
    by_pyro = getattr(inner, "__qualname__", "").startswith("SVI.")

    def loss_and_grads(*args: Any, **kwargs: Any) -> Any:
        loss = inner(*args, **kwargs)
        # Pyro differentiates a loss that is no ELBO where it can, and moves nothing where it cannot.
        if by_pyro and not getattr(loss, "requires_grad", False):
            raise ArgumentError(
                f"The loss of the SVI, {svi.loss!r}, has no gradient, so no parameter would be updated: write "
                "loss=elbo in place of loss=elbo.loss. A function of your own has to return a tensor that depends on "
                "the parameters."
            )
        finite(loss.detach() if isinstance(loss, Tensor) else loss)
        return loss

    svi.loss_and_grads = loss_and_grads
    try:
        yield
    finally:
        svi.loss_and_grads = inner
