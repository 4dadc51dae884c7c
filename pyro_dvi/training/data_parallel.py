# SPDX-License-Identifier: Apache-2.0
r"""Training with several processes over ``torch.distributed``; each process has a part of every minibatch.

Process k evaluates the objective on its :math:`m_k` examples, so the plate's scale is :math:`N/m_k`. The sum over
processes, weighted by :math:`m_k/\sum_j m_j`, is the objective of the joint minibatch: log-likelihoods, their gradients
and other sums over examples get the scale :math:`N/\sum_j m_j`, and the KL divergence is included once.
"""

import functools
import math
from collections.abc import Callable
from itertools import count, islice
from typing import Any, NamedTuple

import torch
import torch.distributed as td
from torch import Tensor, nn

from pyro_dvi.errors import ArgumentError, DataError, NonFiniteError, PyroDviError
from pyro_dvi.objectives.objective import WrappedObjective
from pyro_dvi.objectives.recorded_step import LossWithGradients
from pyro_dvi.training.processes import (
    JointRun,
    create_parameters,
    exchange,
    exchange_results,
    modules_of,
    named_leaves,
    named_parameters,
    refuse_synchronised,
    running_statistics,
    several,
    weighted_sums,
    weights_of,
)


class DataParallel(WrappedObjective):
    r"""An objective of this library, evaluated and differentiated by all processes together.

    .. math:: \mathrm{loss} = \sum_k w_k\, \mathrm{loss}_k, \qquad w_k = \frac{m_k}{\sum_j m_j}

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
    averaged over processes, weighted by the sizes of the parts, so that all processes keep the same model.
    ``torch.nn.SyncBatchNorm`` raises an error, because it would wait for the other processes inside the model. Instead,
    use large parts, group or layer normalisation, or fixed statistics (``eval()``).

    *Uneven parts* are weighted by their size. All processes must take the same number of steps: ``fit`` compares the
    lengths of the loaders.

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
        UnsupportedError: if there are several processes but no process group, if observed sites are split in different
            proportions, or if the model has synchronised batch normalisation.
        DataError: for a minibatch without a plate that gives the size of the data set.
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
        if not torch.is_grad_enabled() or not several(self.group):
            return self.elbo.differentiable_loss(model, guide, *args, **kwargs)  # type: ignore[no-any-return]
        self._prepare(model, guide, args, kwargs)
        losses: list[Tensor] = []
        seed, step, rank = self._seed, self.elbo.step, td.get_rank(self.group)
        stream = (seed, step, rank) if self.own_draws else (seed, step)
        seeds = (hash((*stream, run)) % 2**63 for run in count())

        def evaluate() -> _Evaluation:
            with JointRun(self._guide, seeds) as run:
                loss = self.elbo.differentiable_loss(model, self._guide, *args, **kwargs)
            losses.append(loss)
            terms = {name: float(value) for name, value in self.elbo.terms.items()}
            return _Evaluation(run.fractions, terms, sorted(named_leaves(loss, model, guide)))

        messages = exchange_results(evaluate, self.group)
        weights = weights_of([m.fractions for m in messages], self.own_draws)
        terms = {
            name: math.fsum(w * m.terms[name] for w, m in zip(weights, messages, strict=True))
            for name in messages[0].terms
        }
        self.elbo.terms = {name: self.elbo.terms[name].new_tensor(value) for name, value in terms.items()}
        bad = [k for k, message in enumerate(messages) if not math.isfinite(message.terms["loss"])]
        if bad:
            raise NonFiniteError(
                f"the loss of process {bad[0]} is not finite ({messages[bad[0]].terms}); this affects {len(bad)} of "
                f"{len(messages)} processes. Lower the learning rate, check for extreme inputs, or train in float64."
            )
        names = sorted({name for message in messages for name in message.leaves})
        return self._joint(losses[0], terms["loss"], names, model, guide, weights[rank])

    def check_number_of_batches(self, number: int) -> None:
        """Check that all processes have the same number of batches in a pass over the data.

        Raises:
            DataError: in all processes, if the numbers differ, because some processes would then wait forever.
        """
        counts = exchange(number, self.group) if several(self.group) else [number]
        if len(set(counts)) > 1:
            raise DataError(
                f"the processes have different numbers of batches, {counts}: use torch's DistributedSampler"
            )

    def agreed(self, value: Any) -> Any:
        """Return the value of process 0 in all processes, because they may have measured different values."""
        return exchange(value, self.group)[0] if several(self.group) else value

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the objective, together with the seed of the draws."""
        return {**self.elbo.state_dict(), "draws_seed": self._seed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that :meth:`state_dict` of this class, or of the objective, has returned."""
        self.elbo.load_state_dict(state)
        self._seed = state.get("draws_seed")

    # A step -----------------------------------------------------------------------------------------------------

    def _joint(
        self, loss: Tensor, value: float, names: list[str], model: Any, guide: Any, weight: float
    ) -> Tensor:
        """Return a tensor with the value and the gradients of the joint loss."""
        parameters = named_parameters(model, guide)
        leaves = [parameters[name] for name in names]
        gradients: list[Tensor] = []
        if leaves:
            found = torch.autograd.grad(loss, leaves, allow_unused=True)
            gradients = [torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found, strict=True)]
        statistics = list(running_statistics(model))
        sums = iter(weighted_sums([*gradients, *statistics], weight, self.group))
        gradients = list(islice(sums, len(gradients)))
        with torch.no_grad():
            for statistic, total in zip(statistics, sums, strict=True):
                statistic.copy_(total)
        result: Tensor = LossWithGradients.apply(loss.new_tensor(value), gradients, *leaves)
        self.elbo.returned(result, guide)
        return result

    # The first step ---------------------------------------------------------------------------------------------

    def _prepare(self, model: Any, guide: Any, args: tuple, kwargs: dict) -> None:
        """Create the parameters, and copy their values from process 0 to the other processes."""
        if self._prepared is not None and self._prepared[0] is model and self._prepared[1] is guide:
            return

        def create() -> tuple[set[str], int]:
            refuse_synchronised(model)
            create_parameters(model, guide, args, kwargs)
            found = {f"{n} {tuple(p.shape)} {p.dtype}" for n, p in named_parameters(model, guide).items()}
            return found, torch.initial_seed() if self._seed is None else self._seed

        (first, self._seed), *others = exchange_results(create, self.group)
        for k, (other, _) in enumerate(others, start=1):
            different = sorted(other ^ first)
            if different:
                raise PyroDviError(
                    f"processes 0 and {k} do not have the same parameters: {different[:3]}. Build the same model and "
                    "guide in all of them."
                )
        buffers = dict(modules_of(model, guide).named_buffers())
        source = 0 if self.group is None else td.get_global_rank(self.group, 0)
        for values in (named_parameters(model, guide), buffers):
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


class _Evaluation(NamedTuple):
    """The message that a process sends to the other processes about its evaluation of the objective."""

    fractions: dict[str, float]
    terms: dict[str, float]
    leaves: list[str]
