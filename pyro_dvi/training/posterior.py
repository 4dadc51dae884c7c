# SPDX-License-Identifier: Apache-2.0
"""Trained posteriors that do not touch each other: each has a parameter store of its own."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyro
from pyro.params.param_store import StateDict
from torch import Tensor, nn

from pyro_dvi.errors import ArgumentError
from pyro_dvi.training.random_state import preserve_random_state


@dataclass(frozen=True, eq=False)
class TrainedPosterior:
    """A model and its trained guide, with what training left in Pyro's parameter store.

    Attributes:
        model: the Pyro model.
        guide: its posterior.
        store: state of the store; without entries where the parameters live in the modules.
    """

    model: Any
    guide: Any
    store: StateDict

    @contextmanager
    def in_store(self) -> Iterator[None]:
        """Let Pyro's store hold the parameters of this posterior only while the block runs."""
        with pyro.get_param_store().scope(self.store):
            yield

    def put_back(self) -> None:
        """Put the parameters into Pyro's store, where they replace others of the same names."""
        pyro.get_param_store().set_state(self.store)

    def trainable(self) -> dict[int, tuple[str, Tensor]]:
        """Return names and tensors of what training may have moved, by identity."""
        parts = [part for part in (self.model, self.guide) if isinstance(part, nn.Module)]
        named = [*self.store["params"].items(), *(pair for part in parts for pair in part.named_parameters())]
        return {id(tensor): (name, tensor) for name, tensor in named if tensor.requires_grad}


def train_apart(
    train: Callable[[], Any], seed: int, others: Iterable[TrainedPosterior] = ()
) -> TrainedPosterior:
    """Run a training with a seed and an empty parameter store, and keep what it returns with that store.

    Random numbers and Pyro's store are outside as if nothing had happened.

    Args:
        train: builds and trains a model and its guide, and returns the two.
        seed: of the generators of torch, NumPy and Python.
        others: posteriors trained before, which it must not have changed.

    Raises:
        ArgumentError: ``train`` returns something else, or trains parameters of one of the others.

    Example:
        >>> import pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def train():
        ...     model = lambda: pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     guide = AutoNormal(model)
        ...     guide()  # here it would be trained
        ...     return model, guide
        >>> pyro.clear_param_store()
        >>> posterior = train_apart(train, seed=0)
        >>> list(posterior.store["params"]), list(pyro.get_param_store())
        (['AutoNormal.locs.w', 'AutoNormal.scales.w'], [])
    """
    with preserve_random_state(), pyro.get_param_store().scope() as store:
        pyro.set_rng_seed(seed)
        result = train()
    if not (isinstance(result, tuple) and len(result) == 2 and all(map(callable, result))):
        raise ArgumentError(f"train must return a tuple (model, guide), not {type(result).__name__}")
    posterior = TrainedPosterior(*result, store)
    own = posterior.trainable()
    for other in others:
        for key, (name, _) in other.trainable().items():
            if key in own:
                raise ArgumentError(
                    f"two trainings have moved the same parameter, {name!r}: each must begin anew. Build the network, "
                    "the model and the guide inside train (copy.deepcopy of a network is enough); freeze what they are "
                    "meant to share with requires_grad_(False)"
                )
    return posterior
