# SPDX-License-Identifier: Apache-2.0
"""Ensembles of any method."""

import copy
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import nn

from pyro_dvi.bayesian.conversion import with_own_weights
from pyro_dvi.bayesian.converted import was_converted
from pyro_dvi.core.arguments import check_choice
from pyro_dvi.errors import ArgumentError, warn
from pyro_dvi.methods.method import Method
from pyro_dvi.methods.models import Loader, is_network
from pyro_dvi.methods.posterior import Posterior, ReturnsPosterior
from pyro_dvi.methods.trained import MAP
from pyro_dvi.training import EnsembleGuide
from pyro_dvi.training.random_state import preserve_random_state


@dataclass(frozen=True)
class Ensemble(ReturnsPosterior):
    """Several posteriors of one method, each trained from its own random weights; predictions are averaged.

    Args:
        member: the method that trains each posterior.
        num_members: number of posteriors.

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

    def fit(self, net: Any, loader: Loader, epochs: int, *, seed: int = 0, **options: Any) -> Posterior:
        """Train all members.

        Args:
            net: a torch module, with or without priors. Each member is a copy of it in which ``reset_parameters()``
                gives the layers new random weights. Frozen parameters keep their values.
            loader: as for :meth:`Method.fit`.
            epochs: number of epochs of each training run.
            seed: random seed of the first training run; the others use the following integers.
            **options: further arguments of :func:`~pyro_dvi.fit`.

        Raises:
            ArgumentError: ``net`` is a Pyro model, none of its layers has ``reset_parameters()``, or ``epochs`` is 0.
            DviWarning: ``reset_parameters()`` leaves some random weights unchanged, so all members start with them.
        """
        check_choice("member", self.member, Method, "MAP()")
        if epochs == 0:
            raise ArgumentError(
                "each member starts from new random weights, so epochs=0 would discard the trained weights: pass the "
                "epochs of each training run, or combine trained networks with dvi.training.EnsembleGuide"
            )
        return self._of(
            self.member.fit(_with_new_weights(net, k), loader, epochs, seed=k, **options)
            for k in range(seed, seed + self.num_members)
        )

    def load(self, path: str | os.PathLike[str], model: Any, loader: Loader, **options: Any) -> Posterior:
        """Read the folder that :meth:`Posterior.save` wrote; arguments as for :meth:`Method.load`."""
        files = [Path(path, f"{k}.pt") for k in range(self.num_members)]
        return self._of(self.member.load(file, model, loader, **options) for file in files)

    def _of(self, members: Iterable[Posterior]) -> Posterior:
        guide = EnsembleGuide(members)
        return Posterior(guide.model, guide, {"params": {}, "constraints": {}}, method=self)


def _with_new_weights(net: Any, seed: int) -> Any:
    """Return a copy of a network, which may have priors, with new random weights."""
    fresh = copy.deepcopy(net) if is_network(net) else nn.Identity()
    plain = with_own_weights(fresh) if was_converted(fresh) else fresh
    # Two draws are compared, because the network may have been built with the same seed.
    for number in (seed + 1, seed):
        before = {name: p.detach().clone() for name, p in plain.named_parameters()}
        with preserve_random_state():
            pyro.set_rng_seed(number)
            for layer in reversed(list(plain.modules())):  # as in a constructor, parts come first
                reset = getattr(layer, "reset_parameters", getattr(layer, "_reset_parameters", None))
                if reset is not None and any(p.requires_grad for p in layer.parameters()):
                    reset()
        for name, parameter in plain.named_parameters():
            if not parameter.requires_grad:
                parameter.copy_(before[name])
    kept = {name: p for name, p in plain.named_parameters() if torch.equal(p, before[name])}
    if kept.keys() == before.keys():
        raise ArgumentError(
            "an ensemble needs layers with reset_parameters(); for other models, use dvi.train_ensemble"
        )
    if alike := [name for name, p in kept.items() if p.requires_grad and p.unique().numel() > 1]:
        warn(
            f"all members start with the same {alike}, because reset_parameters() does not change them: define this "
            "method in the module that has them, or use dvi.train_ensemble"
        )
    if plain is not fresh:
        fresh.load_state_dict(plain.state_dict())
    return fresh
