# SPDX-License-Identifier: Apache-2.0
"""Which of several predictions of the same held-out data is better, and by how much more than chance."""

import reprlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.predictive import Prediction

if TYPE_CHECKING:
    import pandas


def compare_held_out(predictions: Mapping[str, Prediction], y: Any = None) -> "pandas.DataFrame":
    r"""Table of log scores on data that no posterior was trained on.

    The expected log predictive density of m held-out examples, and the difference to the best, pair by pair:

    .. math::
        \mathrm{elpd}_a = \sum_{i=1}^m \log p_a(y_i \mid x_i), \qquad
        \mathrm{dse}_a = \sqrt{\frac{m}{m-1} \sum_{i=1}^m (d_i - \bar d)^2}, \qquad
        d_i = \log p_a(y_i \mid x_i) - \log p_{\text{best}}(y_i \mid x_i)

    Every prediction is scored as what it is, whatever its rule: at the mean, by moments, linearised or over draws.
    ``az.loo`` and ``az.compare`` estimate the same number from the data of the training, by reweighting posterior
    draws; that needs predictions which average over these draws (:class:`~pyro_dvi.Samples`), and a posterior near
    the exact one. A difference well above its ``dse`` is more than the choice of examples explains; other training
    runs may still differ.

    Status: unbiased for new examples of the same kind; the standard errors treat examples as independent.

    Args:
        predictions: by name, each of the same data: same site, same examples in the same order.
        y: held-out observations, examples first; by default those that came with the predictions. What the model
            masks is left out.

    Returns:
        ``pandas.DataFrame``, a row for each name from best to worst, with ``rank``, ``elpd`` and its standard error
        ``se``, ``elpd_diff`` (to the best, zero or less) and its standard error ``dse``, all in nats;
        ``az.plot_compare`` of ArviZ 1.x draws it. One example gives no standard errors: NaN.

    Raises:
        ArgumentError: no predictions, or something else in their place.
        DataError: predictions of other examples, sites, observations or masks than the first.

    Source: Vehtari, Gelman & Gabry (2017), "Practical Bayesian model evaluation using leave-one-out cross-validation
    and WAIC", Eq. 23-24, for held-out data.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> import pyro_dvi as dvi
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> def fixed(slope):
        ...     return lambda x, y=None: pyro.sample("slope", dist.Delta(torch.tensor(slope)))
        >>> x = torch.linspace(-1, 1, 6)
        >>> table = compare_held_out(
        ...     {
        ...         "flat": dvi.predict(model, fixed(1.0), (x, 2 * x)),
        ...         "steep": dvi.predict(model, fixed(2.0), (x, 2 * x)),
        ...     }
        ... )
        >>> table[["rank", "elpd_diff"]].round(2)
               rank  elpd_diff
        steep     0        0.0
        flat      1       -5.6
    """
    import pandas

    scores = _scores(predictions, y)
    totals = {name: float(score.sum()) for name, score in scores.items()}
    order = sorted(totals, key=lambda name: -totals[name])
    best = scores[order[0]]
    rows = [
        {
            "rank": rank,
            "elpd": totals[name],
            "se": _standard_error(scores[name]),
            "elpd_diff": float((scores[name] - best).sum()),
            "dse": _standard_error(scores[name] - best),
        }
        for rank, name in enumerate(order)
    ]
    return pandas.DataFrame(rows, index=order)


def _scores(predictions: Mapping[str, Prediction], y: Any) -> dict[str, Tensor]:
    """Log predictive density of every example, by name."""
    is_mapping = isinstance(predictions, Mapping) and len(predictions) > 0
    if not is_mapping or not all(isinstance(own, Prediction) for own in predictions.values()):
        raise ArgumentError(
            "predictions must map names to what predict returned, as {'at the mean': prediction}, not "
            f"{reprlib.repr(predictions)}"
        )
    found: dict[str, Tensor] = {}
    first_name, first = next(iter(predictions.items()))
    for name, prediction in predictions.items():
        if prediction.site != first.site or len(prediction) != len(first):
            raise DataError(
                f"{name!r} predicts {len(prediction)} examples of site {prediction.site!r}, {first_name!r} predicts "
                f"{len(first)} of {first.site!r}: predict the same data with each"
            )
        if y is None and _differ(prediction.observed, first.observed):
            raise DataError(
                f"{name!r} and {first_name!r} have other observations: predict the same data, in the same order "
                "(a loader without shuffle), with each"
            )
        score = prediction.log_likelihood(y).detach().cpu().double()
        found[name] = score.reshape(len(score), -1)
        if not torch.equal(found[name].isnan(), found[first_name].isnan()):
            raise DataError(
                f"{name!r} and {first_name!r} mask other observations: score the same ones with each"
            )
    counts = ~found[first_name].isnan()  # not a number: masked
    # The parts of an example are no examples, and one that is masked as a whole is none.
    return {name: score[counts.any(-1)].nansum(-1) for name, score in found.items()}


def _differ(a: Tensor | None, b: Tensor | None) -> bool:
    return a is not None and b is not None and not torch.equal(a.cpu(), b.cpu())


def _standard_error(values: Tensor) -> float:
    """Of the sum."""
    return float(values.std() * len(values) ** 0.5) if len(values) > 1 else float("nan")
