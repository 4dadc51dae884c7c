# SPDX-License-Identifier: Apache-2.0
"""Model, guide, ELBO and optimizer of a training run, and the way to take a step with them."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuide
from torch import Tensor, nn
from torch.optim import Optimizer

from pyro_dvi.core.undisturbed import modules_met, preserve_buffers
from pyro_dvi.errors import NonFiniteError
from pyro_dvi.objectives import Captured, Objective
from pyro_dvi.objectives.recorded_step import Outcome
from pyro_dvi.optim.learning_rates import SCALE_PATTERN, is_uninitialised, parameter_names
from pyro_dvi.runs.posterior_run import Call
from pyro_dvi.training.random_state import preserve_random_state

_SCALE = re.compile(SCALE_PATTERN)


class Route(ABC):
    """A model, a guide, an ELBO and an optimizer, and the way to take a step with them.

    Args:
        model: the Pyro model, a module or a function.
        guide: the guide, a module or a function.
        elbo: the ELBO, or None if the loss is a plain function.
        loss: the function of model, guide and a batch that evaluates the objective.
        steered: the optimizer object that the user passed; None if the route is used only for predictions.

    Attributes:
        loose_modules: modules that are called by a model or guide that is a function; :meth:`initialise` finds them.
        model_parameters: if the model is a function, the identities of its parameters in Pyro's store;
            :meth:`initialise` finds them as well.
        captured: the objective that wraps ``elbo`` and replays steps, or None.
    """

    kind: str

    def __init__(self, model: Any, guide: Any, elbo: Any, loss: Any, steered: Any) -> None:
        self.model, self.guide, self.elbo, self.loss, self.steered = model, guide, elbo, loss, steered
        self.loose_modules: list[nn.Module] = []
        self.model_parameters: set[int] = set()
        self._rate: tuple[Optimizer, int] | None = None
        self.captured: Captured | None = None

    def capture(self) -> None:
        """Replay steps of an objective of this library from now on."""
        if isinstance(self.elbo, Objective):
            self.captured = Captured(self.elbo)

    def is_read_later(self) -> bool:
        """Return True if training need not wait for the loss of each step: replays take place on another device."""
        device = self.device()
        return self.captured is not None and device is not None and device.type != "cpu"

    def doubt(self) -> None:
        """Compare captured steps with ordinary ones soon, because other code has run."""
        if self.captured is not None:
            self.captured.doubt()

    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any], wait: bool = True) -> float | Outcome:
        """Take a training step, or raise :class:`NonFiniteError` before the update.

        Args:
            args: positional arguments of model and guide.
            kwargs: keyword arguments of model and guide.
            wait: False to take the update of a replayed step without waiting for its loss.

        Returns:
            The loss; or the outcome of a replayed step, whose loss is still to be read and checked.
        """
        outcome = None
        if self.captured is not None and self._takes_outcomes():
            outcome = self.captured.attempt(Call(self.model, self.guide, args, kwargs), wait)
        if outcome is None:
            return self._ordinary_step(args, kwargs)
        is_unread = not wait and outcome.report is not None
        value = math.nan if is_unread else finite(outcome.value)
        self._update(outcome)
        return outcome if is_unread else value

    @abstractmethod
    def _takes_outcomes(self) -> bool:
        """Return True if a step consists of the objective's gradients and an update, and nothing else."""

    @abstractmethod
    def _update(self, outcome: Outcome) -> None:
        """Update the parameters with the gradients of a recorded or replayed step."""

    @abstractmethod
    def _ordinary_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Take an ordinary step."""

    def _trained_model(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the model that a step runs; for objectives that do not check the rows of plates, it checks them."""
        checks = hasattr(self.elbo, "current_kl_weight") or not hasattr(self.guide, "plates")
        return self.model if checks else Call(self.model, self.guide, args, kwargs).checked_model()

    def _observed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AbstractContextManager[None]:
        """Return the context of an ordinary step, in which a recording is prepared."""
        if self.captured is None or not self._takes_outcomes():
            return nullcontext()
        return self.captured.observing(Call(self.model, self.guide, args, kwargs))

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state; its tensors are not copied."""

    @abstractmethod
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Load a copy of ``state`` into the optimizer."""

    @abstractmethod
    def optimizer_groups(self) -> Iterator[tuple[str, Optimizer, int]]:
        """Yield the name of each parameter, its optimizer, and the index of its group in the optimizer."""

    def optimizer_name(self) -> str:
        """Return the names of the torch classes of optimizer and scheduler, which a checkpoint must match."""
        parts = (getattr(self.steered, f"pt_{part}_constructor", None) for part in ("scheduler", "optim"))
        names = [getattr(part, "__name__", type(part).__name__) for part in parts if part]
        return " of ".join(names or [type(self.steered).__name__])

    def store_parameters(self) -> dict[str, Tensor]:
        """Return parameters that exist only in Pyro's store, under their names in the store."""
        return {}

    def agreed(self, value: Any) -> Any:
        """Return the value of the first process, if there are several."""
        return getattr(self.elbo, "agreed", lambda own: own)(value)

    def announce(self, error: Exception) -> None:
        """Tell other processes, if there are any, why this one ends."""
        getattr(self.elbo, "announce", lambda own: None)(error)

    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return the loss of a batch without training."""
        with torch.no_grad():
            return float(self.loss(self.model, self.guide, *args, **kwargs))

    def modules(self) -> dict[str, nn.Module]:
        """Return the model and the guide by role, each only if it is a module."""
        parts = {"model": self.model, "guide": self.guide}
        return {role: part for role, part in parts.items() if isinstance(part, nn.Module)}

    def all_modules(self) -> dict[str, nn.Module]:
        """Return the model and the guide if they are modules, and otherwise the modules that these functions call."""
        return {**self.modules(), **{f"called {i}": module for i, module in enumerate(self.loose_modules)}}

    def parameters(self) -> dict[str, Tensor]:
        """Return every unconstrained parameter once, by its name in error messages."""
        named: dict[str, Tensor] = {}
        seen: set[int] = set()
        # The model comes first, because a guide that contains its model shares parameters with it.
        for role, part in self.modules().items():
            for name, parameter in parameter_names(part):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    # Outside the global store, model and guide may both have a parameter of this name.
                    named[f"{role}.{name}" if name in named else name] = parameter
        for name, stored in self.store_parameters().items():
            named.setdefault(name.replace("$$$", "."), stored)
        return named

    def tensors(self) -> dict[str, Tensor]:
        """Return all parameters and buffers, by name."""
        named = {f"parameter {name}": parameter.detach() for name, parameter in self.parameters().items()}
        for name, buffer in nn.ModuleDict(self.all_modules()).named_buffers():
            named[f"buffer {name}"] = buffer.detach()
        return named

    def weights(self) -> dict[str, Tensor]:
        """Return copies of parameters and buffers, by name."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Write ``weights`` into the existing tensors, to which optimizers and Pyro's store refer."""
        current = self.tensors()
        for name in weights.keys() & current.keys():
            current[name].copy_(weights[name])

    def device(self) -> torch.device | None:
        """Return the device of the first parameter or buffer, or None if there are none yet."""
        # If all weights of a network are latent, it has buffers, but no parameters before its guide has run.
        buffers = (buffer for part in self.modules().values() for buffer in part.buffers())
        return next((tensor.device for tensor in chain(self.parameters().values(), buffers)), None)

    def learning_rate(self) -> float:
        """Return the learning rate of the means: the rate of the first parameter that is not a posterior scale."""
        if self._rate is None:  # found once, because the learning rate is read after every step
            groups = list(self.optimizer_groups())
            means = [group for group in groups if not _SCALE.search(group[0])] or groups
            if not means:
                return float("nan")
            self._rate = means[0][1:]
        optimizer, position = self._rate
        return float(optimizer.param_groups[position]["lr"]) * getattr(optimizer, "rate_factor", 1.0)

    def initialise(self, args: tuple[Any, ...], kwargs: dict[str, Any], always: bool = False) -> None:
        """Create the parameters that exist only after a first call, and find the modules that functions call.

        Buffers do not change. Automatic guides run the model here instead of inside the first step, so that their state
        before the step is known.

        Args:
            args: positional arguments of model and guide.
            kwargs: keyword arguments of model and guide.
            always: True to run even modules that have all their parameters, because they may create other parameters in
                Pyro's store.
        """
        looks = isinstance(self.guide, AutoGuide) and self.guide.prototype_trace is None
        if len(self.modules()) == 2 and not looks and not always:
            return
        # This run must not change the random numbers of resumed training. The exception is an automatic guide that
        # draws its initial values, which is part of training.
        draws_start = looks and is_uninitialised(self.guide)
        called: list[nn.Module] = []
        with (
            modules_met(called.append),
            nullcontext() if draws_start else preserve_random_state(),
            torch.no_grad(),
            preserve_buffers(),
            poutine.block(),
        ):
            with torch.enable_grad():  # as in training, because a LaplaceGuide is then a point mass
                trace = poutine.trace(self.guide).get_trace(*args, **kwargs)
            if always or not isinstance(self.model, nn.Module):
                replayed = poutine.trace(poutine.replay(self.model, trace=trace), param_only=True)
                sites = replayed.get_trace(*args, **kwargs).nodes.values()
                self.model_parameters = {id(site["value"].unconstrained()) for site in sites}
        if len(self.modules()) == 2:  # no function to inspect; modules register the networks that they call
            return
        inner = {id(module) for part in self.modules().values() for module in part.modules()}
        inner |= {id(child) for module in called for child in module.modules() if child is not module}
        self.loose_modules = [module for module in dict.fromkeys(called) if id(module) not in inner]


def finite(loss: Any) -> float:
    """Return the loss as a float.

    Raises:
        NonFiniteError: if the loss is NaN or infinite.
    """
    value = float(loss.detach() if isinstance(loss, Tensor) else loss)
    if not math.isfinite(value):
        raise NonFiniteError(f"the loss is {value}")
    return value
