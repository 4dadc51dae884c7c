# SPDX-License-Identifier: Apache-2.0
"""Settings of a training run, chosen on validation data."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_dvi.analysis.tuning.search import as_proposed, one_after_the_other
from pyro_dvi.analysis.tuning.trainings import TEMPERATURES, Trainings, are_numbers, read_results
from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.densities import with_any
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import Columns, Report
from pyro_dvi.errors import ArgumentError, NonFiniteError, warn
from pyro_dvi.predictive.predict import predict
from pyro_dvi.training.history import Table

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

__all__ = ["Tuned", "tune"]

_COLD = 1e-3
_SCORES = ("score", "standard_error", "paired_standard_error")


@dataclass(frozen=True, repr=False)
class Tuned(Report):
    """The chosen settings, their posterior, and the scores of all training runs; ``print`` shows them as a table.

    Attributes:
        settings: the chosen settings, by name.
        model: the model that was trained with them.
        guide: its posterior.
        table: a row for each training run. The columns are the settings; ``score`` (lower is better; NaN for a failed
            run); ``standard_error`` of the score; and ``paired_standard_error`` of its difference from the lowest
            score. The standard errors are over validation rows, and NaN if the score is a single number.
        failures: for each failed training run, the row of the table and the reason for the failure.
    """

    settings: dict[str, Any]
    model: Any
    guide: Any
    table: Table
    failures: dict[int, str]

    def _shown(self) -> list[Any]:
        lowest = min(score for score in self.table["score"] if score == score)
        rows = []
        for row, (*values, score, error, paired) in enumerate(zip(*self.table.values(), strict=True)):
            is_chosen = values == list(self.settings.values())
            note = "chosen" if is_chosen else "lowest score" if score == lowest else ""
            note = f"failed: {self.failures[row]}" if row in self.failures else note
            numbers = ("-" if number != number else f"{number:.4f}" for number in (score, error, paired))
            rows.append((note, *map(_text, values), *numbers))
        return [Columns(("", *self.settings, "score", "standard error", "paired error"), rows)]

    __repr__ = Report.__str__


def tune(
    train: Callable[..., tuple[Any, Any]],
    validation: Any,
    space: Mapping[str, Iterable[Any]],
    *,
    max_trainings: int = 12,
    score: Callable[[Any, Any, Any], Any] | None = None,
    seed: int = 0,
    storage: str | Path | None = None,
    sampler: "BaseSampler | None" = None,
    progress: bool = True,
) -> Tuned:
    r"""Train with several settings, and keep the posterior that predicts the validation data best.

    .. math::
        \hat s = \arg\min_s \bar\ell(s), \qquad
        \bar\ell(s) = -\frac1n \sum_{i=1}^n \log p(y_i \mid x_i, q_s)

    **Search.** The settings are searched one after another, in the order of ``space``. A setting is searched by
    training with every value of its list, while the other settings keep the best values found so far. Every setting
    starts at the middle value of its list (the lower of the two middle values if the length is even). A sensible order
    is step size, decay of the step size, temperature: a temperature that is chosen first would compensate for a badly
    chosen step size. If the best value is at an end of its list, the search continues beyond the end with the pattern
    of the list (0.1, 0.3 is followed by 1, and 0, 1, 2 by 3; integers remain integers), as long as there are training
    runs that later lists do not need. Then neighbours of the best values are tried in the same order, until none is
    better or no training runs remain. If a ``sampler`` is given, it proposes all settings jointly instead.

    **Choice.** The settings with the lowest mean score are chosen. If a setting is called ``temperature`` or
    ``kl_weight``, a larger value may then replace the best one, while the other settings keep their best values. It is
    the largest value whose score is within one paired standard error of the lowest score,

    .. math::
        \bar\ell(s) - \bar\ell(\hat s) \le \operatorname{sd}_i\left(\ell_i(s) - \ell_i(\hat s)\right) / \sqrt n,

    because the curve is often flat, and a larger value keeps more of the posterior uncertainty. If the score is a
    single number, there is no standard error, and the lowest score is chosen. If the curve is flat at the end of a
    list, the search does not continue beyond this end.

    Each training run starts with the same seed and an empty parameter store, and is scored with the same seed.
    Afterwards, Pyro's store contains the parameters of the chosen posterior, which replace others of the same names,
    and the global random state is restored. A training run that diverges keeps its row in the table.

    Status: approximate. ``tune`` chooses the best of the settings that it tried, not of all combinations. Expect a
    higher (worse) score on new data, because the settings were chosen by their score on the validation data.

    Args:
        train: function that is called with the names of ``space`` as keywords. It builds and trains a model and its
            guide with any method, and returns ``(model, guide)``. Each call must build or copy its networks.
        validation: inputs with observations that ``train`` does not use, in a form that :func:`~pyro_dvi.predict`
            accepts.
        space: for each setting, a list of numbers; or a list of strings, booleans and None, which has no order.
        max_trainings: maximum number of training runs, including those in ``storage``; with a ``sampler``, also the
            maximum number of trials.
        score: function that is called with model, guide and validation data. It returns a single number, or a vector
            with one number per row of the data; lower is better. By default, it is the negative log-likelihood of each
            row, from ``predict(model, guide, validation)`` with the default prediction rule of the guide.
        seed: seed of every training run.
        storage: path of a file with one line of JSON per finished training run. Another call continues from the file.
            It first repeats the best of these training runs, because a different score shows that ``train`` or the data
            have changed. At the end, it repeats the chosen one if it is another run from an earlier call. To repeat
            other training runs, remove their lines.
        sampler: any Optuna sampler (``python -m pip install optuna``), which treats the values as categories.
        progress: show a progress bar in a terminal or notebook.

    Returns:
        The chosen settings, their model and guide, which are ready for ``predict``, and the table of all training runs,
        which :func:`~pyro_dvi.plots.tuning` plots.

    Raises:
        ArgumentError: if a list cannot be searched, if the lists need more than ``max_trainings``, if ``train`` does
            not return a model and a guide or uses one network in several training runs, or if ``score`` returns
            different numbers of rows.
        CheckpointError: if ``storage`` belongs to other settings, another seed or another training, or is not a file of
            ``tune``.
        NonFiniteError: if all training runs have failed.

    Warns:
        DviWarning: if the best value is still at an end of its list, unless this end is zero; the warning states the
            next value to try. Also if the chosen ``temperature`` or ``kl_weight`` is below 0.001.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> import pyro_dvi as dvi
        >>> def train(lr, kl_weight):
        ...     def model(x, y=None):
        ...         w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...         with pyro.plate("data", len(x)):
        ...             return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)
        ...
        ...     guide = dvi.MeanFieldGuide(model)
        ...     elbo = dvi.TaylorELBO(kl_weight=kl_weight)
        ...     svi = pyro.infer.SVI(model, guide, dvi.optim.Adam({"lr": lr}), loss=elbo)
        ...     dvi.fit(svi, [(x, y)], epochs=100)
        ...     return model, guide
        >>> x = torch.linspace(-1, 1, 10)
        >>> y = 0.2 * x + torch.tensor([1.0, -1, 0.5, 0.5, -1, -1, 0.5, 0.5, -1, 1])
        >>> tuned = tune(train, (x, 0.2 * x), {"lr": (0.01, 0.1, 0.3), "kl_weight": (1, 3, 10)})
        >>> tuned
                  lr  kl_weight   score  standard error  paired error
        -------------------------------------------------------------
                0.01          3  0.9203          0.0004        0.0004
                 0.1          1  0.9194          0.0001        0.0001
        chosen   0.1          3  0.9190          0.0000        0.0000
                 0.1         10  0.9201          0.0003        0.0003
                 0.3          3  0.9207          0.0005        0.0005
        >>> tuned.settings
        {'lr': 0.1, 'kl_weight': 3}
        >>> dvi.predict(tuned.model, tuned.guide, x).mean.shape
        torch.Size([10])
    """
    check_count("max_trainings", max_trainings)
    lists = _lists(space)
    planned = max_trainings if sampler else 1 + sum(len(values) - 1 for values in lists.values())
    if planned > max_trainings:
        raise ArgumentError(
            f"these lists need {planned} training runs, more than max_trainings={max_trainings}: raise max_trainings, "
            "shorten the lists, or pass an Optuna sampler"
        )
    path = None if storage is None else Path(storage)
    recorded = {} if path is None else read_results(path, lists, seed)
    with progress_bar(progress, planned, unit="training") as bar:
        score = score or partial(_nll, seed=seed)
        done = Trainings(train, validation, lists, score, seed, path, recorded, bar)
        done.repeat_best()
        if sampler is None:
            one_after_the_other(done, max_trainings - planned)
        else:
            as_proposed(done, sampler, max_trainings)
    if not done.scores:
        listed = "; ".join(f"{', '.join(map(_text, key))}: {why}" for key, why in done.failures.items())
        raise NonFiniteError(
            f"every training run has failed ({listed}). First make train work with one of these settings. If training "
            "diverges, lower the learning rate (of the posterior scales first), or train in float64"
        ) from done.cause
    chosen = done.choice()
    for i, (name, value) in enumerate(zip(lists, chosen, strict=True)):
        if (following := done.beyond(i)) is not None:
            warn(
                f"the best {name}, {value:g}, is the smallest or largest value that was tried. Try {following:g} too: "
                f"add it to the list of {name}, or allow more training runs with max_trainings"
            )
        if name in TEMPERATURES and are_numbers(lists[name]) and value < _COLD:
            warn(
                f"the chosen {name}, {value:g}, is below {_COLD:g}, so the posterior is close to a point estimate. "
                "Compare it with MAP, and with the scores of larger values in the table"
            )
    posterior = done.posteriors.get(chosen) or done.posterior(chosen)
    posterior.put_back()
    return Tuned(done.named(chosen), posterior.model, posterior.guide, *done.table())


def _lists(space: Any) -> dict[str, list[Any]]:
    """Return the values of each setting: numbers in ascending order, other values in the given order."""
    if not isinstance(space, Mapping) or not space:
        raise ArgumentError(f'space must map settings to values, as {{"lr": (0.01, 0.1)}}, not {space!r}')
    lists: dict[str, list[Any]] = {}
    for name, values in space.items():
        own = list(values) if isinstance(values, Iterable) and not isinstance(values, str) else []
        fine = (math.isfinite(v) if isinstance(v, Real) else isinstance(v, str | None) for v in own)
        if not own or not all(fine) or not isinstance(name, str) or name in _SCORES:
            raise ArgumentError(
                f"setting {name!r} with values {values!r} cannot be tuned. Values must be a list of finite numbers, "
                f"strings (for other objects), booleans or None, and the names {_SCORES} are reserved"
            )
        own = list(dict.fromkeys(own))
        kind = int if all(isinstance(value, Integral) for value in own) else float
        lists[name] = sorted(map(kind, own)) if are_numbers(own) else own
    return lists


def _nll(model: Any, guide: Any, validation: Any, seed: int) -> Tensor:
    """Return the negative log-likelihood of each row; the mean over rows is that over all unmasked observations."""
    prediction = predict(model, guide, validation, seed=seed, progress=False)
    values = -prediction.log_likelihood().detach().cpu().double().reshape(len(prediction), -1)
    counts = torch.ones_like(values).bool()
    if prediction.mask is not None:
        missing = prediction.mask.dim() - prediction.log_likelihood().dim()
        counts = with_any(prediction.mask, missing).cpu().reshape(len(prediction), -1)
    return values.where(counts, 0).sum(1)[counts.any(1)] * (float(counts.any(1).sum()) / float(counts.sum()))


def _text(value: Any) -> str:
    return f"{value:g}" if are_numbers([value]) else str(value)
