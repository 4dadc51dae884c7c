# SPDX-License-Identifier: Apache-2.0
r"""Training with several processes over ``torch.distributed``; each process has a part of every minibatch.

Each of K processes evaluates the objective on its M examples, so the plate's scale is :math:`N/M`. The mean over
processes is the objective of the joint minibatch: log-likelihoods, their gradients and other sums over examples get the
scale :math:`N/(KM)`, and the KL divergence is included once.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from typing import Any, TypeVar

import pyro
import torch
import torch.distributed as td
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.undisturbed import accelerators, forked, undisturbed
from pyro_dvi.errors import ArgumentError, DataError, NonFiniteError, PyroDviError, UnsupportedError
from pyro_dvi.objectives.objective import WrappedObjective
from pyro_dvi.objectives.recorded_step import LossWithGradients
from pyro_dvi.runs.sites import is_data, subsampled_share

T = TypeVar("T")


class DataParallel(WrappedObjective):
    r"""An objective of this library, evaluated and differentiated by all processes together.

    .. math:: \mathrm{loss} = \tfrac1K \sum_k \mathrm{loss}_k

    Every process builds the same model, guide and optimizer, and receives its own part of the data, for example from
    torch's ``DistributedSampler``. After each evaluation, all processes have the loss and the gradients of the joint
    minibatch, and the curvature for natural-gradient optimizers, so all optimizers take the same step. Any optimizer
    works: one of Pyro's in ``SVI``, or one of torch's for ``elbo(model, guide)``. If there is no process group, or only
    a single process, the objective is unchanged. The first step copies the parameters of process 0 to all other
    processes.

    Status: equal to one process with the joint minibatch, up to rounding, if the objective is a sum over examples:
    :class:`~pyro_dvi.MomentPropagationELBO`; :class:`~pyro_dvi.NaturalGradientELBO`;
    :class:`~pyro_dvi.TaylorELBO` with a ``GGN`` or ``EmpiricalFisher`` curvature. Curvatures with random labels
    (``Fisher``) agree in expectation, but with less noise. ``MinibatchGradient`` gives a different curvature, because
    it squares the gradient of each part, not the gradient of the joint minibatch.

    *Batch normalisation* in training mode uses the statistics of each part, as in torch's data parallelism, so the
    result differs from that of one process with the joint minibatch. After every evaluation, the running statistics are
    averaged over processes, so that all processes keep the same model. ``torch.nn.SyncBatchNorm`` raises an error,
    because it would wait for the other processes inside the model. Instead, use large parts, group or layer
    normalisation, or fixed statistics (``eval()``).

    All processes must have parts of the same size, as from ``DistributedSampler``, and take the same number of steps:
    ``fit`` compares the lengths of the loaders.

    :meth:`loss` uses only the data of this process. Write checkpoints in one process only; they can be loaded with or
    without this class.

    Args:
        elbo: the objective.
        own_draws: True to draw different weights in each process, so that gradients and curvature are averages over one
            draw per process. Each process may then use the complete data set. By default, all processes draw the same
            weights.
        group: process group; by default the global group.

    Attributes:
        elbo: the objective of one process.
        terms: detached parts of the last joint loss.

    Raises:
        ArgumentError: if the objective is not from this library.
        PyroDviError: in a step, if another process failed, or if the processes do not have the same parameters.
        UnsupportedError: if there are several processes but no process group, or if the model has synchronised batch
            normalisation.
        DataError: for parts of different sizes, or without a plate that gives the size of the data set.
        NonFiniteError: if the loss of a process is NaN or infinite; no process then updates its parameters.

    Example:
        >>> from pyro_dvi import NaturalGradientELBO
        >>> elbo = DataParallel(NaturalGradientELBO(kl_weight=0.1))
        >>> elbo.kl_weight
        0.1
    """

    _own = ("elbo", "own_draws", "group")

    def __init__(self, elbo: Any, *, own_draws: bool = False, group: Any = None) -> None:
        if isinstance(elbo, DataParallel) or not hasattr(elbo, "current_kl_weight"):
            raise ArgumentError(
                f"DataParallel needs an objective of this library, such as TaylorELBO(), not {type(elbo).__name__}"
            )
        self.elbo = elbo
        self.own_draws, self.group = own_draws, group
        self._seed: Any = None  # set in the first step
        self._prepared: tuple[Any, Any] | None = None

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Accumulate the gradients of the joint loss, and return this loss."""
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        if loss.requires_grad:
            loss.backward()
        return loss.item()

    def differentiable_loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Tensor:
        """Return the joint loss, whose backward pass gives the joint gradients.

        Processes are synchronised here, not in the backward pass: all processes must call this method, with gradients
        enabled.
        """
        if not torch.is_grad_enabled() or not _several(self.group):
            return self.elbo.differentiable_loss(model, guide, *args, **kwargs)  # type: ignore[no-any-return]
        self._prepare(model, guide, args, kwargs)
        seed, step, size = self._seed, self.elbo.step, td.get_world_size(self.group)
        stream = (seed, step, td.get_rank(self.group)) if self.own_draws else (seed, step)
        losses: list[Tensor] = []

        def evaluate() -> tuple[dict[str, float], dict[str, float]]:
            with _Draws(self._guide, (hash((*stream, run)) % 2**63 for run in count())) as run:
                losses.append(self.elbo.differentiable_loss(model, self._guide, *args, **kwargs))
            return run.shares, {name: float(value) for name, value in self.elbo.terms.items()}

        shares, terms = zip(*_results_of_all(evaluate, self.group), strict=True)
        if any(other != shares[0] for other in shares):
            raise DataError(
                f"the processes have parts of different sizes, by observed site {list(shares)}: use DistributedSampler"
            )
        if size > 1 and not self.own_draws and all(share == 1.0 for share in shares[0].values()):
            raise DataError(
                f"observed sites {list(shares[0])} are not in a plate that gives the size of the data set: use "
                "pyro.plate('data', size=N, subsample_size=len(x)), or own_draws=True if every process has all data"
            )
        bad = [k for k, own in enumerate(terms) if not math.isfinite(own["loss"])]
        if bad:
            raise NonFiniteError(
                f"the loss of process {bad[0]} is not finite ({terms[bad[0]]}); this affects {len(bad)} of {size} "
                "processes. Lower the learning rate, check for extreme inputs, or train in float64."
            )
        mean = {name: math.fsum(own[name] / size for own in terms) for name in terms[0]}
        self.elbo.terms = {name: self.elbo.terms[name].new_tensor(value) for name, value in mean.items()}
        return self._joint(losses[0], mean["loss"], model, guide)

    def check_number_of_batches(self, number: int) -> None:
        """Check that all processes have the same number of batches in a pass over the data.

        Raises:
            DataError: in all processes, if the numbers differ, because some processes would then wait forever.
        """
        counts = _messages(number, self.group)
        if len(set(counts)) > 1:
            raise DataError(
                f"the processes have different numbers of batches, {counts}: use torch's DistributedSampler"
            )

    def agreed(self, value: Any) -> Any:
        """Return the value of process 0 in all processes, because they may have measured different values."""
        return _messages(value, self.group)[0]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the objective, together with the seed of the draws."""
        return {**self.elbo.state_dict(), "draws_seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` of this class, or of the objective, has returned."""
        self.elbo.load_state_dict(state)
        self._seed = state.get("draws_seed")

    # A step -----------------------------------------------------------------------------------------------------

    def _joint(self, loss: Tensor, value: float, model: Any, guide: Any) -> Tensor:
        """Return a tensor with the value and the gradients of the joint loss."""
        ids = set(map(id, leaves_of([loss])))
        leaves = [p for _, p in sorted(_named_parameters(model, guide).items()) if id(p) in ids]
        gradients = torch.autograd.grad(loss, leaves, materialize_grads=True) if leaves else ()
        statistics = list(_running_statistics(model))
        means = _means([*gradients, *statistics], self.group)
        with torch.no_grad():
            for statistic, mean in zip(statistics, means[len(leaves) :], strict=True):
                statistic.copy_(mean)
        result: Tensor = LossWithGradients.apply(loss.new_tensor(value), means[: len(leaves)], *leaves)
        self.elbo.returned(result, guide)
        return result

    # The first step ---------------------------------------------------------------------------------------------

    def _prepare(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> None:
        """Create the parameters, and copy their values from process 0 to the other processes."""
        if self._prepared is not None and self._prepared[0] is model and self._prepared[1] is guide:
            return

        def create() -> tuple[set[str], int]:
            _refuse_synchronised(model)
            _create_parameters(model, guide, args, kwargs)
            found = {f"{n} {tuple(p.shape)} {p.dtype}" for n, p in _named_parameters(model, guide).items()}
            return found, torch.initial_seed() if self._seed is None else self._seed

        (first, self._seed), *others = _results_of_all(create, self.group)
        for k, (other, _) in enumerate(others, start=1):
            different = sorted(other ^ first)
            if different:
                raise PyroDviError(
                    f"processes 0 and {k} have different parameters, {different[:3]}: build the same model and guide."
                )
        buffers = dict(_modules_of(model, guide).named_buffers())
        source = 0 if self.group is None else td.get_global_rank(self.group, 0)
        for values in (_named_parameters(model, guide), buffers):
            for name in sorted(values):
                td.broadcast(values[name].data, src=source, group=self.group)
        self._prepared = (model, guide)
        self._guide = guide if isinstance(guide, nn.Module) else _GuideModule(guide)


class _GuideModule(nn.Module):
    """A module around a guide that is a function, because only modules have hooks."""

    def __init__(self, guide: Callable[..., Any]) -> None:
        super().__init__()
        functools.update_wrapper(self, guide, updated=())
        self.forward = guide


# Communication --------------------------------------------------------------------------------------------------


def _several(group: Any) -> bool:
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


def _messages(message: T, group: Any) -> list[T]:
    """Return the messages of all processes, in the order of the processes; only the own one without a process group."""
    if not _several(group):
        return [message]
    messages: list[Any] = [None] * td.get_world_size(group)
    td.all_gather_object(messages, message, group=group)
    return messages


def _results_of_all(work: Callable[[], T], group: Any) -> list[T]:
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
    messages = _messages((result, failure and f"{type(failure).__name__}: {failure}"), group)
    if failure is not None:
        raise failure
    for k, (_, failed) in enumerate(messages):
        if failed is not None:
            raise PyroDviError(f"process {k} failed: {failed}")
    return [other for other, _ in messages]


def _means(tensors: list[Any], group: Any) -> list[Tensor]:
    """Return the means of tensors over processes; one message is sent for each dtype and device."""
    means = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in tensors]
    for kind in dict.fromkeys((mean.dtype, mean.device) for mean in means):
        same = [mean for mean in means if (mean.dtype, mean.device) == kind]
        flat = torch.cat([mean.flatten() for mean in same]).div_(td.get_world_size(group))
        td.all_reduce(flat, group=group)
        for mean, total in zip(same, flat.split([mean.numel() for mean in same]), strict=True):
            mean.copy_(total.view_as(mean))
    return means


# Models and guides ----------------------------------------------------------------------------------------------


def _create_parameters(model: Any, guide: Any, args: tuple, kwargs: dict) -> None:
    """Create the parameters that exist only after a first call."""
    looks = getattr(guide, "prototype_trace", True) is None
    if looks or not (isinstance(model, nn.Module) and isinstance(guide, nn.Module)):
        with undisturbed(), torch.no_grad(), poutine.block():
            trace = poutine.trace(guide).get_trace(*args, **kwargs)
            poutine.replay(model, trace=trace)(*args, **kwargs)


def _refuse_synchronised(model: Any) -> None:
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


def _modules_of(model: Any, guide: Any) -> nn.ModuleDict:
    """Return the model and the guide by role, each only if it is a module."""
    parts = {"model": model, "guide": guide}
    return nn.ModuleDict({role: part for role, part in parts.items() if isinstance(part, nn.Module)})


def _named_parameters(model: Any, guide: Any) -> dict[str, Tensor]:
    """Return every parameter once, with a name that is the same in all processes."""
    named: dict[str, Tensor] = dict(_modules_of(model, guide).named_parameters())
    if not pyro.settings.get("module_local_params"):
        owned = {id(parameter) for parameter in named.values()}
        for name, value in pyro.get_param_store().named_parameters():
            if id(value) not in owned:
                named[f"store.{name}"] = value
    return named


def _running_statistics(model: Any) -> Iterator[Tensor]:
    """Yield means and variances that batch normalisation updates in training mode."""
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None:
            yield from (module.running_mean, module.running_var)  # type: ignore[misc]


class _Draws(Messenger):
    """Seed the draws of weights while an objective is evaluated, and record which part of the data set it sees.

    Each run of the guide uses the next seed. So does each run of the model, up to its observations, because objectives
    draw some latents in the guide and others in the model. Later draws, such as random labels, use the generator of
    this process.

    Args:
        guide: the guide.
        seeds: one seed per run.

    Attributes:
        shares: the part of the data set that each observed site sees.
    """

    def __init__(self, guide: nn.Module, seeds: Iterator[int]) -> None:
        super().__init__()
        self.shares: dict[str, float] = {}
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
        if is_data(msg):
            # The first run of a step has all rows; a curvature may run the model again on only some of these.
            self.shares.setdefault(msg["name"], subsampled_share(msg))
