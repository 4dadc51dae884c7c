# SPDX-License-Identifier: Apache-2.0
"""The base class of methods: what they have in common from the network to the posterior."""

import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

import pyro
from pyro.infer import SVI
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_dvi.analysis.tuning import tune
from pyro_dvi.bayesian import LearnedScale
from pyro_dvi.errors import ArgumentError
from pyro_dvi.methods.models import as_model
from pyro_dvi.methods.posterior import Posterior
from pyro_dvi.optim import Adam, learning_rates
from pyro_dvi.training import History, fit, load
from pyro_dvi.training.ensemble import TrainedPosterior, train_apart
from pyro_dvi.training.random_state import preserve_random_state


@dataclass(frozen=True, kw_only=True)
class Method(ABC):
    """Guide, objective and optimizer that go together.

    Adding one: write ``guide`` and ``elbo``, and ``optimizer`` where it is not Adam.

    Args:
        lr: step size of Adam for means, which falls to zero as a cosine; posterior scales have ten times that.
        prior_scale: of a network without priors, as for :func:`~pyro_dvi.to_bayesian_`.
        noise_scale: of a network whose targets are numbers, as for :func:`~pyro_dvi.regressor`.
        kl_weight: of the objective.
        temperature: of the objective; below 1 the posterior is narrower.
    """

    lr: float = 0.01
    prior_scale: Any = 1.0
    noise_scale: Any = LearnedScale()
    kl_weight: float = 1.0
    temperature: float = 1.0
    space: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "lr": (0.003, 0.01, 0.03),
        "prior_scale": (0.3, 1.0, 3.0),
        "temperature": (0.01, 0.1, 1.0),
    }

    @abstractmethod
    def guide(self, model: Any) -> Any:
        """Return an untrained guide."""

    @abstractmethod
    def elbo(self) -> Any:
        """Return the objective."""

    def optimizer(self, epochs: int) -> Any:
        """Return the optimizer of Pyro for a training of so many epochs."""
        return Adam(learning_rates(self.lr), scheduler=partial(CosineAnnealingLR, T_max=max(epochs, 1)))

    def svi(self, model: Any, loader: Iterable[Any], epochs: int) -> SVI:
        """Return Pyro's SVI for a network or a Pyro model, before the first step."""
        with preserve_random_state(loader):  # which shuffles
            model = as_model(model, loader, self.prior_scale, self.noise_scale)
        return SVI(model, self.guide(model), self.optimizer(epochs), loss=self.elbo())

    def fit(
        self, model: Any, loader: Iterable[Any], epochs: int, *, seed: int = 0, **options: Any
    ) -> Posterior:
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
        done: dict[str, Any] = {}

        def train() -> tuple[Any, Any]:
            done["svi"] = svi = self.svi(model, loader, epochs)
            done["history"] = self._train(svi, loader, epochs, options)
            return svi.model, svi.guide

        return Posterior(self, train_apart(train, seed), **done)

    def _train(self, svi: SVI, loader: Iterable[Any], epochs: int, options: dict[str, Any]) -> History:
        return fit(svi, loader, epochs, **options)

    def tune(
        self,
        model: Any,
        loader: Iterable[Any],
        epochs: int,
        *,
        validation: Any,
        space: Mapping[str, Iterable[Any]] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Posterior:
        """Train with several settings, and return the posterior that predicts validation data best.

        Args:
            model: as for :meth:`fit`.
            loader: as for :meth:`fit`.
            epochs: of each training.
            validation: inputs with observations, which are not in ``loader``.
            space: values of arguments of this method; by default of step size, scale of the prior and temperature.
            seed: of each training.
            **options: of :func:`~pyro_dvi.tune`, as ``max_trainings``, ``storage`` and ``progress``.

        Returns:
            The posterior; its ``method`` has the chosen settings, and ``tuned`` is the table of trainings.

        Raises:
            ArgumentError: the space has a name that is no argument of this method.
        """
        space, known = self.space if space is None else space, {one.name for one in fields(self)}
        if unknown := sorted(space.keys() - known):
            raise ArgumentError(
                f"{type(self).__name__} has no {unknown[0]!r} to tune; it has {sorted(known)}"
            )
        histories: dict[tuple[Any, ...], History] = {}

        def train(**settings: Any) -> tuple[Any, Any]:
            done = replace(self, **settings).fit(model, loader, epochs, seed=seed, progress=False)
            done.trained.put_back()
            histories[tuple(settings.values())] = done.history
            return done.model, done.guide

        with pyro.get_param_store().scope() as store:
            tuned = tune(train, validation, space, seed=seed, **options)
        method, trained = replace(self, **tuned.settings), TrainedPosterior(tuned.model, tuned.guide, store)
        svi = SVI(tuned.model, tuned.guide, method.optimizer(epochs), loss=method.elbo())
        return Posterior(method, trained, svi, histories[tuple(tuned.settings.values())], tuned)

    def load(
        self, path: str | os.PathLike[str], model: Any, loader: Iterable[Any], **options: Any
    ) -> Posterior:
        """Read what :meth:`Posterior.save` wrote.

        Args:
            path: of the file.
            model: as it was given to :meth:`fit`.
            loader: the training data, or others of the same kind and number.
            **options: of :func:`~pyro_dvi.load`, as ``map_location``.

        Raises:
            CheckpointError: the file is none, or is that of another model or method.
        """
        done: dict[str, Any] = {}

        def read() -> tuple[Any, Any]:
            done["svi"] = svi = self.svi(model, loader, 1)
            done["history"] = load(path, svi, restore_random=False, **options)
            return svi.model, svi.guide

        return Posterior(self, train_apart(read, 0), **done)
