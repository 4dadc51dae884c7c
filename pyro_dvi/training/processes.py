# SPDX-License-Identifier: Apache-2.0
"""Communication between processes: fractions of the joint minibatch, parameters, and seeds of draws."""

import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeVar

import numpy as np
import pyro
import pyro.poutine as poutine
import torch
import torch.distributed as td
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.undisturbed import accelerators, forked, undisturbed
from pyro_dvi.errors import DataError, GuideError, ModelError, PyroDviError, UnsupportedError
from pyro_dvi.runs.sites import is_data, subsampled_share

T = TypeVar("T")


def several(group: Any) -> bool:
    """Return True if there is a process group.

    Raises:
        UnsupportedError: if torchrun has started several processes, but there is no process group.
    """
    if td.is_available() and td.is_initialized():
        return True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedError(
            f"this is one of {os.environ['WORLD_SIZE']} processes, but there is no process group: call "
            "torch.distributed.init_process_group() at the start of the script"
        )
    return False


def exchange(message: T, group: Any) -> list[T]:
    """Return the messages of all processes, in the order of the processes.

    Raises:
        PyroDviError: if a process sends nothing within the timeout of the process group.
    """
    messages: list[Any] = [None] * td.get_world_size(group)
    try:
        td.all_gather_object(messages, message, group=group)
    except RuntimeError as error:
        raise PyroDviError(
            f"process {td.get_rank(group)} waited for the others, but one has ended or failed, or has no batch left "
            f"({str(error).splitlines()[0]}). All processes need the same number of batches, as with torch's "
            "DistributedSampler"
        ) from error
    return messages


def exchange_results(work: Callable[[], T], group: Any) -> list[T]:
    """Call ``work`` in each process, and return the results of all processes, in the order of the processes.

    Raises:
        Exception: if ``work`` failed in this process.
        PyroDviError: if ``work`` failed in another process.
    """
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except Exception as error:
        failure = error
    messages = exchange((result, failure and f"{type(failure).__name__}: {failure}"), group)
    if failure is not None:
        raise failure
    for k, (_, failed) in enumerate(messages):
        if failed is not None:
            raise PyroDviError(f"process {k} failed: {failed}")
    return [other for other, _ in messages]


def weights_of(fractions: list[dict[str, float]], whole_data: bool) -> list[float]:
    r"""Return the weights :math:`m_k / \sum_j m_j` of the processes."""
    if len(fractions) == 1:
        return [1.0]
    sites = fractions[0]
    if not sites or any(set(other) != set(sites) for other in fractions):
        raise ModelError(
            f"the processes do not observe the same sites: {[sorted(other) for other in fractions]}"
        )
    split = [site for site in sites if any(other[site] != 1.0 for other in fractions)]
    if not split:
        if whole_data:
            return [1 / len(fractions)] * len(fractions)
        raise DataError(
            f"observed site {next(iter(sites))!r} is not in a plate that gives the size of the data set: use "
            "pyro.plate('data', size=N, subsample_size=len(x)), or own_draws=True if every process has all N examples"
        )
    totals = {site: math.fsum(other[site] for other in fractions) for site in split}
    first, *others = ([other[site] / totals[site] for other in fractions] for site in split)
    for site, weights in zip(split[1:], others, strict=True):
        if not np.allclose(weights, first, rtol=0.0, atol=1e-9):
            raise UnsupportedError(
                f"the observed sites {split[0]!r} and {site!r} are split between processes in different proportions: "
                "give each process the same fraction of both"
            )
    return first


def weighted_sums(tensors: list[Any], weight: float, group: Any) -> list[Tensor]:
    """Return the weighted sums of tensors over processes; one message is sent for each dtype and device."""
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


def create_parameters(model: Any, guide: Any, args: tuple, kwargs: dict) -> None:
    """Create the parameters that exist only after a first call."""
    looks = getattr(guide, "prototype_trace", True) is None
    if looks or not (isinstance(model, nn.Module) and isinstance(guide, nn.Module)):
        with undisturbed(), torch.no_grad(), poutine.block():
            trace = poutine.trace(guide).get_trace(*args, **kwargs)
            poutine.replay(model, trace=trace)(*args, **kwargs)


def refuse_synchronised(model: Any) -> None:
    """Raise an error for batch normalisation that communicates with other processes.

    Raises:
        UnsupportedError: if there is such a layer; the message names it and an alternative.
    """
    for name, module in model.named_modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, nn.SyncBatchNorm):
            raise UnsupportedError(
                f"layer {name!r} is torch.nn.SyncBatchNorm, which would wait for the other processes inside the model: "
                "use nn.BatchNorm1d/2d/3d, whose running statistics DataParallel averages, or nn.GroupNorm"
            )


def modules_of(model: Any, guide: Any) -> nn.ModuleDict:
    """Return the model and the guide by role, each only if it is a module."""
    parts = {"model": model, "guide": guide}
    return nn.ModuleDict({role: part for role, part in parts.items() if isinstance(part, nn.Module)})


def named_parameters(model: Any, guide: Any) -> dict[str, Tensor]:
    """Return every parameter once, with a name that is the same in all processes."""
    named: dict[str, Tensor] = dict(modules_of(model, guide).named_parameters())
    if not pyro.settings.get("module_local_params"):
        owned = {id(parameter) for parameter in named.values()}
        for name, value in pyro.get_param_store().named_parameters():
            if id(value) not in owned:
                named[f"store.{name}"] = value
    return named


def named_leaves(loss: Tensor, model: Any, guide: Any) -> dict[str, Tensor]:
    """Return the parameters that the loss depends on, by name."""
    names = {id(parameter): name for name, parameter in named_parameters(model, guide).items()}
    leaves: dict[str, Tensor] = {}
    for leaf in leaves_of([loss]):
        if id(leaf) not in names:
            raise GuideError(
                f"the loss depends on a tensor of shape {tuple(leaf.shape)} that is not a parameter of model, guide "
                "or Pyro's store: make it an nn.Parameter or pyro.param"
            )
        leaves[names[id(leaf)]] = leaf
    return leaves


def running_statistics(model: Any) -> Iterator[Tensor]:
    """Yield means and variances that batch normalisation updates in training mode."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
            yield from (module.running_mean, module.running_var)  # type: ignore[misc]


class JointRun(Messenger):
    """Seed the draws of weights while an objective is evaluated, and record which part of the data set it sees.

    Each run of the guide uses the next seed. So does each run of the model, up to its observations, because objectives
    draw some latents in the guide and others in the model. Later draws, such as random labels, use the generator of
    this process.

    Args:
        guide: the guide.
        seeds: one seed per run.

    Attributes:
        fractions: the part of the data set that each observed site sees.
    """

    def __init__(self, guide: nn.Module, seeds: Iterator[int]) -> None:
        super().__init__()
        self.fractions: dict[str, float] = {}
        self._guide, self._seeds, self._fork = guide, seeds, ExitStack()

    def __enter__(self) -> Any:
        self._hook = self._guide.register_forward_pre_hook(self._before_run)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        self._fork.close()
        self._hook.remove()
        super().__exit__(*error)

    def _before_run(self, *_: Any) -> None:
        self._fork.close()
        self._fork.enter_context(forked(*accelerators()))
        torch.manual_seed(next(self._seeds))

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["is_observed"]:
            self._fork.close()
        if not is_data(msg):
            return
        fraction = subsampled_share(msg)
        scale = msg["scale"]
        if fraction == 1.0 and not (torch.is_tensor(scale) and scale.numel() > 1):
            fraction = 1.0 / float(scale)
        # The first run of a step has all rows; a curvature may run the model again on only some of these.
        self.fractions.setdefault(msg["name"], fraction)
