# SPDX-License-Identifier: Apache-2.0
"""The parameters of model and guide under names that all processes share, and sums of tensors over processes."""

from collections.abc import Iterator
from typing import Any

import pyro
import pyro.poutine as poutine
import torch
import torch.distributed as td
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.undisturbed import undisturbed
from pyro_dvi.errors import GuideError, UnsupportedError


def create_parameters(model: Any, guide: Any, args: tuple, kwargs: dict) -> None:
    """Make parameters exist that a first call creates."""
    looks = getattr(guide, "prototype_trace", True) is None
    if looks and hasattr(guide, "initialize"):
        guide.initialize(*args, **kwargs)
    elif looks or not (isinstance(model, nn.Module) and isinstance(guide, nn.Module)):
        with undisturbed(), torch.no_grad(), poutine.block():
            trace = poutine.trace(guide).get_trace(*args, **kwargs)
            poutine.replay(model, trace=trace)(*args, **kwargs)


def refuse_synchronised(model: Any) -> None:
    """Refuse batch normalisation that meets other processes by itself.

    Raises:
        UnsupportedError: naming the layer and what to use instead.
    """
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"layer {name!r} is torch.nn.SyncBatchNorm, which talks to the other processes whenever the model "
                "runs; objectives run it at times of their own. Use nn.BatchNorm1d/2d/3d, whose running statistics "
                "DataParallel averages, or nn.GroupNorm or nn.LayerNorm, which need no statistics of the minibatch."
            )


def modules_of(model: Any, guide: Any) -> nn.ModuleDict:
    """Return model and guide, as far as they are modules."""
    parts = {"model": model, "guide": guide}
    return nn.ModuleDict({role: part for role, part in parts.items() if isinstance(part, nn.Module)})


def named_parameters(model: Any, guide: Any) -> dict[str, Tensor]:
    """Every parameter once, by a name that is the same in all processes."""
    named: dict[str, Tensor] = dict(modules_of(model, guide).named_parameters())
    if not pyro.settings.get("module_local_params"):
        owned = {id(parameter) for parameter in named.values()}
        for name, value in pyro.get_param_store().named_parameters():
            if id(value) not in owned:
                named[f"store.{name}"] = value
    return named


def named_leaves(loss: Tensor, model: Any, guide: Any) -> dict[str, Tensor]:
    """The parameters that the loss depends on, by name."""
    names = {id(parameter): name for name, parameter in named_parameters(model, guide).items()}
    leaves: dict[str, Tensor] = {}
    for leaf in leaves_of([loss]):
        if id(leaf) not in names:
            raise GuideError(
                f"the loss depends on a tensor of shape {tuple(leaf.shape)} with gradients that is no parameter of "
                "the model, the guide or Pyro's store, so processes cannot tell which of theirs it is: make it an "
                "nn.Parameter or pyro.param"
            )
        leaves[names[id(leaf)]] = leaf
    return leaves


def running_statistics(model: Any) -> Iterator[Tensor]:
    """Yield means and variances that batch normalisation has just updated."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
            yield from (module.running_mean, module.running_var)  # type: ignore[misc]


def weighted_sums(tensors: list[Any], weight: float, group: Any) -> list[Tensor]:
    """Sum tensors times weights over processes, in one message for each type and device."""
    results: list[Any] = [None] * len(tensors)
    kinds: dict[Any, list[int]] = {}
    for k, tensor in enumerate(tensors):
        kinds.setdefault((tensor.dtype, tensor.device), []).append(k)
    for positions in kinds.values():
        flat = torch.cat([tensors[k].detach().reshape(-1) for k in positions]).mul_(weight)
        td.all_reduce(flat, group=group)
        parts = flat.split([tensors[k].numel() for k in positions])
        for k, part in zip(positions, parts, strict=True):
            results[k] = part.view(tensors[k].shape)
    return results
