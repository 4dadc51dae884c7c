# SPDX-License-Identifier: Apache-2.0
"""Training of an ELBOModule by a torch optimizer."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from pyro.infer.autoguide import AutoGuide
from pyro.infer.elbo import ELBOModule
from torch.optim import Optimizer

from pyro_dvi.errors import GuideError
from pyro_dvi.optim.learning_rates import check_parts, is_uninitialised
from pyro_dvi.training.routes.base import Route, finite


class ModuleRoute(Route):
    """Training of an :class:`~pyro.infer.elbo.ELBOModule` by a torch optimizer, under either setting."""

    kind = "ELBOModule"

    def __init__(self, module: ELBOModule, optimizer: Optimizer | None) -> None:
        super().__init__(module.model, module.guide, module.elbo, optimizer)
        self.module, self.optimizer = module, optimizer
        check_parts(module)

    def check_optimizer(self) -> None:
        """Refuse an optimizer that does not hold the parameters to be trained.

        Raises:
            GuideError: naming parameters that training would leave as they are.
        """
        assert self.optimizer is not None
        held = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        missing = [name for name, p in self.parameters().items() if p.requires_grad and id(p) not in held]
        uninitialised = isinstance(self.guide, AutoGuide) and is_uninitialised(self.guide)
        if missing or uninitialised:
            what = ", ".join(missing[:5]) or f"{type(self.guide).__name__}, which has none yet"
            raise GuideError(
                f"The optimizer does not hold {len(missing) or 'the'} parameters of the model and guide: "
                f"{what}. Call the guide once, guide(*batch), build the optimizer from "
                "parameter_groups(elbo(model, guide), base) after that, and freeze with "
                "requires_grad_(False) what should stay as it is."
            )

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Take the usual torch step."""
        assert self.optimizer is not None
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.module(*args, **kwargs)
        value = finite(loss.detach())
        loss.backward()
        self.optimizer.step()
        return value

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Evaluate with ``elbo.loss``."""
        with torch.no_grad():
            return float(self.elbo.loss(self.model, self.guide, *args, **kwargs))

    def optimizer_state(self) -> dict[str, Any]:
        """State of the torch optimizer."""
        return {} if self.optimizer is None else self.optimizer.state_dict()

    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load into the torch optimizer."""
        if self.optimizer is not None:
            self.optimizer.load_state_dict(copy.deepcopy(state))

    @property
    def optimizer_name(self) -> str:
        """Name of the torch class."""
        return type(self.optimizer).__name__

    def optimizer_groups(self) -> Iterator[tuple[str, Optimizer, int]]:
        """The groups of the torch optimizer."""
        assert self.optimizer is not None
        held = {id(p): i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"]}
        for name, parameter in self.parameters().items():
            if id(parameter) in held:
                yield name, self.optimizer, held[id(parameter)]
