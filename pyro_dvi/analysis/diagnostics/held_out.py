# SPDX-License-Identifier: Apache-2.0
"""Comparison of methods by their log scores on held-out data."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_dvi.errors import DataError
from pyro_dvi.predictive import Prediction

if TYPE_CHECKING:
    import pandas


def compare_held_out(predictions: Mapping[str, Prediction], y: Any = None) -> "pandas.DataFrame":
    r"""Return a table of log scores on data that were not used for training.

    For m held-out examples, it contains the expected log predictive density (elpd) of each prediction, and the standard
    error of its paired difference from the best prediction:

    .. math::
        \mathrm{elpd}_a &= \sum_{i=1}^m \log p_a(y_i \mid x_i), \\
        \mathrm{dse}_a &= \sqrt{\frac{m}{m-1} \sum_{i=1}^m (d_i - \bar d)^2}, \qquad
        d_i = \log p_a(y_i \mid x_i) - \log p_{\text{best}}(y_i \mid x_i)

    Every prediction is scored with its own rule: at the mean, with moments, linearised or with draws. ``az.loo`` and
    ``az.compare`` estimate the same quantity from the training data, by reweighting posterior draws. Their estimate
    requires predictions that average over these draws (:class:`~pyro_dvi.Samples`), and a posterior close to the exact
    one. A difference well above its ``dse`` is not explained by the choice of examples, but may be explained by the
    variation between training runs.

    Status: unbiased for new examples from the same distribution; the standard errors treat examples as independent.

    Args:
        predictions: predictions by name, all of the same site and the same examples in the same order.
        y: held-out observations, with examples in the first dimension; by default those that came with the predictions.
            Masked examples are omitted.

    Returns:
        ``pandas.DataFrame`` with one row per name, from best to worst. The columns are ``rank``, ``elpd`` and its
        standard error ``se``, and ``elpd_diff`` (the difference from the best, zero or less) and its standard error
        ``dse``; all but the rank are in nats. ``az.plot_compare`` of ArviZ 1.x plots this table. With a single example,
        standard errors are NaN.

    Raises:
        DataError: if examples, sites, observations or masks differ between predictions.

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
    """Return the log predictive density of every example, by name."""
    found: dict[str, Tensor] = {}
    first_name, first = next(iter(predictions.items()))
    for name, own in predictions.items():
        same = own.site == first.site and len(own) == len(first)
        if same and y is None and own.observed is not None and first.observed is not None:
            same = torch.equal(own.observed.cpu(), first.observed.cpu())
        if same:
            score = own.log_likelihood(y).detach().cpu().double()
            found[name] = score.reshape(len(score), -1)
            same = torch.equal(found[name].isnan(), found[first_name].isnan())
        if not same:
            raise DataError(
                f"{name!r} and {first_name!r} predict different examples, sites, observations or masks: predict the "
                "same data, in the same order (a loader without shuffle), with each method"
            )
    counts = ~found[first_name].isnan()  # NaN where masked
    # Sum over the parts of each example, and drop examples that are masked completely.
    return {name: score[counts.any(-1)].nansum(-1) for name, score in found.items()}


def _standard_error(values: Tensor) -> float:
    """Return the standard error of the sum of the values."""
    return float(values.std() * len(values) ** 0.5) if len(values) > 1 else float("nan")
