# SPDX-License-Identifier: Apache-2.0
"""Base class of methods, which train a posterior for a network and may tune their settings on validation data."""

import copy
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, ClassVar, Self

import pyro
from pyro.infer import SVI
from pyro.nn.module import PyroModule
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from pyro_dvi.analysis.tuning import tune
from pyro_dvi.bayesian import LearnedScale, classifier, regressor, to_bayesian_
from pyro_dvi.bayesian.converted import was_converted
from pyro_dvi.bayesian.likelihoods import LikelihoodModule
from pyro_dvi.core.batches import arguments, check_loader, dataset_size
from pyro_dvi.errors import DataError, warn
from pyro_dvi.methods.posterior import Posterior
from pyro_dvi.optim import Adam
from pyro_dvi.training import History, fit, load
from pyro_dvi.training.ensemble import train_apart
from pyro_dvi.training.own_store import OwnNetworks
from pyro_dvi.training.random_state import preserve_random_state

Loader = Iterable[Any]


def is_network(model: Any) -> bool:
    """Return whether a model is a torch module without a likelihood; it may have priors."""
    is_model = isinstance(model, LikelihoodModule) or (
        isinstance(model, PyroModule) and not was_converted(model)
    )
    return isinstance(model, nn.Module) and not is_model


def as_model(model: Any, loader: Loader, prior_scale: Any, noise_scale: Any) -> Any:
    """Return a copy of a Pyro model, or a Pyro model that consists of a copy of a network, priors and a likelihood.

    For a network, integer targets are treated as labels; other targets get Normal noise.
    """
    model = copy.deepcopy(model) if isinstance(model, nn.Module) else model
    if not is_network(model):
        return model
    check_loader(loader, 2)
    size = dataset_size(loader)
    targets = [_target(batch) for batch in (loader if size is None else islice(loader, 1))]
    if not targets or not all(isinstance(target, Tensor) and target.dim() for target in targets):
        raise DataError(
            "batches for a network must be (inputs, targets), ((a, b), targets) for several inputs, or mappings with "
            "its arguments and 'labels'. For other data, pass a Pyro model, def model(x, y=None), instead of a network"
        )
    if not was_converted(model):
        to_bayesian_(model, prior_scale)
    num_data = size or sum(map(len, targets))
    if targets[0].is_floating_point():
        _look_at(targets[0], prior_scale)
        return regressor(model, num_data, noise_scale)
    return classifier(model, num_data)


def _look_at(numbers: Tensor, prior_scale: Any) -> None:
    """Warn if targets look like labels, or if their size does not suit the default priors, noise and step sizes."""
    size = float(numbers.square().mean().sqrt())
    if bool((numbers * (numbers - 1) == 0).all()):
        warn("all targets are 0.0 or 1.0, but get Normal noise: if they are labels, pass y.long()")
    elif prior_scale == 1.0 and (size < 0.1 or size > 10):
        warn(
            f"the root mean square of the targets is {size:.3g}, but the default priors, noise and step sizes are for "
            "targets of size about 1. Standardise the targets, or predictions may be far off"
        )


def _target(batch: Any) -> Any:
    """Return the targets of a batch; None unless there is exactly one."""
    args, named = arguments(batch, None)
    return named.get("labels", named.get("y")) if named else args[1] if len(args) == 2 else None


class Tunable:
    """Mixin of :class:`~pyro_dvi.methods.Method` that tunes its settings."""

    space: ClassVar[Mapping[str, tuple[float, ...]]] = {
        "lr": (0.003, 0.01, 0.03),
        "prior_scale": (0.3, 1.0, 3.0),
        "temperature": (0.01, 0.1, 1.0),
    }

    def tune(
        self: Any,
        model: Any,
        loader: Loader,
        epochs: int,
        *,
        validation: Any,
        space: Mapping[str, Iterable[Any]] | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Posterior:
        """Train with several settings, and return the posterior that predicts validation data best.

        Args:
            model: as in :meth:`fit`.
            loader: as in :meth:`fit`.
            epochs: number of epochs of each training run.
            validation: inputs with observations, held out from ``loader``.
            space: values to try, for each argument of this method that is tuned; by default, the step size, the prior
                scale and the temperature are tuned.
            seed: random seed of each training run.
            **options: further arguments of :func:`~pyro_dvi.tune`, such as ``max_trainings``, ``study`` and
                ``progress``.

        Returns:
            The posterior; its ``method`` has the chosen settings, and its ``tuned`` is the table of training runs.

        Raises:
            TypeError: ``space`` has a name that is not an argument of this method.
        """
        space = self.space if space is None else space
        others: dict[tuple[Any, ...], dict[str, Any]] = {}

        def train(**settings: Any) -> Any:
            done = replace(self, **settings).fit(model, loader, epochs, seed=seed, progress=False)
            others[tuple(settings.values())] = {"history": done.history, "networks": done.networks}
            return done

        with pyro.get_param_store().scope() as store:
            tuned = tune(train, validation, space, seed=seed, **options)
        method = replace(self, **tuned.settings).settled(model)
        svi = SVI(tuned.model, tuned.guide, method.optimizer(epochs), loss=method.elbo())
        kept = others[tuple(tuned.settings.values())]
        return Posterior(tuned.model, tuned.guide, store, method=method, svi=svi, tuned=tuned, **kept)


@dataclass(frozen=True, kw_only=True)
class Method(Tunable, ABC):
    """A guide, an objective and an optimizer that belong together.

    To add a method, implement ``guide`` and ``elbo``, and ``optimizer`` if it is not Adam.

    Args:
        lr: initial step size of Adam for the posterior means; posterior scales get ten times this step size. Both decay
            to zero with a cosine schedule.
        prior_scale: standard deviation of the priors of a network without priors, as in :func:`~pyro_dvi.to_bayesian_`.
        noise_scale: standard deviation of the noise, for a regression network, as in :func:`~pyro_dvi.regressor`.
        kl_weight: factor of the KL divergence in the objective.
        temperature: temperature of the objective; below 1, the posterior is narrower. None means 0.1 for a network and
            1 for a Pyro model.
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
        """Return the Pyro optimizer for a training run of ``epochs`` epochs."""
        return Adam(self.lr, scheduler=partial(CosineAnnealingLR, T_max=max(epochs, 1)))

    def svi(self, model: Any, loader: Loader, epochs: int) -> SVI:
        """Return an untrained ``pyro.infer.SVI`` for a network or a Pyro model."""
        method = self.settled(model)
        with preserve_random_state(loader):  # the loader may shuffle
            model = as_model(model, loader, self.prior_scale, self.noise_scale)
        return SVI(model, method.guide(model), method.optimizer(epochs), loss=method.elbo())

    def settled(self, model: Any) -> Self:
        """Return the method with the default temperature for this model, unless a temperature was given."""
        is_given = self.temperature is not None
        return self if is_given else replace(self, temperature=0.1 if is_network(model) else 1.0)

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
        first: Any = ()
        if callable(model) and not isinstance(model, nn.Module):
            check_loader(loader, 2)
            with preserve_random_state(loader):
                first = next(iter(loader))
        networks = OwnNetworks(model, *arguments(first, device))

        def train() -> tuple[Any, Any]:
            with networks:
                done["svi"] = svi = self.svi(model, loader, epochs)
                done["history"] = run(svi)
            return svi.model, svi.guide

        trained = vars(train_apart(train, seed)) | {"networks": networks}
        return Posterior(**trained, method=self.settled(model), **done)

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
