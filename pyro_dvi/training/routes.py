# SPDX-License-Identifier: Apache-2.0
r"""What training needs of a model, a guide, an ELBO and an optimizer, however they come.

Training by Pyro's SVI.

Training of an ELBOModule by a torch optimizer.

The two ways to train, Pyro's SVI and an ELBOModule with a torch optimizer, behind one interface.
"""

import copy
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.autoguide import AutoGuide
from pyro.infer.elbo import ELBO, ELBOModule
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.distributions import transform_to
from torch.optim import Optimizer

from pyro_dvi.core.batches import dataset_size
from pyro_dvi.core.undisturbed import modules_met, preserve_buffers
from pyro_dvi.errors import ArgumentError, DeviceError, GuideError, NonFiniteError, UnsupportedError
from pyro_dvi.optim.joint import JointOptim, load_state, torch_optimizer
from pyro_dvi.optim.learning_rates import SCALE_PATTERN, check_parts, is_uninitialised, parameter_names
from pyro_dvi.runs.minibatch import check_list, check_num_data
from pyro_dvi.runs.observed import observation
from pyro_dvi.runs.sites import is_data
from pyro_dvi.training.random_state import preserve_random_state

_SCALE = re.compile(SCALE_PATTERN)
_PRECISION = re.compile(r"(^|\.)([A-Z]\w*|guide)(\.\d+)*\.precisions\.")  # as of NaturalGradientGuide


class Route(ABC):
    """A model, a guide, an ELBO and an optimizer, and how to take a step with them.

    Args:
        model: the Pyro model, a module or a function.
        guide: the guide, a module or a function.
        elbo: the ELBO, or None where the loss is a plain function.
        steered: the optimizer object that the user gave, or None to predict only.

    Attributes:
        loose_modules: modules that a model or guide which is a function calls; found by :meth:`initialise`.
        model_parameters: identities of store parameters that a model which is a function asks for; found
            there too.
    """

    kind: str

    def __init__(self, model: Any, guide: Any, elbo: Any, steered: Any) -> None:
        self.model, self.guide, self.elbo, self.steered = model, guide, elbo, steered
        self.loose_modules: list[nn.Module] = []
        self.model_parameters: set[int] = set()
        self._rate: tuple[Any, int] | None = None
        self._watch: _PlateCheck | None = None

    @abstractmethod
    def step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Take a training step, or raise :class:`NonFiniteError` before the update."""

    @abstractmethod
    def evaluate(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Return the loss of a batch without training."""

    def check_optimizer(self) -> None:  # noqa: B027 (Pyro's optimizers take every parameter that they meet)
        """Refuse an optimizer that does not hold the parameters to be trained."""

    @abstractmethod
    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state; the tensors are the optimizer's own."""

    @abstractmethod
    def load_optimizer_state(self, state: dict[str, Any]) -> None:
        """Put the optimizer into ``state``, of which it takes a copy."""

    @property
    @abstractmethod
    def optimizer_name(self) -> str:
        """Name of the optimizer, to recognise a checkpoint of another one."""

    def agreed(self, value: Any) -> Any:
        """Return a value that all processes have to share, where several train: that of the first."""
        return getattr(self.elbo, "agreed", lambda own: own)(value)

    def announce_length(self, steps: int, total_steps: int | None) -> None:
        """Compare the steps of an epoch with other processes, and tell an optimizer with a schedule how long it has.

        Args:
            steps: of an epoch.
            total_steps: in all; None where a scheduler says how the rate falls.
        """
        if hasattr(self.elbo, "check_number_of_batches"):
            self.elbo.check_number_of_batches(steps)
        if total_steps is not None and hasattr(self.steered, "set_total_steps"):
            self.steered.set_total_steps(total_steps)

    @contextmanager
    def informed(self, loader: Iterable[Any]) -> Iterator[None]:
        """Tell the objective the size of the data set, and its optimizer if it measures for it, while training lasts.

        The size is compared with the plate of the model: by an ELBO that can do so, for others and for a list of
        batches in the first step. Of several processes each may have a list of its own share.
        """
        size = dataset_size(loader)
        shared = torch.distributed.is_available() and torch.distributed.is_initialized()
        serve = getattr(self.elbo, "serve", lambda optimizer: None)
        untold = size is not None and getattr(self.elbo, "num_data", size) is None
        if size is not None and not hasattr(self.elbo, "num_data"):
            self._watch = _PlateCheck(
                lambda seen: check_num_data([*map(observation, filter(is_data, seen))], size)
            )
        elif (
            isinstance(loader, (list, tuple)) and not shared and getattr(self.elbo, "num_data", None) is None
        ):
            self._watch = _PlateCheck(lambda seen: check_list(seen, loader, hasattr(self.elbo, "num_data")))
        served = serve(self.steered)
        if untold:
            self.elbo.num_data = size
        try:
            yield
        finally:
            self._watch = None
            if untold:
                self.elbo.num_data = None
            serve(served)

    def checked_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
        """Take a training step; the first one only with a plate that fits the data set.

        Raises:
            DataError: if the plate of the model does not scale the minibatch up to the data set.
            NonFiniteError: before the update.
        """
        with nullcontext() if self._watch is None else self._watch:
            loss = self.step(args, kwargs)
        self._watch = None
        return loss

    @abstractmethod
    def optimizer_groups(self) -> Iterator[tuple[str, Optimizer, int]]:
        """Yield names of parameters, the optimizer of each and the position of its group there."""

    def store_parameters(self) -> dict[str, Tensor]:
        """Parameters that live in Pyro's store only, under the names that they have there."""
        return {}

    # -- what both have in common ---------------------------------------------------------------------------

    def modules(self) -> dict[str, nn.Module]:
        """Model and guide, as far as they are modules."""
        parts = {"model": self.model, "guide": self.guide}
        return {role: part for role, part in parts.items() if isinstance(part, nn.Module)}

    def parameters(self) -> dict[str, Tensor]:
        """Every unconstrained parameter once, by the name that an error message should use."""
        named: dict[str, Tensor] = {}
        seen: set[int] = set()
        # The model first: a guide that holds its model shares parameters with it.
        for role, part in self.modules().items():
            for name, parameter in parameter_names(part):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    # Outside the global store model and guide may both own a parameter of this name.
                    named[f"{role}.{name}" if name in named else name] = parameter
        for name, stored in self.store_parameters().items():
            named.setdefault(name.replace("$$$", "."), stored)
        return named

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers: everything that makes the weights of an epoch."""
        named = {f"parameter {name}": parameter.detach() for name, parameter in self.parameters().items()}
        parts = {**self.modules(), **{f"called {i}": module for i, module in enumerate(self.loose_modules)}}
        for name, buffer in nn.ModuleDict(parts).named_buffers():
            named[f"buffer {name}"] = buffer.detach()
        return named

    def weights(self) -> dict[str, Tensor]:
        """Copy parameters and buffers, by name."""
        return {name: tensor.clone() for name, tensor in self.tensors().items()}

    @torch.no_grad()
    def set_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Write ``weights`` into the tensors that exist, so that optimizers and Pyro's store still hold them."""
        current = self.tensors()
        for name, value in weights.items():
            if name in current:
                current[name].copy_(value)

    def device(self) -> torch.device | None:
        """Device of the parameters, or None while there are none.

        Raises:
            DeviceError: if they live on several.
        """
        places: dict[torch.device, str] = {}
        for name, parameter in self.parameters().items():
            places.setdefault(parameter.device, name)
        if len(places) > 1:
            (one, first), (two, second), *_ = places.items()
            raise DeviceError(
                f"Parameter {first!r} is on {one}, parameter {second!r} on {two}. Move model and guide to one device "
                "before training: fit(..., device=...)."
            )
        # A network whose weights are all latent has no parameters before its guide has run, but buffers.
        buffers = (buffer.device for part in self.modules().values() for buffer in part.buffers())
        return next(iter(places or buffers), None)

    def learning_rate(self) -> float:
        """Learning rate of the means (of the first parameter that is not a posterior scale)."""
        # Found once, since this is read after every step.
        if self._rate is None:
            groups = list(self.optimizer_groups())
            means = [group for group in groups if not _SCALE.search(group[0])] or groups
            if not means:
                return float("nan")
            self._rate = means[0][1:]
        optimizer, position = self._rate
        return float(optimizer.param_groups[position]["lr"]) * getattr(optimizer, "rate_factor", 1.0)

    def posterior_scale(self) -> float | None:
        """Mean of all posterior scales, where the guide's parameters are recognised as such."""
        total, count = 0.0, 0
        constraints = self._constraints()
        for name, parameter in self.parameters().items():
            by_precision = _PRECISION.search(name) is not None
            if by_precision or _SCALE.search(name):
                constraint = constraints.get(id(parameter))
                value = (parameter if constraint is None else transform_to(constraint)(parameter)).detach()
                scales = value.rsqrt() if by_precision else value
                total, count = total + float(scales.sum()), count + parameter.numel()
        return total / count if count else None

    def initialise(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Make parameters exist that a first call creates, and find the modules that functions call.

        Buffers stay as they are. Automatic guides look at the model here instead of inside the first step, so
        that its state before the step is known.
        """
        functions = [part for part in (self.guide, self.model) if not isinstance(part, nn.Module)]
        looks = isinstance(self.guide, AutoGuide) and self.guide.prototype_trace is None
        if not functions and not looks:
            return
        # A run that only looks around must not change what a resumed training draws. The first look of an automatic
        # guide is part of the training: it draws the start.
        draws_start = looks and is_uninitialised(self.guide)
        aside: AbstractContextManager[None] = nullcontext() if draws_start else preserve_random_state()
        called: list[nn.Module] = []
        with modules_met(called.append), aside, torch.no_grad(), preserve_buffers(), poutine.block():
            with torch.enable_grad():  # as in training, where a LaplaceGuide is a point mass
                trace = poutine.trace(self.guide).get_trace(*args, **kwargs)
            if not isinstance(self.model, nn.Module):
                replayed = poutine.trace(poutine.replay(self.model, trace=trace), param_only=True)
                sites = replayed.get_trace(*args, **kwargs).nodes.values()
                self.model_parameters = {id(site["value"].unconstrained()) for site in sites}
        self.loose_modules = self._outermost(called)

    def _outermost(self, called: Sequence[nn.Module]) -> list[nn.Module]:
        """Those modules, once, that are part of no other one among them, nor of model and guide."""
        parts = self.modules().values()
        inner = {id(module) for part in parts for module in part.modules()}
        inner |= {id(child) for module in called for child in module.modules() if child is not module}
        return [module for module in dict.fromkeys(called) if id(module) not in inner]

    def _constraints(self) -> dict[int, Any]:
        store = pyro.get_param_store()
        known = {id(value): store._constraints[name] for name, value in store.named_parameters()}
        for part in self.modules().values():
            for module in part.modules():
                for name, (constraint, _) in getattr(module, "_pyro_params", {}).items():
                    known[id(getattr(module, name + "_unconstrained"))] = constraint
        return known


def finite(loss: Any) -> float:
    """Return the loss as a number.

    Raises:
        NonFiniteError: if it is NaN or infinite.
        UnsupportedError: if it is several numbers.
    """
    if isinstance(loss, tuple):
        raise UnsupportedError(
            f"The loss is a tuple of {len(loss)} numbers (a wake-sleep objective); training here follows "
            "one. Write the loop over svi.step yourself."
        )
    value = float(loss)
    if not math.isfinite(value):
        raise NonFiniteError(f"the loss is {value}")
    return value


class _PlateCheck(Messenger):
    """Compare the scale of observed sites with the loader, for ELBOs that do not do so themselves."""

    def __init__(self, check: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self.check = check
        self.seen: list[Any] = []

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        seen, self.seen = self.seen, []
        if error[0] is None:
            self.check(seen)

    def _pyro_post_sample(self, msg: Any) -> None:
        self.seen.append(msg)


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
