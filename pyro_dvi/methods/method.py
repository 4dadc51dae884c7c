# SPDX-License-Identifier: Apache-2.0
"""The base class of methods: what they have in common from the network to the posterior."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

from pyro.infer import SVI
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_dvi.bayesian import LearnedScale
from pyro_dvi.errors import ArgumentError
from pyro_dvi.methods.models import Loader, as_model, is_network
from pyro_dvi.methods.posterior import Posterior
from pyro_dvi.methods.tunable import Tunable
from pyro_dvi.optim import Adam
from pyro_dvi.training import History, fit, load
from pyro_dvi.training.ensemble import train_apart
from pyro_dvi.training.random_state import preserve_random_state


@dataclass(frozen=True, kw_only=True)
class Method(Tunable, ABC):
    """Guide, objective and optimizer that go together.

    To add a method, write ``guide`` and ``elbo``, and ``optimizer`` where it is not Adam.

    Args:
        lr: step size of Adam for means, which falls to zero as a cosine; posterior scales have ten times that.
        prior_scale: of a network without priors, as for :func:`~pyro_dvi.to_bayesian_`.
        noise_scale: of a network whose targets are numbers, as for :func:`~pyro_dvi.regressor`.
        kl_weight: of the objective.
        temperature: of the objective; below 1 the posterior is narrower. None: 0.1 for a network, 1 for a Pyro model.
    """

    lr: float = 0.01
    prior_scale: Any = 1.0
    noise_scale: Any = LearnedScale()
    kl_weight: float = 1.0
    temperature: Any = None

    @abstractmethod
    def guide(self, model: Any) -> Any:
        """Return an untrained guide."""

    @abstractmethod
    def elbo(self) -> Any:
        """Return the objective."""

    def optimizer(self, epochs: int) -> Any:
        """Return the optimizer of Pyro for a training of so many epochs."""
        return Adam(self.lr, scheduler=partial(CosineAnnealingLR, T_max=max(epochs, 1)))

    def svi(self, model: Any, loader: Loader, epochs: int) -> SVI:
        """Return Pyro's SVI for a network or a Pyro model, before the first step."""
        method = self.settled(model)
        with preserve_random_state(loader):  # which shuffles
            model = as_model(model, loader, self.prior_scale, self.noise_scale)
        return SVI(model, method.guide(model), method.optimizer(epochs), loss=method.elbo())

    def settled(self, model: Any) -> Self:
        """Return the method with the temperature that it has for a model."""
        is_given = self.temperature is not None
        return self if is_given else replace(self, temperature=0.1 if is_network(model) else 1.0)

    def fit(self, model: Any, loader: Loader, epochs: int, *, seed: int = 0, **options: Any) -> Posterior:
        """Train a copy of a network, or of a Pyro model.

        Args:
            model: a torch module, which gets priors and the likelihood of its data (labels where targets are integers,
                else numbers with Normal noise); or a Pyro model. A module is copied and stays as it is.
            loader: minibatches, a ``DataLoader`` or a list, whose number of examples is that of the data.
            epochs: of training.
            seed: of the training. Global random numbers and Pyro's parameter store are left alone.
            **options: of :func:`~pyro_dvi.fit`, as ``validate``, ``early_stopping``, ``device`` and ``progress``.

        Raises:
            DataError: batches of a network that are not (inputs, targets).
        """
        train = partial(self._train, loader=loader, epochs=epochs, **options)
        return self._posterior(model, loader, epochs, seed, train)

    def _posterior(self, model: Any, loader: Loader, epochs: int, seed: int, run: Any) -> Posterior:
        """Return what ``run``, which trains or reads a file, makes of a new SVI."""
        done: dict[str, Any] = {}

        def train() -> tuple[Any, Any]:
            done["svi"] = svi = self.svi(model, loader, epochs)
            done["history"] = run(svi)
            return svi.model, svi.guide

        return Posterior(**vars(train_apart(train, seed)), method=self.settled(model), **done)

    def _train(self, svi: SVI, loader: Loader, epochs: int, **options: Any) -> History:
        if "validation" in options:
            raise ArgumentError("validation= is for tune; in fit, validate=loader records a loss")
        return fit(svi, loader, epochs, **options)

    def load(self, path: str | os.PathLike[str], model: Any, loader: Loader, **options: Any) -> Posterior:
        """Read what :meth:`Posterior.save` wrote.

        Args:
            path: of the file.
            model: as it was given to :meth:`fit`.
            loader: the training data, or others of the same kind and number.
            **options: of :func:`~pyro_dvi.load`, as ``map_location``.

        Raises:
            CheckpointError: the file is none, or is that of another model or method.
        """
        return self._posterior(model, loader, 1, 0, partial(load, path, restore_random=False, **options))
