# SPDX-License-Identifier: Apache-2.0
"""The prior of a converted parameter, and what its module records: parameter order, frozen parameters, old keys.

A :class:`SitePrior` is the ``prior`` of a :class:`pyro.nn.PyroSample`. It is called with the module of the parameter.
It returns a distribution of the parameter's shape, with the device and dtype of the module and with the module's own
weight as ``initial_value``.

Optimizers and exported modules rely on the parameter order. Frozen parameters become buffers of the same name, because
Pyro sets ``requires_grad`` on every parameter that a Pyro module reads. Checkpoints still load, and no optimizer
updates the buffers.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.infer.autoguide.initialization import init_to_median
from pyro.nn.module import PyroModule, PyroParam, PyroSample, _PyroModuleMeta
from pyro.poutine.runtime import am_i_wrapped, get_plates
from torch import Tensor, nn

from pyro_dvi.core.distributions import placed_like
from pyro_dvi.errors import ModelError, UnsupportedError


def buffer_name(attribute: str) -> str:
    """Return the name of the buffer that keeps the module's own value of a converted parameter."""
    return f"{attribute}_initial"


def set_attribute(module: nn.Module, name: str, value: PyroParam | PyroSample) -> None:
    """Set a Pyro attribute without calling the module's own ``__setattr__``, because recurrent layers override it."""
    PyroModule.__setattr__(module, name, value)  # type: ignore[arg-type]


@dataclass(eq=False, repr=False)
class Placed:
    """A distribution that follows a buffer to its device and dtype.

    Args:
        given: the distribution.
    """

    given: TorchDistributionMixin
    _built: tuple[Any, Any] | None = field(default=None, init=False)

    def placed(self, buffer: Tensor, shape: torch.Size) -> TorchDistributionMixin:
        """Return the distribution, expanded to one event of this shape; it is cached by device, dtype and shape."""
        place = type(buffer), buffer.device, buffer.dtype, shape
        if self._built is not None and self._built[0] == place:
            return self._built[1]
        # expand() returns a new object, which is needed because initial_value is set on it and priors may be shared.
        batch = shape[: len(shape) - len(self.given.event_shape)]
        built = placed_like(self.given, buffer).expand(batch).to_event(len(batch))
        # Tensors created in inference mode cannot take part in later backward passes.
        self._built = None if torch.is_inference_mode_enabled() else (place, built)
        return built

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_built": None}


@dataclass(eq=False, repr=False)
class SitePrior(ABC):
    """The prior of one converted parameter.

    Args:
        attribute: the name of the parameter in its module.
    """

    attribute: str

    @abstractmethod
    def distribution(self, module: PyroModule, initial: Tensor) -> TorchDistributionMixin:
        """Return the prior for a weight of the shape, dtype and device of ``initial``."""

    def __call__(self, module: PyroModule) -> Any:
        """Return the prior, with ``initial_value`` set to the module's own weight.

        Raises:
            ModelError: if the weight is read within a Pyro run but outside a call of the network, because Pyro would
                then redraw it at each access and record no site; or if it is read inside a plate, because a torch layer
                would then get one weight per row.
            UnsupportedError: if the weight is read in the backward pass of a checkpointed layer, because Pyro would
                redraw it there.
        """
        self._check_surroundings(module)
        initial = self.shown_value(module)
        prior = self.distribution(module, initial)
        prior.initial_value = initial  # type: ignore[attr-defined]
        return prior

    def shown_value(self, module: nn.Module) -> Tensor:
        """Return the module's own weight, from before the conversion or set since then."""
        return module._buffers[buffer_name(self.attribute)]  # type: ignore[return-value]

    def _check_surroundings(self, module: PyroModule) -> None:
        if torch._C._current_graph_task_id() != -1:
            raise UnsupportedError(
                f"The Bayesian parameter {self.attribute!r} is read in a backward pass, where Pyro would draw another "
                "value. With torch.utils.checkpoint, pass the weights as arguments of the function, "
                "checkpoint(function, x, layer.weight, use_reentrant=False)"
            )
        if not am_i_wrapped():
            return
        context = module._pyro_context
        if not context.active:
            raise ModelError(
                f"The parameter {self.attribute!r} of a {type(module).__name__} is read outside a call of its "
                "network, so Pyro would redraw it at each access: call the network "
                "itself, or decorate the method that reads it with pyro.nn.pyro_method"
            )
        if type(module).__mro__[1].__module__.startswith("torch.nn."):
            plates = [frame.name for frame in get_plates() if frame.vectorized]
            if plates:
                raise ModelError(
                    f"The site {module._pyro_get_fullname(self.attribute)!r} is sampled inside the plate "
                    f"{plates[-1]!r}, which would give each row its own weights. Call the network before entering the "
                    "plate, and do not use vectorised particles or Predictive(parallel=True)"
                )


@dataclass(eq=False, repr=False)
class DistributionPrior(SitePrior, Placed):
    """A given distribution of a single weight or of the whole weight tensor, expanded to the parameter's shape."""

    def distribution(self, module: PyroModule, initial: Tensor) -> TorchDistributionMixin:
        """Return the same object as long as the buffer is the same, so that a training step allocates nothing."""
        return self.placed(initial, initial.shape)


@dataclass(eq=False, repr=False)
class ScaleMixturePrior(SitePrior):
    """``N(0, (unit·scale)²)`` with a learned or sampled scale, which is an attribute of the module.

    Args:
        attribute: as in :class:`SitePrior`.
        scale_name: the attribute that holds the scale.
        unit: factor of the scale.
    """

    scale_name: str
    unit: float

    def distribution(self, module: PyroModule, initial: Tensor) -> TorchDistributionMixin:
        """Return a Normal around zero with the current scale; only scalars are allocated."""
        scale = getattr(module, self.scale_name)
        scale = scale * self.unit if self.unit != 1.0 else scale
        # No validation: the scale is constrained to be positive, and a check would wait for the device.
        normal = dist.Normal(torch.zeros_like(scale), scale, validate_args=False)
        return normal.expand(initial.shape).to_event(initial.dim())


@dataclass(eq=False, repr=False)
class TiedPrior(SitePrior):
    """A prior that returns the value sampled by another module, so that shared weights stay one latent variable."""

    owner: nn.Module
    owner_attribute: str

    def __call__(self, module: PyroModule) -> Tensor:
        """Return the weight of the module that samples it; Pyro records a deterministic site."""
        value: Tensor = getattr(self.owner, self.owner_attribute)
        return value

    def distribution(self, module: PyroModule, initial: Tensor) -> TorchDistributionMixin:
        """Never called, because the other module samples the value."""
        raise NotImplementedError

    def shown_value(self, module: nn.Module) -> Tensor:
        """Return the other module's own weight."""
        return self.owner._buffers[buffer_name(self.owner_attribute)]  # type: ignore[return-value]


def init_to_module(
    site: dict[str, Any] | None = None, *, fallback: Callable[[dict[str, Any]], Tensor] = init_to_median
) -> Any:
    """Start a latent at the weight that the module had before the conversion.

    This is an initialisation strategy for any of Pyro's autoguides. ``to_bayesian_`` stores the weight as
    ``initial_value`` of the prior; sites without this attribute (a noise scale, a latent of your own) start at
    ``fallback``.

    Args:
        site: the message of a sample statement, as Pyro passes it. If it is None, the strategy is returned with
            ``fallback`` set.
        fallback: the strategy for other sites; by default, the median of the prior.

    Returns:
        A copy of the weight in constrained space, with the shape of the site.

    Example:
        >>> import torch
        >>> from pyro.infer.autoguide import AutoNormal
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = torch.nn.Linear(3, 1)
        >>> weight = net.weight.detach().clone()
        >>> guide = AutoNormal(to_bayesian_(net), init_loc_fn=init_to_module)
        >>> _ = guide(torch.ones(1, 3))
        >>> torch.equal(guide.median()["weight"], weight)
        True
    """
    if site is None:
        return partial(init_to_module, fallback=fallback)  # can be pickled with the guide
    value = getattr(site["fn"], "initial_value", None)
    if value is None:
        return fallback(site)
    # Pyro's guides train the tensor that they get; without a copy, they would train the module's buffer.
    return value.detach().clone()


_ORDER = "_parameters_before_conversion"


def remember(root: nn.Module) -> None:
    """Record the parameter order of all modules below ``root``, and turn frozen parameters into buffers."""
    for module in root.modules():
        # Repeated in a second conversion, as parameters may have been added.
        vars(module)[_ORDER] = parameter_order(module)
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not parameter.requires_grad and _is_plain(module, name):
                del module._parameters[name]
                module.register_buffer(name, parameter.detach())


def was_converted(module: nn.Module) -> bool:
    """Return whether :func:`remember` was applied to the module."""
    return _ORDER in vars(module)


def forget(module: nn.Module) -> None:
    """Turn the buffers of frozen parameters back into parameters, and remove all records of the conversion."""
    for name in vars(module).pop(_ORDER, []):
        if (value := module._buffers.pop(name, None)) is not None:
            module._parameters[name] = nn.Parameter(value, requires_grad=False)
    for key, hook in list(module._load_state_dict_pre_hooks.items()):
        if _is_ours(hook):
            del module._load_state_dict_pre_hooks[key]


def parameter_order(module: nn.Module) -> list[str]:
    """Return the names of a module's own parameters, including converted and frozen ones, in their original order."""
    present = [name for name in module._parameters if _is_plain(module, name)]
    priors = getattr(module, "_pyro_samples", {})
    moved = {name for name, prior in priors.items() if isinstance(prior, SitePrior)} | module._buffers.keys()
    known = [name for name in vars(module).get(_ORDER, []) if name in present or name in moved]
    return [*known, *(name for name in present if name not in known)]


def plain_type(module: nn.Module) -> type[nn.Module] | None:
    """Return the class of ``module`` without Pyro, or ``None`` for a class that was written as a ``PyroModule``.

    Example:
        >>> plain_type(PyroModule[nn.Linear](1, 1))
        <class 'torch.nn.modules.linear.Linear'>
    """
    kind = type(module)
    if kind is PyroModule:  # the Pyro version of a bare nn.Module
        return nn.Module
    if not issubclass(kind, PyroModule):
        return kind
    made = _PyroModuleMeta._pyro_mixin_cache
    return next((plain for plain, converted in made.items() if converted is kind), None)


def accept_old_keys(module: nn.Module) -> None:
    """Make ``module.load_state_dict`` accept the key ``weight`` for the buffer ``weight_initial``."""
    if not any(_is_ours(hook) for hook in module._load_state_dict_pre_hooks.values()):
        module.register_load_state_dict_pre_hook(_rename_old_keys)


def _is_plain(module: nn.Module, attribute: str) -> bool:
    """Return whether ``attribute`` is an ordinary parameter, not the unconstrained value of a ``PyroParam``."""
    constrained = attribute.removesuffix("_unconstrained")
    return constrained == attribute or constrained not in getattr(module, "_pyro_params", {})


def _is_ours(hook: object) -> bool:
    return getattr(hook, "hook", hook) is _rename_old_keys


def _rename_old_keys(module: nn.Module, state: "OrderedDict[str, Tensor]", prefix: str, *unused: Any) -> None:
    """Rename the keys of converted parameters; ``state`` is already a copy."""
    old_checkpoint = False
    for attribute, prior in getattr(module, "_pyro_samples", {}).items():
        if not isinstance(prior, SitePrior) or prefix + attribute not in state:
            continue
        old_checkpoint = True
        value = state.pop(prefix + attribute)
        if not isinstance(prior, TiedPrior):  # the key of the other module holds the same value
            state.setdefault(prefix + buffer_name(attribute), value)
    if old_checkpoint:
        # The checkpoint predates learned scales, which keep their values.
        for name, parameter in module._parameters.items():
            if parameter is not None and name.endswith("_scale_unconstrained"):
                state.setdefault(prefix + name, parameter.detach())
