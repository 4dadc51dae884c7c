# SPDX-License-Identifier: Apache-2.0
"""Checks of models against data: prior predictive checks, and log scores on held-out data."""

import math
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.table import Table
from pyro_dvi.core.undisturbed import device_of
from pyro_dvi.errors import ArgumentError, DataError, ModelError, NonFiniteError
from pyro_dvi.predictive import Prediction
from pyro_dvi.predictive.components import Components
from pyro_dvi.predictive.engine.inputs import batches
from pyro_dvi.predictive.engine.model_runs import evaluation_mode, observed_run, seeded
from pyro_dvi.predictive.predictive_distribution import class_log_probabilities
from pyro_dvi.predictive.predictive_mixture import ObservationDraws
from pyro_dvi.predictive.rules.rule import PriorSamples
from pyro_dvi.runs.sites import choose_response, counted, responses

if TYPE_CHECKING:
    import pandas

UNUSUAL = 0.01  # two-sided p-value below which a statistic of the data is called unusual
SURE = 0.9  # mean confidence of networks drawn from the prior above which they are called overconfident
VAGUE = 10.0  # multiple of the spread of the data above which a prior is called vague


def prior_predictive_check(
    model: Callable[..., Any],
    data: Any,
    *,
    num_samples: int = 200,
    site: str | None = None,
    observed: str | None = None,
    batch_size: int = 1000,
    seed: int | None = None,
) -> Table:
    r"""Compare the data with data sets drawn from the prior, to choose the scale of a prior.

    .. math::
        \theta \sim p(\theta), \quad y_{\mathrm{rep}} \sim p(y \mid x, \theta), \qquad
        p = P\bigl(T(y_{\mathrm{rep}}) > T(y)\bigr) + \tfrac12 P\bigl(T(y_{\mathrm{rep}}) = T(y)\bigr)

    For regression, the statistics T are the mean, standard deviation, minimum and maximum. For classification, T is the
    proportion of the most frequent class, and the table also shows the mean probability of the most probable class
    under the prior. The range of data drawn from the prior should include the observed data without being much wider.
    Even if a prior looks harmless for single weights, it can make a deep network overconfident in one class. Neither
    training nor a guide is needed. Modules run in evaluation mode. For other statistics and for figures, export draws
    from the prior with ``to_arviz(prior=200)``.

    Status: p-values are exact for the prior, up to Monte Carlo error. If the data came from the prior, each statistic
    would be called unusual in one of a hundred cases.

    Args:
        model: the Pyro model, a module or a function.
        data: as for :func:`~pyro_dvi.predict`, with observations: ``(x, y)`` or a loader. Only the first ``batch_size``
            examples are used, or the first batch of a loader.
        num_samples: number of data sets to draw; with fewer than a hundred, nothing is called unusual.
        site: observed site, if the model has several.
        observed: name of the model's argument for the observation. By default, it is the argument whose default value
            is None; if there are several, the one with the name of the site is used.
        batch_size: number of examples to use.
        seed: seed of the draws. The global random state is not changed.

    Returns:
        A report to print. For each ``statistic``, it shows the value for the ``data``, quantiles under the prior, and
        the ``p-value``.

    Raises:
        ArgumentError: if there are fewer than two draws.
        DataError: if the data are invalid or have no observations.
        ModelError: if the model has no observed site, if it has several and ``site`` is not given, or if it has a prior
            that cannot be sampled.
        NonFiniteError: if a statistic is NaN.

    Source: Box (1980), "Sampling and Bayes' inference in scientific modelling and robustness"; Gabry et al. (2019),
    "Visualization in Bayesian workflow", section 3.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> x = torch.linspace(-1, 1, 20)
        >>> check = prior_predictive_check(model, (x, 30 * x), seed=0)
        >>> [row["statistic"] for row in check.rows if row["finding"] == "unusual"]
        ['sd', 'min', 'max']
    """
    check_count("num_samples", num_samples, least=2)
    device = device_of(model)
    names = [site] if site else []
    options: Any = {"observed": observed, "batch_size": batch_size, "device": device}
    batch = next(batches(model, data, sites=lambda _: names, **options))
    if batch.observed is None:
        raise DataError("the check needs observations: pass them with the inputs, as (x, y)")
    with evaluation_mode(model), seeded(seed, device) as seed:
        torch.manual_seed(seed)
        try:
            nodes = observed_run(model, batch, {})
        except NotImplementedError as error:
            raise ModelError(
                f"cannot draw from a prior of the model ({type(error).__name__} {error}): improper priors have no "
                "prior predictive distribution, so use a proper prior"
            ) from error
        latents = [name for name in responses(nodes, ()) if not nodes[name]["is_observed"]]
        name = choose_response(
            site, [name for name in responses(nodes, latents) if nodes[name]["is_observed"]]
        )
        rule = PriorSamples(num_samples, model, batch.inputs, tuple(latents))
        noise = torch.Generator().manual_seed(seed + 1)  # must differ from the random numbers of the latents
        drawn = _DataSets(num_samples, num_samples, noise)
        Components(model, None, rule, seed).read(drawn, replace(batch, observed=None), name)
    statistics = _statistics(nodes[name], drawn)
    rows = [_row(label, float(values[0]), values[1:]) for label, values in statistics.items()]
    numbers = dict.fromkeys(("data", "5%", "50%", "95%"), ".4g")
    formats = {"statistic": "", **numbers, "p-value": ".3f", "finding": ""}
    heading = f"{num_samples:,} data sets of {batch.num_rows:,} examples from the prior, site {name!r}"
    return Table(heading, rows, formats, _verdict(rows))


class _DataSets(ObservationDraws):
    """Data sets drawn from the prior; for classes, also the mean probability of the most probable class in each set."""

    def __init__(self, count: int, num_components: int, seeds: torch.Generator) -> None:
        super().__init__(count, num_components, seeds)
        self.confidence: list[float] = []

    def sample(self, fn: Any) -> None:
        """Draw one data set."""
        super().sample(fn)
        log_p = class_log_probabilities(fn)
        if log_p is not None:
            self.confidence.append(float(log_p.amax(-1).exp().mean()))


def _statistics(node: Any, drawn: _DataSets) -> dict[str, np.ndarray]:
    """Return each statistic for the data and then for every drawn data set, without the values that the model masks."""
    fn, counts = node["fn"], counted(node)
    examples = drawn.first.axis - len(fn.event_shape)
    sets = torch.cat([node["value"].movedim(examples, 0).cpu()[None], drawn.values.to(node["value"].dtype)])
    keep = torch.ones(sets.shape[1:], dtype=torch.bool)
    if counts is not None:
        keep = counts.movedim(examples, 0).cpu()
    if not drawn.confidence:
        numbers = sets[:, keep].double()
        found = {"mean": numbers.mean(1), "sd": numbers.std(1, correction=0)}
        found |= {"min": numbers.amin(1), "max": numbers.amax(1)}
        return {name: values.numpy() for name, values in found.items()}
    if fn.event_shape:  # one-hot encoding
        sets, keep = sets.argmax(-1), keep.any(-1)
    shares = [float(own.bincount().max() / len(own)) for own in sets.long()[:, keep]]
    confidence = [math.nan, *drawn.confidence]  # observed labels have no confidence
    return {"largest share": np.array(shares), "confidence": np.array(confidence)}


def _row(name: str, observed: float, values: np.ndarray) -> dict[str, Any]:
    if np.isnan(values).any():
        raise NonFiniteError(
            f"statistic {name!r} is NaN for some draws from the prior: check for overflow, such as in an exponential "
            "under a wide prior"
        )
    above = float((values > observed).sum() + 0.5 * (values == observed).sum())
    tail = (min(above, len(values) - above) + 0.5) / (len(values) + 1)  # never zero
    low, median, high = np.quantile(values, (0.05, 0.5, 0.95), method="inverted_cdf").tolist()
    p_value, finding = above / len(values), "unusual" if 2 * tail < UNUSUAL else ""
    if name == "confidence":  # observed labels have no confidence
        p_value, finding = math.nan, "overconfident" if median > SURE else ""
    row = {"statistic": name, "data": observed, "5%": low, "50%": median, "95%": high}
    return row | {"p-value": p_value, "finding": finding}


def _verdict(rows: list[dict[str, Any]]) -> str:
    findings = []
    for row in rows:
        statistic, median, data = row["statistic"], row["50%"], row["data"]
        if row["finding"] == "unusual":
            side = "above" if row["p-value"] < 0.5 else "below"
            findings.append(f"The {statistic} of the data is {side} nearly all draws from the prior.")
        if statistic == "sd" and median > VAGUE * data > 0:
            findings.append(
                f"The prior is vague: data drawn from it typically spread {median / data:.3g} times as far."
            )
        if row["finding"] == "overconfident":
            findings.append(
                f"Networks drawn from the prior are {median:.0%} confident: try narrower priors, such as fan_in."
            )
    return " ".join(findings) or "No statistic of the data is unusual under the prior."


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
        ArgumentError: if ``predictions`` is empty or not a mapping of predictions.
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
    if not predictions or not all(isinstance(own, Prediction) for own in predictions.values()):
        raise ArgumentError(
            f"predictions must map names to results of predict, not {reprlib.repr(predictions)}"
        )
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
