# SPDX-License-Identifier: Apache-2.0
"""Messages between processes, their shares of the joint minibatch, and the weights that they draw."""

import functools
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as td
from pyro.poutine.messenger import Messenger
from torch import nn

from pyro_dvi.core.undisturbed import accelerators, forked
from pyro_dvi.errors import DataError, ModelError, PyroDviError, UnsupportedError
from pyro_dvi.runs.sites import is_data, subsampled_share

T = TypeVar("T")


def several(group: Any) -> bool:
    """Whether there are other processes to talk to.

    Raises:
        UnsupportedError: torchrun has started several, which do not know each other.
    """
    if td.is_available() and td.is_initialized():
        return True
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnsupportedError(
            f"this is one of {os.environ['WORLD_SIZE']} processes (WORLD_SIZE), but there is no process group: call "
            "torch.distributed.init_process_group() at the start of the script"
        )
    return False


def exchange(message: T, group: Any) -> list[T]:
    """Return the messages of all processes, in their order.

    Raises:
        PyroDviError: a process did not come, within the time that the process group allows.
    """
    messages: list[Any] = [None] * td.get_world_size(group)
    try:
        td.all_gather_object(messages, message, group=group)
    except RuntimeError as error:
        raise PyroDviError(
            f"process {td.get_rank(group)} waited for the others, but not all came: one has ended or failed, or has no "
            "batch left where this one has. Every process must take as many steps: give all as many batches, as "
            "torch's DistributedSampler does, or let DataParallel go on without those that have none, by for x, y in "
            f"JointBatches(loader, elbo). ({str(error).splitlines()[0]})"
        ) from error
    return messages


def exchange_results(work: Callable[[], T], group: Any, what: str = "") -> list[T]:
    """Let each process do some work by itself, and return the results of all, in their order.

    Raises:
        Exception: the work of this process failed.
        PyroDviError: that of another process failed.
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
            raise PyroDviError(f"{what}process {k} failed: {failed}")
    return [other for other, _ in messages]


class Fractions(Messenger):
    """Note which part of the data set each observed site sees."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, float] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        if not is_data(msg):
            return
        fraction = subsampled_share(msg)
        scale = msg["scale"]
        if fraction == 1.0 and not (torch.is_tensor(scale) and scale.numel() > 1):
            fraction = 1.0 / float(scale)
        # The first run of a step sees all rows; a curvature may look at some of them again.
        self.found.setdefault(msg["name"], fraction)


def weights_of(fractions: list[dict[str, float]], whole_data: bool) -> list[float]:
    r"""Weights :math:`m_k / \sum_j m_j` of the processes."""
    if len(fractions) == 1:
        return [1.0]
    sites = fractions[0]
    if not sites or any(set(other) != set(sites) for other in fractions):
        raise ModelError(
            f"the processes do not observe the same sites: {[sorted(other) for other in fractions]}. Each needs some "
            "of the data in every step."
        )
    split = [site for site in sites if any(other[site] != 1.0 for other in fractions)]
    if not split:
        if whole_data:
            return [1 / len(fractions)] * len(fractions)
        raise DataError(
            f"observed site {next(iter(sites))!r} does not say how large the data set is, so the parts of the "
            "processes cannot be put together: use pyro.plate('data', size=N, subsample_size=len(x)) with the "
            "number N of all examples. If every process has all of them, pass draws=OwnDraws()."
        )
    totals = {site: math.fsum(other[site] for other in fractions) for site in split}
    first, *others = ([other[site] / totals[site] for other in fractions] for site in split)
    for site, weights in zip(split[1:], others, strict=True):
        if not np.allclose(weights, first, rtol=0.0, atol=1e-9):
            raise UnsupportedError(
                f"the observed sites {split[0]!r} and {site!r} are split among the processes in different proportions: "
                "give each process the same share of all data"
            )
    return first


class Draws(ABC):
    """Whether processes draw the same weights, where an objective samples from the guide."""

    whole_data: bool
    """Whether processes may all have the whole data set."""

    @abstractmethod
    def seed(self, base: int, step: int, run: int, rank: int) -> int:
        """Return the seed of a run of the guide.

        Args:
            base: the seed that all processes share.
            step: training steps done.
            run: number of the run in this step.
            rank: number of the process.
        """


@dataclass(frozen=True)
class SharedDraws(Draws):
    """Draw the same weights in all processes: together they do what one would do with the joint minibatch."""

    whole_data = False

    def seed(self, base: int, step: int, run: int, rank: int) -> int:
        """Return the same for every process."""
        return hash((base, step, run)) % 2**63


@dataclass(frozen=True)
class OwnDraws(Draws):
    """Draw other weights in each process: gradients and curvature are averages over as many draws as processes."""

    whole_data = True

    def seed(self, base: int, step: int, run: int, rank: int) -> int:
        """Return another one for every process."""
        return hash((base, step, run, rank)) % 2**63


class AnnouncedFunction:
    """A guide that is a function, which says when it is called."""

    def __init__(self, guide: Callable[..., Any]) -> None:
        functools.update_wrapper(self, guide, updated=())
        self.guide = guide
        self.announce: Callable[[], None] = lambda: None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Announce and run."""
        self.announce()
        return self.guide(*args, **kwargs)


@contextmanager
def seeded(guide: nn.Module | AnnouncedFunction, seeds: Iterator[int]) -> Iterator[None]:
    """Let every run of the guide, and of the model up to its observations, draw from the next seed.

    Objectives draw some latents in the guide, others when the model asks for them. What comes after, such as random
    labels, is drawn from the generator of this process.

    Args:
        guide: the guide.
        seeds: a seed for each of its runs.
    """
    fork = ExitStack()

    def enter(*_: Any) -> None:
        fork.close()
        fork.enter_context(forked(*accelerators()))
        torch.manual_seed(next(seeds))

    handle = None
    if isinstance(guide, AnnouncedFunction):
        guide.announce = enter
    else:
        handle = guide.register_forward_pre_hook(enter)
    try:
        with _AtObservation(fork.close):
            yield
    finally:
        fork.close()
        if handle is not None:
            handle.remove()


class _AtObservation(Messenger):
    """Call a function when the model has reached an observed site."""

    def __init__(self, function: Callable[[], None]) -> None:
        super().__init__()
        self.function = function

    def _pyro_post_sample(self, msg: Any) -> None:
        if msg["is_observed"]:
            self.function()
