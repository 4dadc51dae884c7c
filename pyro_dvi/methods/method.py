# SPDX-License-Identifier: Apache-2.0
"""Base class of methods, which train a posterior for a network."""

import os
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from operator import length_hint
from typing import Any, ClassVar, Self

from pyro.infer import SVI
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_dvi.bayesian import LearnedScale
from pyro_dvi.core.batches import arguments, check_loader
from pyro_dvi.core.in_turn import in_turn
from pyro_dvi.methods.models import Loader, as_model, is_network
from pyro_dvi.methods.posterior import Posterior
from pyro_dvi.methods.tunable import Tunable
from pyro_dvi.optim import Adam
from pyro_dvi.runs.trained_for import temperature_of
from pyro_dvi.training import History, fit, load
from pyro_dvi.training.ensemble import train_apart
from pyro_dvi.training.own_store import OwnNetworks, unbound
from pyro_dvi.training.random_state import preserve_random_state


@dataclass(frozen=True, kw_only=True)
class Method(Tunable, ABC):
    """A guide, an objective and an optimizer that belong together.

    To add a method, implement ``guide`` and ``elbo``, and ``optimizer`` if it is not Adam.

    Args:
        lr: initial step size of Adam for the posterior means; posterior scales get ten times this step size. Both decay
            to zero with a cosine schedule.
        prior_scale: standard deviation of the priors of a network without priors, as in :func:`~pyro_dvi.to_bayesian_`.
        noise_scale: standard deviation of the noise, for a regression network, as in :func:`~pyro_dvi.regressor`.
        standardize: True to train a regression network on standardised targets, with one mean and one standard
            deviation for each output, from one pass over the loader. Predictions and observations stay in the units of
            the targets; ``noise_scale`` is in units of the standard deviation. Inputs are not changed.
        kl_weight: factor of the KL divergence in the objective.
        temperature: temperature of the objective; below 1, the posterior is narrower. None means 1 for a Pyro model,
            and for a network a temperature that rises with the number of steps, from 0.02 to 0.1 after 3,000 steps:
            short trainings would otherwise end far from the data. With batch normalisation, it is 0.005 for methods
            that predict with noise in the weights, because this noise also shifts the statistics of the layers.
    """

    lr: float = 0.01
    prior_scale: Any = 0.5
    noise_scale: Any = LearnedScale()
    standardize: bool = False
    kl_weight: float = 1.0
    temperature: Any = None
    normalised_temperature: ClassVar[float] = 0.1  # highest default for networks with batch normalisation

    @abstractmethod
    def guide(self, model: Any) -> Any:
        """Return an untrained guide."""

    @abstractmethod
    def elbo(self) -> Any:
        """Return the objective."""

    def optimizer(self, epochs: int) -> Any:
        """Return the Pyro optimizer for a training run of ``epochs`` epochs."""
        return Adam(self.lr, scheduler=partial(CosineAnnealingLR, T_max=max(epochs, 1)))

    def svi(self, model: Any, loader: Loader, epochs: int) -> SVI:
        """Return an untrained ``pyro.infer.SVI`` for a network or a Pyro model."""
        method = self
        if self.temperature is None:
            method = replace(self, temperature=self._default_temperature(model, loader, epochs))
        with preserve_random_state(loader):  # the loader may shuffle
            model = as_model(model, loader, self, epochs > 0)
        return SVI(model, method.guide(model), method.optimizer(epochs), loss=method.elbo())

    def _default_temperature(self, model: Any, loader: Loader, epochs: int) -> float:
        if not is_network(model):
            return 1.0
        normalised = any(isinstance(module, _BatchNorm) for module in model.modules())
        rising = max(0.02, 0.1 * epochs * length_hint(loader, 3000) / 3000)
        return min(rising, self.normalised_temperature if normalised else 0.1)

    def settled(self, guide: Any) -> Self:
        """Return the method with the temperature at which the guide was trained, unless a temperature was given."""
        return self if self.temperature is not None else replace(self, temperature=temperature_of(guide))

    def fit(self, model: Any, loader: Loader, epochs: int, *, seed: int = 0, **options: Any) -> Posterior:
        """Train a copy of a network or of a Pyro model.

        Args:
            model: a Pyro model or a torch network. A network gets priors and a likelihood: ``classifier`` for integer
                targets, otherwise ``regressor``. Modules are copied, so the original stays unchanged. For a
                model that is a function, the tensors of the networks that it calls are copied.
            loader: minibatches of the training data: a ``DataLoader``, or a list of all batches.
            epochs: number of epochs.
            seed: random seed. Global random states and Pyro's parameter store stay unchanged.
            **options: further arguments of :func:`~pyro_dvi.fit`, such as ``validate``, ``early_stopping``, ``device``
                and ``progress``.

        Raises:
            DataError: ``model`` is a network, and a batch is not (inputs, targets).
        """
        train = partial(self._train, loader=loader, epochs=epochs, **options)
        return self._posterior(model, loader, epochs, seed, train, options.get("device"))

    def _posterior(
        self, model: Any, loader: Loader, epochs: int, seed: int, run: Any, device: Any = None
    ) -> Posterior:
        """Apply ``run``, which trains or reads a file, to a new SVI, and return the resulting posterior."""
        done: dict[str, Any] = {}
        model = unbound(model)
        first: Any = ()
        with in_turn:  # which sets aside the tensors and the random state of another thread
            if callable(model) and not isinstance(model, nn.Module):
                check_loader(loader, 2)
                with preserve_random_state(loader):
                    first = next(iter(loader))
            networks = OwnNetworks(model, *arguments(first, device))

        def train() -> tuple[Any, Any]:
            with in_turn.own(networks):
                done["svi"] = svi = self.svi(model, loader, epochs)
                done["history"] = run(svi)
            return svi.model, svi.guide

        trained = vars(train_apart(train, seed)) | {"networks": networks}
        return Posterior(**trained, method=self.settled(trained["guide"]), **done)

    def _train(self, svi: SVI, loader: Loader, epochs: int, **options: Any) -> History:
        return fit(svi, loader, epochs, **options)

    def load(self, path: str | os.PathLike[str], model: Any, loader: Loader, **options: Any) -> Posterior:
        """Load a posterior that :meth:`Posterior.save` wrote.

        Args:
            path: file name.
            model: the model as it was passed to :meth:`fit`.
            loader: the training data, or data of the same kind and size.
            **options: further arguments of :func:`~pyro_dvi.load`, such as ``map_location``.

        Raises:
            CheckpointError: the file was not written by ``save``, or belongs to another model or method.
        """
        return self._posterior(model, loader, 1, 0, partial(load, path, restore_random=False, **options))
