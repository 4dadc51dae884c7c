# SPDX-License-Identifier: Apache-2.0
r"""Summaries of a set of observations, for checks of a model against its data.

Could the prior have produced these data?

Which of several predictions of the same held-out data is better, and by how much more than chance.
"""

import math
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.distributions import innermost
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.table import Columns, Report
from pyro_dvi.core.undisturbed import device_of
from pyro_dvi.errors import ArgumentError, DataError, ModelError, NonFiniteError, UnsupportedError
from pyro_dvi.predictive import Prediction
from pyro_dvi.predictive.batch_prediction import class_log_probabilities
from pyro_dvi.predictive.components import Components
from pyro_dvi.predictive.engine.inputs import Batch, batches
from pyro_dvi.predictive.engine.model_runs import check_observation, evaluation_mode, observed_run, seeded
from pyro_dvi.predictive.observation_draws import ObservationDraws
from pyro_dvi.predictive.rules.rule import PriorSamples
from pyro_dvi.runs.sites import choose_response, example_axis, responses

if TYPE_CHECKING:
    import pandas


Statistic = Callable[[Tensor], Any]

MANY_CLASSES = 10  # above which single classes are not followed


def default_statistics(fn: Any) -> dict[str, Statistic]:
    """Return what is worth a look in observations of a distribution.

    Numbers have their mean, standard deviation, minimum and maximum; classes the share of each (up to ten), the largest
    share, and how many occur; labels 0 and 1 the share of 1.

    Args:
        fn: the observed distribution.
    """
    base = innermost(fn)
    if isinstance(base, td.Bernoulli):
        return {"share of 1": lambda y: y.double().mean()}
    if isinstance(base, td.Categorical | td.OneHotCategorical):
        one_hot = isinstance(base, td.OneHotCategorical)
        num_classes = base.probs.shape[-1]

        def shares(y: Tensor) -> Tensor:
            labels = y.argmax(-1) if one_hot else y
            counts = torch.bincount(labels.long().flatten(), minlength=num_classes)
            return counts.double() / counts.sum()

        def share(k: int, y: Tensor) -> Tensor:
            return shares(y)[k]

        followed = range(num_classes if num_classes <= MANY_CLASSES else 0)
        return {
            **{f"share of class {k}": partial(share, k) for k in followed},
            "largest share": lambda y: shares(y).max(),
            "classes seen": lambda y: (shares(y) > 0).sum(),
        }
    return {
        "mean": lambda y: y.double().mean(),
        "sd": lambda y: y.double().std(correction=0),
        "min": lambda y: y.min(),
        "max": lambda y: y.max(),
    }


def applied(statistics: Mapping[str, Statistic], y: Tensor) -> dict[str, float]:
    """Return the value of every statistic.

    Raises:
        ArgumentError: one that fails, or gives anything else than a number.
    """
    values = {}
    for name, statistic in statistics.items():
        try:
            values[name] = float(statistic(y))
        except Exception as error:
            raise ArgumentError(
                f"statistic {name!r} failed for observations of shape {tuple(y.shape)} and dtype {y.dtype}: "
                f"{type(error).__name__}: {error}. It has to give one number, such as y.quantile(0.9)"
            ) from error
    return values


UNUSUAL = 0.01  # two-sided p-value below which a statistic of the data is called unusual
SURE = 0.9  # mean confidence of networks from the prior, above which narrower priors are suggested
VAGUE = 10.0  # times the spread of the data, from which a prior is called vague


@dataclass(frozen=True)
class StatisticCheck:
    r"""One statistic of the data among those of data drawn from the prior.

    Attributes:
        statistic: name.
        observed: its value T for the data.
        low: 5 % quantile over draws.
        median: of the draws.
        high: 95 % quantile.
        p_value: share of draws above the data, :math:`P(T_{\mathrm{rep}} > T) + \tfrac12 P(T_{\mathrm{rep}} = T)`.
        error: Monte-Carlo error of that share, the standard deviation of Beta(k + 1/2, S - k + 1/2) for k of S draws.
        two_sided: probability, under the prior, of a value as far out as this one: twice the smaller tail, of the mean
            of the same Beta distribution, which is never zero.
    """

    statistic: str
    observed: float
    low: float
    median: float
    high: float
    p_value: float
    error: float
    two_sided: float

    @property
    def is_unusual(self) -> bool:
        """Whether less than one in a hundred data sets of the prior is as far out; takes a hundred draws to tell."""
        return self.two_sided < UNUSUAL


@dataclass(frozen=True)
class PriorPredictiveCheck(Report):
    """Statistics of the data beside those of data sets from the prior.

    ``print(check)`` shows a table and the verdict; :func:`pyro_dvi.analysis.plots.prior_predictive` draws it.

    Attributes:
        rows: one for each statistic.
        draws: values of each statistic for the drawn data sets, arrays ``[num_samples]``.
        confidence: mean probability of the likeliest class, for each draw of the weights; None if the response is no
            class.
        chance: that probability where all classes are equally likely; None likewise.
        site: the observed site.
        num_samples: data sets drawn.
        num_examples: examples in each.
    """

    rows: tuple[StatisticCheck, ...]
    draws: Mapping[str, np.ndarray]
    confidence: np.ndarray | None
    chance: float | None
    site: str
    num_samples: int
    num_examples: int

    @property
    def verdict(self) -> str:
        """The finding in words."""
        findings = []
        unusual = [row for row in self.rows if row.is_unusual]
        if unusual:
            what = ", ".join(
                f"{row.statistic} ({'above' if row.p_value < 0.5 else 'below'} nearly all draws)"
                for row in unusual
            )
            findings.append(
                f"The prior hardly produces data like these: {what}. Move or rescale the priors or the data, or "
                "look for outliers."
            )
        else:
            findings.append("No statistic of the data is unusual under the prior.")
        spread = next((row for row in self.rows if row.statistic == "sd"), None)
        if spread is not None and spread.observed > 0 and spread.median > VAGUE * spread.observed:
            findings.append(
                f"It is vague: data from it typically spread {spread.median / spread.observed:.3g} times as far."
            )
        if self.confidence is not None and self.chance is not None:
            confidence = float(np.mean(self.confidence))
            findings.append(
                f"Networks from the prior are {confidence:.0%} confident on average, where {self.chance:.0%} is no "
                "preference."
            )
            if confidence > SURE:
                findings.append(
                    "Narrower priors of the weights, such as prior_scale=fan_in, make them less sure."
                )
        return " ".join(findings)

    def _shown(self) -> list[Any]:
        titles = ("statistic", "data", "prior 5 %", "median", "95 %", "p-value", "± error", "")
        lines = [
            (
                row.statistic,
                *(f"{value:.4g}" for value in (row.observed, row.low, row.median, row.high)),
                f"{row.p_value:.3f}",
                f"{row.error:.3f}",
                "unusual" if row.is_unusual else "",
            )
            for row in self.rows
        ]
        head = (
            f"Prior predictive check of site {self.site!r}: {self.num_samples:,} data sets of {self.num_examples:,} "
            "examples"
        )
        return [head, Columns(titles, lines), self.verdict]

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return the rows as a ``pandas.DataFrame``."""
        import pandas

        return pandas.DataFrame([asdict(row) for row in self.rows]).set_index("statistic")


def prior_predictive_check(
    model: Callable[..., Any],
    data: Any,
    *,
    statistics: Mapping[str, Statistic] | None = None,
    num_samples: int = 200,
    site: str | None = None,
    observed: str | None = None,
    batch_size: int = 1000,
    seed: int | None = None,
    progress: bool = False,
) -> PriorPredictiveCheck:
    r"""Compare statistics of the data with those of data sets drawn from the prior.

    .. math::
        \theta \sim p(\theta), \quad y_{\mathrm{rep}} \sim p(y \mid x, \theta), \qquad
        p = P\bigl(T(y_{\mathrm{rep}}) > T(y)\bigr) + \tfrac12 P\bigl(T(y_{\mathrm{rep}}) = T(y)\bigr)

    No training is needed, and no guide. One data set is drawn for each draw of the latents, and modules run in
    evaluation mode: batch normalisation uses, and keeps, the statistics that it has. A prior should make the data
    possible without being so wide that they are a needle in it; priors of single weights, which look harmless, can make
    a deep network certain of one class.

    Status: p-values are exact for the prior up to Monte-Carlo error, which is stated. If the data came from the prior,
    each statistic would be called unusual once in a hundred times.

    Args:
        model: the Pyro model, a module or a function.
        data: as in :func:`~pyro_dvi.predict`, with observations: ``(x, y)`` or a loader. They are kept in memory, as
            are the drawn data sets; a few hundred examples will do.
        statistics: functions from observations ``[N, ...]``, on the CPU, to a number, by name. By default mean,
            standard deviation, minimum and maximum; for classes the share of each (up to ten classes), the largest
            share and the number of classes that occur.
        num_samples: data sets to draw; of fewer than a hundred, none is far enough out to be called unusual.
        site: observed site, where the model has several.
        observed: the model's argument that holds the observation; by default the one whose default is None, of several
            the one that is called like ``site``.
        batch_size: examples at a time; a loader has its own.
        seed: of the draws. The global random state is left as it was.
        progress: show a progress bar over batches.

    Returns:
        The check, to print.

    Raises:
        ArgumentError: fewer than two draws, no statistics, or one that fails or gives no number.
        DataError: data without observations, or that cannot be right.
        ModelError: no observed site, several and no ``site``, or a prior that cannot be drawn from.
        NonFiniteError: a statistic is NaN.
        UnsupportedError: the model masks some of the observed values.

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
        >>> [row.statistic for row in check.rows if row.is_unusual]
        ['sd', 'min', 'max']
    """
    check_count("num_samples", num_samples, least=2)
    if statistics is not None and not (isinstance(statistics, Mapping) and statistics):
        raise ArgumentError(
            "statistics are functions by name, as {'90 %': lambda y: y.quantile(0.9)}, "
            f"not {type(statistics).__name__}"
        )
    device = device_of(model)
    options: Any = {"observed": observed, "batch_size": batch_size, "device": device}
    split = list(batches(model, data, sites=lambda _: [site] if site else [], **options))
    with evaluation_mode(model), seeded(seed, device) as used_seed:
        torch.manual_seed(used_seed)
        node, shared = _response(model, split, site)
        name, fn = node["name"], node["fn"]
        split = [_checked(model, batch, shared, name) for batch in split]
        rows = example_axis(name, node, split[0].num_rows) - len(fn.event_shape)
        y = torch.cat([torch.as_tensor(batch.observed).movedim(rows, 0) for batch in split]).cpu()
        chosen = default_statistics(fn) if statistics is None else statistics
        actual = applied(chosen, y)
        rule = PriorSamples(num_samples, model, split[0].inputs, tuple(shared))
        components = Components(model, None, rule, used_seed)
        noise = torch.Generator().manual_seed(used_seed + 1)  # other numbers than those of the latents
        parts = [_DataSets(num_samples, num_samples, noise) for _ in split]
        shown = progress_bar(progress, unit="batch", label="prior", of=split)
        for part, batch in zip(parts, shown, strict=True):
            components.read(part, batch, name)
    values = [applied(chosen, drawn) for drawn in torch.cat([part.values for part in parts], 1)]
    draws = {label: np.array([value[label] for value in values]) for label in chosen}
    return PriorPredictiveCheck(
        tuple(_row(label, actual[label], drawn) for label, drawn in draws.items()),
        draws,
        *_confidence(fn, parts),
        name,
        num_samples,
        len(y),
    )


def _checked(model: Callable[..., Any], batch: Batch, shared: Mapping[str, Tensor], name: str) -> Batch:
    """Return a batch whose observations fit, and of which none is masked."""
    batch = check_observation(model, batch, shared, name)
    if batch.mask is not None:
        raise UnsupportedError(
            f"the model masks some of the observed values at site {name!r}, which statistics of whole data sets "
            "would count: pass the examples that count alone"
        )
    return batch


class _DataSets(ObservationDraws):
    """Data sets at the inputs of one batch; for classes also the probability of the likeliest, for each label."""

    def __init__(self, count: int, num_components: int, seeds: torch.Generator) -> None:
        super().__init__(count, num_components, seeds)
        self.likeliest: list[Tensor] = []

    def sample(self, fn: Any) -> None:
        """Draw one."""
        super().sample(fn)
        log_p = class_log_probabilities(fn)
        if log_p is not None:
            self.likeliest.append(log_p.amax(-1).exp().cpu().double().flatten())


def _confidence(fn: Any, parts: list[_DataSets]) -> tuple[np.ndarray | None, float | None]:
    """Mean probability of the likeliest class for each draw, and by chance; None without classes."""
    log_p = class_log_probabilities(fn)
    if log_p is None:
        return None, None
    return torch.cat([torch.stack(part.likeliest) for part in parts], 1).mean(1).numpy(), 1 / log_p.shape[-1]


def _response(
    model: Callable[..., Any], split: Sequence[Batch], site: str | None
) -> tuple[Any, dict[str, Tensor]]:
    """Return the observed site of a run with draws from the prior, and the latents that all batches share.

    Latents of single examples are drawn with their batch.
    """
    if any(batch.observed is None for batch in split):
        raise DataError("the check compares with observations: pass them with the inputs, as (x, y)")
    try:
        nodes = observed_run(model, split[0], {})
    except NotImplementedError as error:
        raise ModelError(
            f"a prior of the model cannot be drawn from ({type(error).__name__} {error}): improper priors have no "
            "prior predictive distribution"
        ) from error
    names = responses(nodes, ())
    node = nodes[choose_response(site, [name for name in names if nodes[name]["is_observed"]])]
    axis = example_axis(node["name"], node, split[0].num_rows)
    plates = {f.name for f in node["cond_indep_stack"] if f.vectorized and f.dim == axis}
    return node, {
        name: nodes[name]["value"]
        for name in names
        if not (nodes[name]["is_observed"] or plates & {f.name for f in nodes[name]["cond_indep_stack"]})
    }


def _row(name: str, observed: float, values: np.ndarray) -> StatisticCheck:
    if np.isnan(observed) or np.isnan(values).any():
        raise NonFiniteError(
            f"statistic {name!r} is NaN for {'the data' if np.isnan(observed) else 'some draws of the prior'}: do "
            "draws overflow (an exponential of a wide prior), or does the statistic divide by zero?"
        )
    above = float((values > observed).sum() + 0.5 * (values == observed).sum())
    total = len(values)
    a, b = above + 0.5, total - above + 0.5
    error = math.sqrt(a * b / ((a + b) ** 2 * (a + b + 1)))
    low, median, high = np.quantile(values, (0.05, 0.5, 0.95), method="inverted_cdf").tolist()
    return StatisticCheck(name, observed, low, median, high, above / total, error, 2 * min(a, b) / (a + b))


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
