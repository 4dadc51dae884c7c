# SPDX-License-Identifier: Apache-2.0
"""Tuning the settings of a method on validation data."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from inspect import signature
from typing import Any, ClassVar

from pyro.infer import SVI
from pyro.params.param_store import StateDict

from pyro_dvi.analysis.tuning import tune
from pyro_dvi.core.in_turn import in_turn
from pyro_dvi.methods.models import Loader
from pyro_dvi.methods.posterior import Posterior, ReturnsPosterior
from pyro_dvi.training.own_store import Scope


class Tunable(ReturnsPosterior):
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
            space: values to try, for each argument of this method that is tuned; by default, the step size
                (unless ``epochs`` is 0), the prior scale and the temperature are tuned.
            seed: random seed of each training run.
            **options: further arguments of :func:`~pyro_dvi.tune`, such as ``max_trainings``, ``study`` and
                ``progress``, or of :meth:`fit`, such as ``device``.

        Returns:
            The posterior; its ``method`` has the chosen settings, and its ``tuned`` is the table of training runs.

        Raises:
            TypeError: ``space`` has a name that is not an argument of this method.
        """
        if space is None:
            space = {name: values for name, values in self.space.items() if epochs or name != "lr"}
        own = {name: options.pop(name) for name in signature(tune).parameters if name in options}
        others: dict[tuple[Any, ...], dict[str, Any]] = {}

        def train(**settings: Any) -> Any:
            done = replace(self, **settings).fit(
                model, loader, epochs, **{"seed": seed, "progress": False, **options}
            )
            others[tuple(settings.values())] = {"history": done.history, "networks": done.networks}
            return done

        store: StateDict = {"params": {}, "constraints": {}}
        with in_turn.own(Scope(store)):
            tuned = tune(train, validation, space, seed=seed, **own)
        method = replace(self, **tuned.settings).settled(tuned.guide)
        svi = SVI(tuned.model, tuned.guide, method.optimizer(epochs), loss=method.elbo())
        kept = others[tuple(tuned.settings.values())]
        return Posterior(tuned.model, tuned.guide, store, method=method, svi=svi, tuned=tuned, **kept)
