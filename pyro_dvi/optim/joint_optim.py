# SPDX-License-Identifier: Apache-2.0
"""JointOptim, Adam and SGD: one torch optimizer for all parameters of an SVI, instead of Pyro's one per parameter."""

import copy
import inspect
import reprlib
from collections.abc import Callable, Iterable
from functools import partial, wraps
from typing import Any, ParamSpec, TypeVar

import pyro
import torch
from pyro.optim import PyroLRScheduler, PyroOptim
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pyro_dvi.core.arguments import misfit
from pyro_dvi.errors import ArgumentError
from pyro_dvi.optim.launched_updates import LaunchedUpdates
from pyro_dvi.optim.learning_rates import LearningRates, learning_rates

Options = dict[str, Any] | Callable[..., dict[str, Any]]
Rates = Options | float
Scheduler = Callable[[Optimizer], Any] | None
P = ParamSpec("P")
R = TypeVar("R")
_KERNELS = {"fused", "foreach"}  # torch's options for kernels
_TOGETHER = {"max_norm", "norm_type"}  # arguments of torch's clip_grad_norm_


class JointOptim(PyroOptim):
    """A Pyro optimizer that updates all parameters with equal options at once, with fused or foreach kernels.

    It replaces Pyro's own optimizers and gives the same results up to rounding. Its state has Pyro's format, with one
    entry per parameter name, and can be exchanged with the states of Pyro's optimizers and schedulers.

    There are three differences. First, gradients are None instead of zero after a step. The next backward pass
    therefore does not add to zeros, and a parameter without a gradient is not changed, as in torch. Second,
    ``set_state`` copies the state and also applies it to parameters that were already updated. Third, parameters share
    torch optimizers: to change a learning rate by hand, iterate over ``set(optimizer.optim_objs.values())``.

    Copies and pickles refer to parameters by their names in Pyro's store.

    Args:
        optim_constructor: class of the torch optimizer. A kernel is chosen for each parameter by its device and dtype,
            unless the options name one (``fused``, ``foreach``).
        optim_args: options of the torch optimizer, or a function from parameter names to options, as in Pyro's
            optimizers. Parameters with equal options share one torch optimizer.
        clip_args: ``{"clip_norm": 10.0}`` or ``{"clip_value": 1.0}`` clips each gradient separately, as in Pyro's
            optimizers. Options of :func:`torch.nn.utils.clip_grad_norm_` clip all gradients of a step together:
            ``{"max_norm": 10.0}`` bounds their joint norm, and ``{"max_norm": 10.0, "norm_type": math.inf}`` bounds
            their largest entry.

    Example:
        >>> optimizer = JointOptim(torch.optim.RMSprop, {"lr": 1e-3})
        >>> weights = pyro.param("weights", torch.ones(3)), pyro.param("bias", torch.zeros(()))
        >>> (weights[0].sum() + weights[1]).backward()
        >>> optimizer(weights)
        >>> len(set(optimizer.optim_objs.values())), weights[0].grad
        (1, None)
    """

    def __init__(
        self,
        optim_constructor: Callable[..., Optimizer],
        optim_args: Options,
        clip_args: dict[str, Any] | Callable[..., dict[str, Any]] | None = None,
    ) -> None:
        self._together: dict[str, Any] = {}
        if isinstance(clip_args, dict):
            self._together = {name: clip_args[name] for name in clip_args.keys() & _TOGETHER}
            clip_args = {name: value for name, value in clip_args.items() if name not in _TOGETHER}
        PyroOptim.__init__(self, optim_constructor, optim_args, clip_args)
        # One optimizer, or its scheduler, for each set of options and position in the schedule.
        self._shared: list[Any] = []
        self._places: dict[Tensor, tuple[Any, ...]] = {}
        self._launches = LaunchedUpdates()

    def __call__(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        """Update the parameters that have gradients, and set the gradients to None.

        Args:
            params: parameters from Pyro's store. Other parameters are not changed, even if they have gradients.
            *args: arguments of the torch optimizer's ``step``.
            **kwargs: keyword arguments of the same ``step``.
        """
        params, store = list(params), pyro.get_param_store()
        if not (args or kwargs) and self._launches.again(params):
            for parameter in params:
                parameter.grad = None
            return
        for parameter in params:
            is_plain = parameter.is_contiguous() and not _has_sparse_gradient(parameter)
            place = parameter.device, parameter.dtype, is_plain
            if self._places.get(parameter) != place:
                name, held = store.param_name(parameter), self.optim_objs.get(parameter)
                waiting = self._state_waiting_to_be_consumed.get(name)
                self._adopt(parameter, waiting if held is None else _states(held)[parameter])
                self._places[parameter] = place
            if (clip := self.grad_clip[parameter]) is not None:
                clip(parameter)
            # Fused CPU kernels assume that parameter and gradient have the same layout.
            if is_plain and parameter.grad is not None and not parameter.grad.is_contiguous():
                parameter.grad = parameter.grad.contiguous()
        if self._together:
            nn.utils.clip_grad_norm_(params, **self._together)
        others = self._places.keys() - dict.fromkeys(params)
        aside = {parameter: parameter.grad for parameter in others if parameter.grad is not None}
        for parameter in aside:
            parameter.grad = None
        optimizers = [torch_optimizer(held) for held in dict.fromkeys(map(self.optim_objs.get, params))]
        repeats = not self._together and not any(map(self.grad_clip.get, params))
        try:
            if args or kwargs or not self._launches.take(optimizers, params, repeats):
                for optimizer in optimizers:
                    optimizer.step(*args, **kwargs)
            for parameter in params:
                parameter.grad = None
        finally:
            for parameter, gradient in aside.items():
                parameter.grad = gradient

    def get_state(self) -> dict[str, Any]:
        """Return the state by parameter name, including loaded states not yet in use; tensors are not copied."""
        store, state = pyro.get_param_store(), dict(self._state_waiting_to_be_consumed)
        for shared in self._shared:
            for parameter, own in _states(shared).items():
                if (name := store.param_name(parameter)) is not None:
                    state[name] = own
        return state

    def set_state(self, state_dict: dict[str, Any]) -> None:
        """Load a copy of a state of this class or of Pyro's, for existing and future parameters."""
        super().set_state(copy.deepcopy(state_dict))
        for name, parameter in pyro.get_param_store().named_parameters():
            if name in state_dict and parameter in self._places:
                self._adopt(parameter, self._state_waiting_to_be_consumed[name])

    def _adopt(self, parameter: Tensor, state: dict[str, Any] | None) -> None:
        """Assign a parameter with this state to the optimizer that parameters with the same options share."""
        self._launches.forget()
        made = self._get_optim(parameter)
        if state is not None:
            load_state(made, state)
        name = pyro.get_param_store().param_name(parameter)
        self._state_waiting_to_be_consumed.pop(name, None)
        self._leave(parameter)
        own = torch_optimizer(made)
        for shared in self._shared:
            if _present(made) == _present(shared):
                joint = torch_optimizer(shared)
                joint.param_groups[0]["params"].append(parameter)
                if parameter in own.state:
                    joint.state[parameter] = own.state[parameter]
                break
        else:
            shared = made
            self._shared.append(made)
        self.optim_objs[parameter] = shared
        self.grad_clip[parameter] = self._get_grad_clip(parameter)  # type: ignore[arg-type]

    def _leave(self, parameter: Tensor) -> None:
        held = self.optim_objs.pop(parameter, None)
        if held is None:
            return
        optimizer = torch_optimizer(held)
        optimizer.state.pop(parameter, None)
        (group,) = optimizer.param_groups
        group["params"] = [other for other in group["params"] if other is not parameter]
        if not group["params"]:
            self._shared.remove(held)

    def _get_optim_args(self, param: Any) -> dict[str, Any]:
        options = super()._get_optim_args(param)
        return {**_kernels(self.pt_optim_constructor, param, options), **options}

    def __getstate__(self) -> dict[str, Any]:
        """Return the state by parameter name, without the parameters, because Pyro's store does not contain copies."""
        held: dict[str, Any] = {"optim_objs": {}, "grad_clip": {}, "_places": {}, "_shared": []}
        return {**self.__dict__, **held, "_state_waiting_to_be_consumed": self.get_state()}


class ScheduledJointOptim(JointOptim, PyroLRScheduler):
    """A :class:`JointOptim` with a schedule for each set of options, advanced by ``step`` like Pyro's schedulers.

    A parameter that appears later starts its own schedule at that point, as with Pyro's schedulers.

    Args:
        scheduler: function from a torch optimizer to a torch scheduler: a class, or ``partial(CosineAnnealingLR,
            T_max=100)``.
        optim_constructor: as in :class:`JointOptim`.
        optim_args: as in :class:`JointOptim`.
        clip_args: as in :class:`JointOptim`.
    """

    def __init__(
        self,
        scheduler: Callable[[Optimizer], Any],
        optim_constructor: Callable[..., Optimizer],
        optim_args: Options,
        clip_args: dict[str, Any] | Callable[..., dict[str, Any]] | None = None,
    ) -> None:
        JointOptim.__init__(self, optim_constructor, optim_args, clip_args)
        opened = scheduler if isinstance(scheduler, partial) else partial(scheduler)
        self.pt_scheduler_constructor, self.kwargs = opened.func, opened.keywords

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Advance the learning rates.

        Args:
            *args: arguments of the torch scheduler's ``step``, such as the loss for ``ReduceLROnPlateau``.
            **kwargs: keyword arguments of the same ``step``.
        """
        for scheduler in self._shared:
            scheduler.step(*args, **kwargs)


def torch_optimizer(held: Any) -> Optimizer:
    """Return the torch optimizer of a parameter; Pyro holds the optimizer or its scheduler."""
    optimizer: Optimizer = getattr(held, "optimizer", held)
    return optimizer


def _states(held: Any) -> dict[Tensor, dict[str, Any]]:
    """Return the state of each parameter in an optimizer or scheduler."""
    optimizer, states = torch_optimizer(held), {}
    packed, (group,) = optimizer.state_dict(), optimizer.param_groups
    options = {**packed["param_groups"][0], "params": [0]}
    options |= {kernel: None for kernel in _KERNELS & options.keys()}  # chosen again on loading
    for index, parameter in enumerate(group["params"]):
        own = {0: packed["state"][index]} if index in packed["state"] else {}
        state = {"state": own, "param_groups": [dict(options)]}
        states[parameter] = (
            state if held is optimizer else {"scheduler": held.state_dict(), "optimizer": state}
        )
    return states


def _present(held: Any) -> dict[str, Any]:
    """Return the current options and the position in the schedule."""
    (group,) = torch_optimizer(held).param_groups
    options = {name: value for name, value in group.items() if name != "params"}
    return options if held is torch_optimizer(held) else {**options, "scheduler": held.state_dict()}


def load_state(held: Any, state: dict[str, Any]) -> None:
    """Load a state in Pyro's format, except for its choice of kernels."""
    optimizer = torch_optimizer(held)
    if held is not optimizer:
        held.load_state_dict(state["scheduler"])
        state = state["optimizer"]
    (saved,), (own,) = state["param_groups"], optimizer.param_groups
    kernels = {kernel: own[kernel] for kernel in _KERNELS & own.keys()}
    optimizer.load_state_dict({**state, "param_groups": [{**saved, **kernels}]})


def _kernels(constructor: Any, parameter: Tensor, options: dict[str, Any]) -> dict[str, bool]:
    """Return the option for torch's fastest kernel for this parameter; empty if the user chose one."""
    offered, device = inspect.signature(constructor).parameters, parameter.device.type
    spoken = (_KERNELS | {"differentiable", "capturable"}) & options.keys()
    odd = type(parameter) not in (Tensor, nn.Parameter) or _has_sparse_gradient(parameter)
    if spoken or odd or device not in ("cpu", "cuda") or any(map(torch.is_tensor, options.values())):
        return {}
    # Fused SGD cannot start the momentum of one parameter if other parameters have momentum already; fused Adagrad
    # exists only on the CPU.
    fused = "fused" in offered and not options.get("momentum")
    fused &= device == "cpu" or constructor is not torch.optim.Adagrad
    if fused and parameter.is_floating_point() and parameter.is_contiguous():
        return {"fused": True}
    return {"foreach": True} if "foreach" in offered else {}


def _has_sparse_gradient(parameter: Tensor) -> bool:
    return parameter.grad is not None and parameter.grad.is_sparse


def for_svi(constructor: type[Optimizer]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make an SVI optimizer raise an error if it is called like torch's class of the same name.

    Args:
        constructor: torch's class.

    Raises:
        ArgumentError: the decorated function gets arguments of torch's class.
    """
    name = constructor.__name__.removesuffix("Optimizer")
    module = constructor.__module__.rpartition(".")[0]

    def decorate(fn: Callable[P, R]) -> Callable[P, R]:
        @wraps(fn)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            reason = misfit(fn, args, kwargs)
            if reason is None:
                options = args[0] if args else kwargs["optim_args"]
                is_rate = module == "torch.optim" and isinstance(options, int | float)
                if is_rate or isinstance(options, dict) or callable(options):
                    return fn(*args, **kwargs)
                reason = f"optim_args must be a dict of options, got {reprlib.repr(options)}"
            raise ArgumentError(
                f"{name}: {reason}. {name} is the optimizer for SVI and takes a dictionary of options: "
                f"{name}({{'lr': ...}}). If a torch optimizer class is required, as in "
                "pyro.optim.ExponentialLR({'optimizer': ...}), or for elbo(model, guide), use "
                f"{module}.{constructor.__name__}."
            )

        return checked

    return decorate


# The optimizers ---------------------------------------------------------------------------------------------------


@for_svi(torch.optim.Adam)
def Adam(  # noqa: N802 (Pyro's style)
    optim_args: Rates, clip_args: Any = None, *, scheduler: Scheduler = None
) -> JointOptim:
    """Adam (Kingma & Ba, 2015) for SVI, as one :class:`torch.optim.Adam` for all parameters.

    It gives the same results as ``pyro.optim.Adam`` up to rounding, with fewer kernel launches; :class:`JointOptim`
    lists the differences.

    Args:
        optim_args: the learning rate of the means; posterior scales then have ten times this rate, as with
            :func:`learning_rates`. Alternatively, as in Pyro, options of the torch optimizer for all parameters, or a
            function from parameter names to options.
        clip_args: as in :class:`JointOptim`. ``{"clip_norm": 10.0}`` bounds the norm of each gradient separately.
            ``{"max_norm": num_data, "norm_type": math.inf}`` rescales all gradients so that no entry exceeds the number
            of examples; because losses are sums over the data, this corresponds to a bound of 1 for a mean loss.
        scheduler: function from a torch optimizer to a torch scheduler: a class, or ``partial`` of it. ``fit`` advances
            it after each epoch, or after each step with ``lr_schedule=EveryStep(optimizer)``; in a loop of your own,
            call ``optimizer.step()``. Schedules that multiply the learning rate preserve the ratio between means and
            scales; schedules that set it (``OneCycleLR(max_lr=...)``) give all parameters the same rate.

    Returns:
        The optimizer; if ``scheduler`` is given, it is also a ``pyro.optim.PyroLRScheduler``.

    Raises:
        ArgumentError: if ``scheduler`` does not return a scheduler.
        TypeError: if an option is unknown to the torch optimizer.
        ValueError: if an option is out of range.

    Example:
        >>> from functools import partial
        >>> from torch.optim.lr_scheduler import CosineAnnealingLR
        >>> optimizer = Adam(1e-3, scheduler=partial(CosineAnnealingLR, T_max=100))
        >>> optimizer.pt_optim_constructor.__name__, optimizer.pt_scheduler_constructor.__name__
        ('Adam', 'CosineAnnealingLR')
    """
    return _joint(torch.optim.Adam, optim_args, clip_args, scheduler)


@for_svi(torch.optim.SGD)
def SGD(  # noqa: N802
    optim_args: Rates, clip_args: Any = None, *, scheduler: Scheduler = None
) -> JointOptim:
    """Stochastic gradient descent for SVI, as one :class:`torch.optim.SGD`; arguments as in :func:`Adam`.

    Example:
        >>> SGD({"lr": 0.1, "momentum": 0.9}).pt_optim_constructor.__name__
        'SGD'
    """
    return _joint(torch.optim.SGD, optim_args, clip_args, scheduler)


def _joint(constructor: type[Optimizer], given: Rates, clip_args: Any, scheduler: Scheduler) -> JointOptim:
    """Construct the optimizer, after checking its options with a temporary one."""
    optim_args: Options = learning_rates(given) if isinstance(given, int | float) else given
    known = optim_args("") if isinstance(optim_args, LearningRates) else optim_args
    optimizer = constructor([torch.zeros(())], **({} if callable(known) else known))
    if scheduler is None:
        return JointOptim(constructor, optim_args, clip_args)
    try:
        made = scheduler(optimizer)
    except (TypeError, ValueError) as error:
        made = error
    if not isinstance(made, LRScheduler | ReduceLROnPlateau):
        raise ArgumentError(
            f"{constructor.__name__}: scheduler= must return a torch scheduler for a torch optimizer, as does "
            f"partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.99), but {scheduler!r} returns {made!r}"
        )
    return ScheduledJointOptim(scheduler, constructor, optim_args, clip_args)
