# SPDX-License-Identifier: Apache-2.0
"""Which weights the processes draw."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from torch import nn

from pyro_dvi.core.undisturbed import accelerators, forked


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
