# SPDX-License-Identifier: Apache-2.0
"""The record of a training run, stored in columns."""

import math
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pyro
import torch
from torch import nn
from torch.distributions import transform_to

from pyro_dvi.core.undisturbed import widest
from pyro_dvi.optim.learning_rates import SCALE_PATTERN

if TYPE_CHECKING:
    import pandas

    from pyro_dvi.training.routes import Route

_PRECISION = re.compile(r"(^|\.)([A-Z]\w*|guide)(\.\d+)*\.precisions\.")  # as in NaturalGradientGuide


class Table(dict[str, list[float]]):
    """Columns of equal length, with NaN for missing values.

    Example:
        >>> table = Table()
        >>> table.append(loss=2.0)
        >>> table.append(loss=1.0, kl=0.5)
        >>> dict(table)
        {'loss': [2.0, 1.0], 'kl': [nan, 0.5]}
    """

    @property
    def rows(self) -> int:
        """Number of rows."""
        return max(map(len, self.values()), default=0)

    def append(self, **values: float) -> None:
        """Add a row."""
        rows = self.rows
        for name in {**self, **values}:
            self.setdefault(name, [math.nan] * rows).append(float(values.get(name, math.nan)))

    def last(self) -> dict[str, float]:
        """Return the last row."""
        return {name: column[-1] for name, column in self.items()} if self.rows else {}

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return a ``pandas.DataFrame``, in which the numbers of epochs and steps are integers."""
        import pandas

        return pandas.DataFrame(self).astype({name: int for name in ("epoch", "step") if name in self})


class History:
    """The record that :func:`~pyro_dvi.training.fit` returns.

    Attributes:
        steps: one row per training step, with the columns ``epoch`` and ``step`` (both counted from 1), ``loss`` (the
            optimised objective, summed over the data set), ``lr`` (the learning rate of the means in this step), and,
            if the ELBO reports them, ``log_likelihood``, ``penalty``, ``kl`` (unweighted) and ``kl_weight``.
        epochs: one row per epoch, with the columns ``epoch``, ``step`` (the last step of the epoch), the same terms
            averaged over the epoch, ``kl_weight`` and ``lr`` of the last step, ``seconds``, ``posterior_scale`` (the
            mean of all posterior scales, if the guide has any) and one ``validation_<name>`` per metric.
        stopped: why training ended: ``"epochs"``, ``"early stopping"``, ``"callback"``, ``"interrupted"`` or
            ``"non-finite"``; None before the end.
        best_epoch: the epoch with the best value of the metric that early stopping monitors; otherwise None.

    Indexing a history gives a column of ``epochs``, ready to plot: ``plt.plot(history["epoch"], history["loss"])``.

    Example:
        >>> history = History()
        >>> history.epochs.append(epoch=1, loss=3.5)
        >>> history["loss"]
        [3.5]
        >>> History.from_dict(history.to_dict()).to_dict() == history.to_dict()
        True
    """

    def __init__(self) -> None:
        self.steps = Table()
        self.epochs = Table()
        self.stopped: str | None = None
        self.best_epoch: int | None = None
        # The weights of the best epoch, by name; kept for a resumed run and for load(..., best=True).
        self.best_weights: dict[str, Any] | None = None
        # Shapes and dtypes of the arguments in the first batch, which initialise a loaded guide.
        self.inputs: tuple[Any, Any] | None = None

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return int(self.epochs["epoch"][-1]) if self.epochs.rows else 0

    @property
    def step(self) -> int:
        """Number of training steps."""
        return int(self.steps["step"][-1]) if self.steps.rows else 0

    def epoch_of(self, steps: int) -> dict[str, float]:
        """Return the row of an epoch: averages over its steps, and the last step's learning rate and KL weight."""
        columns = {name: column[-steps:] for name, column in self.steps.items()}
        last = ("epoch", "step", "kl_weight", "lr")
        return {
            name: column[-1] if name in last else math.fsum(column) / steps
            for name, column in columns.items()
        }

    def __getitem__(self, column: str) -> list[float]:
        return self.epochs[column]

    def __len__(self) -> int:
        return self.epochs.rows

    def __repr__(self) -> str:
        last = ", ".join(f"{name}={value:.4g}" for name, value in self.epochs.last().items())
        return f"History({self.epoch} epochs, {self.step} steps, stopped={self.stopped!r}; last: {last})"

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return the epochs as a ``pandas.DataFrame`` with index ``epoch``; ``steps.to_dataframe()`` has the steps."""
        frame = self.epochs.to_dataframe()
        return frame.set_index("epoch") if self.epochs else frame

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists and numbers, for example for JSON; the weights of the best epoch are omitted."""
        return {
            "epochs": {name: list(column) for name, column in self.epochs.items()},
            "steps": {name: list(column) for name, column in self.steps.items()},
            "stopped": self.stopped,
            "best_epoch": self.best_epoch,
        }

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> "History":
        """Rebuild a history from :meth:`to_dict`."""
        history = cls()
        history.epochs, history.steps = (Table(record[name]) for name in ("epochs", "steps"))
        history.stopped, history.best_epoch = record["stopped"], record["best_epoch"]
        return history


def posterior_scale(route: "Route") -> float | None:
    """Return the mean of all posterior scales among the guide's parameters; None if none are recognised."""
    store = pyro.get_param_store()
    constraints = {id(value): store._constraints[name] for name, value in store.named_parameters()}
    for module in nn.ModuleDict(route.modules()).modules():
        for name, (constraint, _) in getattr(module, "_pyro_params", {}).items():
            constraints[id(getattr(module, name + "_unconstrained"))] = constraint
    sums, count = [], 0
    for name, parameter in route.parameters().items():
        is_precision = _PRECISION.search(name) is not None
        if is_precision or re.search(SCALE_PATTERN, name):
            constraint = constraints.get(id(parameter))
            value = (parameter if constraint is None else transform_to(constraint)(parameter)).detach()
            sums.append((value.rsqrt() if is_precision else value).sum())
            count += parameter.numel()
    if not count:
        return None
    where = sums[0].device  # one read of the device for all of them
    return float(torch.stack([one.to(where, widest(where)) for one in sums]).sum()) / count
