# SPDX-License-Identifier: Apache-2.0
"""What a method returns: model and posterior, with the calls that one makes of them."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pyro_dvi.analysis.arviz_export import to_arviz
from pyro_dvi.analysis.tuning import Tuned
from pyro_dvi.predictive import Prediction, PredictionRule, predict, predictor
from pyro_dvi.predictive.predictor import Predictor
from pyro_dvi.training import History, save
from pyro_dvi.training.ensemble import TrainedPosterior


@dataclass(frozen=True, eq=False)
class Posterior(TrainedPosterior):
    """A model with its trained guide, and what one does with the two.

    Pyro's parameter store holds its parameters only while one of these methods runs, so that several posteriors do not
    meet there. To go on by hand, work inside ``with posterior.in_store():``. To train on, make an SVI with an optimizer
    of your own: the step size of the one here has fallen to zero.

    Attributes:
        model: the Pyro model: a copy of what was given to the method, where that is a module.
        guide: the trained guide.
        store: the parameters, as a state of Pyro's store.
        method: the method, with the settings that it was trained with.
        svi: Pyro's SVI; None for an ensemble.
        history: of the training.
        tuned: the table of trainings that settings were chosen from; None without a choice.

    Example:
        >>> import torch, pyro_dvi as dvi
        >>> x = torch.linspace(-1, 1, 40)[:, None]
        >>> loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, 2 * x), 20)
        >>> posterior = dvi.VariationalLaplace().fit(
        ...     torch.nn.Linear(1, 1), loader, 5, progress=False
        ... )
        >>> posterior.predict(x).mean.shape, posterior.history.stopped
        (torch.Size([40]), 'epochs')
    """

    method: Any = None
    svi: Any = field(default=None, repr=False)
    history: History = field(default_factory=History, repr=False)
    tuned: Tuned | None = field(default=None, repr=False)

    @property
    def elbo(self) -> Any:
        """The objective; None for an ensemble."""
        return None if self.svi is None else self.svi.loss.__self__

    def predict(self, data: Any, method: PredictionRule | None = None, **options: Any) -> Prediction:
        """Predict inputs, by the rule of the method unless ``method`` names another; see :func:`~pyro_dvi.predict`."""
        with self.in_store():
            return predict(self.model, self.guide, data, method, **options)

    def to_arviz(self, data: Any, **options: Any) -> Any:
        """Return an object of ArviZ; see :func:`~pyro_dvi.to_arviz`."""
        with self.in_store():
            return to_arviz(self.model, self.guide, data, **options)

    def export(self, example: Any, method: PredictionRule | None = None, **options: Any) -> Predictor:
        """Return a torch module that predicts without Pyro; see :func:`~pyro_dvi.predictor`."""
        with self.in_store():
            return predictor(self.model, self.guide, example, method, **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file, or for an ensemble a folder of files, that ``load`` of the same method reads."""
        if self.svi is None:
            Path(path).mkdir(exist_ok=True)
            for k, member in enumerate(self.guide.members):
                member.save(Path(path, f"{k}.pt"))
            return
        with self.in_store():
            save(path, self.svi, history=self.history)
