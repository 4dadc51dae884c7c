# SPDX-License-Identifier: Apache-2.0
"""The result of a method: a model and its posterior, with methods to predict, export and save."""

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


class ReturnsPosterior:
    """Base class of methods; errors say which attributes the posterior has instead."""

    def __getattr__(self, name: str) -> Any:
        of_posterior = hasattr(Posterior, name) or name in Posterior.__dataclass_fields__
        hint = f": fit returns the posterior, so write posterior = method.fit(...), then posterior.{name}"
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}{hint if of_posterior else ''}")


@dataclass(frozen=True, eq=False)
class Posterior(TrainedPosterior):
    """A model with its trained guide, and methods to predict, export and save.

    The parameters of a posterior are in Pyro's parameter store only while one of these methods runs, so several
    posteriors do not clash. Model and guide use their own parameters wherever they are called; a model that is a
    function is wrapped for this. Put other code that reads parameters inside ``with posterior.in_store():``. To
    continue training, make an SVI with a new optimizer, because the step size of the one in ``svi`` has decayed to
    zero.

    Attributes:
        model: the Pyro model. If a module was passed to the method, this is a copy.
        guide: the trained guide.
        store: the parameters, as a state of Pyro's parameter store.
        method: the method, with the settings used in training.
        svi: the ``SVI`` that trained the posterior; None for an ensemble.
        history: the record of the training.
        tuned: the table of the training runs of ``tune``; None if the settings were not tuned.

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
        """Predict with the rule of the method, or with ``method`` if given; see :func:`~pyro_dvi.predict`."""
        with self.in_store():
            return predict(self.model, self.guide, data, method, **options)

    def to_arviz(self, data: Any, **options: Any) -> Any:
        """Export posterior samples and predictions to ArviZ; see :func:`~pyro_dvi.to_arviz`."""
        with self.in_store():
            return to_arviz(self.model, self.guide, data, **options)

    def export(self, example: Any, method: PredictionRule | None = None, **options: Any) -> Predictor:
        """Return a torch module that predicts without Pyro; see :func:`~pyro_dvi.predictor`."""
        with self.in_store():
            return predictor(self.model, self.guide, example, method, **options)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file (for an ensemble, a folder of files), which the method's ``load`` can read."""
        if self.svi is None:
            Path(path).mkdir(exist_ok=True)
            for k, member in enumerate(self.guide.members):
                member.save(Path(path, f"{k}.pt"))
            return
        with self.in_store():
            save(path, self.svi, history=self.history)
