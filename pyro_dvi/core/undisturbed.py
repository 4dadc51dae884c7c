# SPDX-License-Identifier: Apache-2.0
"""Run a model for inspection without updating statistics or advancing random generators."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from pyro_dvi.core.in_turn import in_turn


def accelerators() -> list[torch.device]:
    """Return the devices other than the CPU from whose generators this process may have drawn."""
    kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if kind is None:
        return []
    module = torch.get_device_module(kind)
    if not getattr(module, "is_initialized", lambda: True)():  # querying the device would initialise it
        return []
    return [torch.device(kind.type, k) for k in range(module.device_count())]


def device_of(*functions: Any) -> torch.device | None:
    """Return the device of the first parameter or buffer in any of the modules; None if there is none."""
    modules = [function for function in functions if isinstance(function, nn.Module)]
    tensors = chain.from_iterable(chain(module.parameters(), module.buffers()) for module in modules)
    return next((tensor.device for tensor in tensors), None)


def state_of(device: torch.device) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    """Return two functions, which read and set the state of the device's global generator."""
    if device.type == "cpu":
        return torch.get_rng_state, torch.set_rng_state
    module = torch.get_device_module(device)
    if device.type == "mps":  # a single device, without an index
        return module.get_rng_state, module.set_rng_state
    return partial(module.get_rng_state, device), partial(module.set_rng_state, device=device)


@contextmanager
def forked(*devices: torch.device | None) -> Iterator[None]:
    """Restore the generators of the CPU and of these devices at the end of the context.

    Example:
        >>> with forked():
        ...     first = torch.rand(())
        >>> bool(first == torch.rand(()))
        True
    """
    used = {torch.device("cpu"), *(device for device in devices if device is not None)}
    generators = [state_of(device) for device in used]
    before = [get() for get, _ in generators]
    try:
        yield
    finally:
        for (_, put), state in zip(generators, before, strict=True):
            put(state)


def seeder() -> Callable[[int], Any]:
    """Return a function that seeds all global generators.

    Without an accelerator, this avoids ``torch.manual_seed``, which records the seed for accelerators together with a
    stack trace; this recording takes longer than a run of a small model.
    """
    return torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


def reseeded(count: int) -> Iterator[None]:
    """Seed all global generators ``count`` times; the seeds are drawn beforehand from torch's default generator.

    The next draw then does not depend on how many random numbers a draw uses.
    """
    seed_all = seeder()
    for seed in torch.randint(2**31 - 1, (count,)).tolist():
        seed_all(seed)
        yield


def widest(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on devices without float64, such as Apple's.

    Example:
        >>> widest(torch.device("cpu"))
        torch.float64
    """
    try:
        return torch.empty(0, dtype=torch.float64, device=device).dtype
    except TypeError:
        return torch.float32


@contextmanager
def modules_met(meet: Callable[[nn.Module], None], *functions: Any) -> Iterator[None]:
    """Call ``meet`` with every module inside ``functions``, and with every module before it runs in the context.

    This includes modules that a plain function calls. Other threads wait, because the hook is global; modules that they
    run meanwhile, such as those of a loader, are not met.
    """
    own = get_ident()

    def before_run(module: nn.Module, _inputs: object) -> None:
        if get_ident() == own:
            meet(module)

    with in_turn, nn.modules.module.register_module_forward_pre_hook(before_run):
        for function in functions:
            if isinstance(function, nn.Module):
                for module in function.modules():
                    meet(module)
        yield


@contextmanager
def _changed(change: Callable[[nn.Module, ExitStack], None], *functions: Any) -> Iterator[None]:
    """Change every module that is found, and undo the changes at the end of the context."""
    with ExitStack() as undo, modules_met(lambda module: change(module, undo), *functions):
        yield


def without_autocast(device: torch.device) -> Any:
    """Return a context in which a device computes in the dtypes of its arguments."""
    kind = device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()


@contextmanager
def undisturbed() -> Iterator[None]:
    """Restore buffers and the random state at the end of the context.

    Example:
        >>> with undisturbed():
        ...     first = torch.rand(())
        >>> bool(first == torch.rand(()))
        True
    """
    with preserve_buffers(), forked(*accelerators()):
        yield


def evaluating(*functions: Any) -> AbstractContextManager[None]:
    """Run modules in evaluation mode, and restore the mode of each afterwards.

    Modules are found inside ``functions`` and, by a forward hook, wherever a plain function calls them. In both cases,
    batch normalisation keeps its running statistics, and dropout is disabled.

    Example:
        >>> net = nn.Dropout()
        >>> with evaluating():
        ...     print(net(torch.ones(2)))
        tensor([1., 1.])
        >>> net.training
        True
    """

    def switch(module: nn.Module, undo: ExitStack) -> None:
        if module.training:
            undo.callback(setattr, module, "training", True)
            module.training = False

    return _changed(switch, *functions)


def constant_parameters(*functions: Any) -> AbstractContextManager[None]:
    """Run modules with their own parameters as constants, so that no autograd graph is built for the parameters.

    Modules are found as in :func:`evaluating`.

    Example:
        >>> net = nn.Linear(1, 1)
        >>> with constant_parameters():
        ...     net(torch.ones(1)).requires_grad
        False
        >>> net.weight.requires_grad
        True
    """

    def switch(module: nn.Module, undo: ExitStack) -> None:
        for parameter in module.parameters(recurse=False):
            # torch.func.functional_call inserts other tensors here, such as latents
            if parameter.requires_grad and isinstance(parameter, nn.Parameter):
                undo.callback(parameter.requires_grad_)
                parameter.requires_grad_(False)

    return _changed(switch, *functions)


def preserve_buffers() -> AbstractContextManager[None]:
    """Replace the buffers of every module that runs in the context by copies, and restore the originals afterwards.

    A guide that inspects its model, or ``Predictive`` in training mode, runs the network and thereby updates the
    running statistics of batch normalisation. Modules are found with a forward hook, so models that are functions
    around a network are covered as well. The originals are never written to, so graphs that saved them stay valid.

    Example:
        >>> norm = torch.nn.BatchNorm1d(2)
        >>> with preserve_buffers():
        ...     _ = norm(torch.ones(4, 2))
        >>> norm.running_mean
        tensor([0., 0.])
    """
    lent: dict[int, nn.Module] = {}

    def lend_copies(module: nn.Module, undo: ExitStack) -> None:
        if module._buffers and id(module) not in lent:
            lent[id(module)] = module
            kept = {name: b for name, b in module._buffers.items() if b is not None}
            undo.callback(module._buffers.update, kept)
            module._buffers.update({name: b.clone() for name, b in kept.items()})

    return _changed(lend_copies)


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """Run attention layer by layer instead of with a fused kernel, which calls no module and may use nested tensors."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
