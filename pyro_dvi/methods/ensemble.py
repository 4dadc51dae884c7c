# SPDX-License-Identifier: Apache-2.0
"""Ensembles of any method."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyro

from pyro_dvi.core.arguments import check_count
from pyro_dvi.errors import ArgumentError
from pyro_dvi.methods.method import Method
from pyro_dvi.methods.models import is_network
from pyro_dvi.methods.posterior import Posterior
from pyro_dvi.methods.trained import MAP
from pyro_dvi.training import EnsembleGuide
from pyro_dvi.training.ensemble import train_apart
from pyro_dvi.training.random_state import preserve_random_state


@dataclass(frozen=True)
class Ensemble:
    """The same method several times, each from its own random weights; predictions are averaged.

    Args:
        member: the method.
        num_members: how many.

    Example:
        >>> import torch, pyro_dvi as dvi
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> posterior = dvi.Ensemble(dvi.MAP(), 2).fit(
        ...     torch.nn.Linear(1, 1), [(x, 2 * x)], 5, progress=False
        ... )
        >>> posterior.predict(x).mean.shape, len(posterior.guide.members)
        (torch.Size([40]), 2)
    """

    member: Method = MAP()
    num_members: int = 5

    def fit(
        self, net: Any, loader: Iterable[Any], epochs: int, *, seed: int = 0, **options: Any
    ) -> Posterior:
        """Train all members.

        Args:
            net: a torch module, whose copies get new random weights by ``reset_parameters()`` of its layers.
            loader: as for :meth:`Method.fit`.
            epochs: of each training.
            seed: of the first training; the others have the following ones.
            **options: of :func:`~pyro_dvi.fit`.

        Raises:
            ArgumentError: a Pyro model, or a network whose layers cannot reset their weights.
        """
        check_count("num_members", self.num_members)
        members = []
        for k in range(seed, seed + self.num_members):
            posterior = self.member.fit(_with_new_weights(net, k), loader, epochs, seed=k, **options)
            members.append(posterior.trained)
        guide = EnsembleGuide(members)
        return Posterior(self, train_apart(lambda: (guide.model, guide), seed))


def _with_new_weights(net: Any, seed: int) -> Any:
    """Return a copy of a network with weights from a seed."""
    if not is_network(net) or not any(hasattr(module, "reset_parameters") for module in net.modules()):
        raise ArgumentError(
            "an ensemble needs a torch network whose layers have reset_parameters(), as those of torch.nn; for others, "
            "and for Pyro models, write a function that builds and trains one, and pass it to dvi.train_ensemble"
        )
    fresh = copy.deepcopy(net)
    with preserve_random_state():
        pyro.set_rng_seed(seed)
        for module in fresh.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return fresh
