# SPDX-License-Identifier: Apache-2.0
r"""Have the posterior standard deviations converged?

How sure is the posterior that a weight is not zero?
"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from pyro_dvi.analysis.diagnostics.posterior_spread import Spread, posterior_spread
from pyro_dvi.core.arguments import check_positive
from pyro_dvi.core.table import Columns, Report
from pyro_dvi.errors import ArgumentError, DataError, GuideError

if TYPE_CHECKING:
    import pandas


LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)  # of the quantiles over the elements of a site

MOVING = 0.01  # relative change above which scales are said to move
AT_START = 0.05  # relative change since the start below which a scale was hardly trained
FALLEN = 0.05  # share of the largest learning rate below which hardly anything moves
LIKE_PRIOR = 0.9  # fraction of the prior scale above which an element has learned next to nothing


@dataclass(frozen=True)
class SiteScales:
    r"""Posterior standard deviations σ of one site, in unconstrained space.

    Attributes:
        site: name.
        num_elements: size.
        quantiles: of σ over elements, at 5, 25, 50, 75 and 95 %.
        to_prior: the same quantiles of σ over the prior's standard deviation; NaN where it has none.
        to_start: typical ratio of σ to where training started, the exponential of the mean
            :math:`\log(\sigma/\sigma_0)`; NaN where that is not known.
        start_to_prior: median of where training started over the prior's standard deviation; NaN likewise.
        like_prior: share of elements with a σ of at least 90 % of the prior's: they have learned next to nothing.
        change: typical relative change since the snapshot, the exponential of the mean
            :math:`|\log(\sigma/\sigma_{\mathrm{then}})|` minus one; NaN without a snapshot.
        state: ``"moves"``, ``"settled"``, ``"at its start"``, or ``"not trained"``; without a snapshot ``"has moved"``,
            or ``"unknown"`` where the start is not known either.
    """

    site: str
    num_elements: int
    quantiles: tuple[float, ...]
    to_prior: tuple[float, ...]
    to_start: float
    start_to_prior: float
    like_prior: float
    change: float
    state: str


@dataclass(frozen=True)
class ScaleCourse:
    r"""Change of the mean posterior scale over the last tenth of training.

    Attributes:
        epochs: number of epochs that the change is over.
        change: relative change :math:`\bar\sigma_T / \bar\sigma_{T-k} - 1` over these k epochs.
        doubt: why it says nothing that the mean scale stands still; empty where it does.
    """

    epochs: int
    change: float
    doubt: str = ""

    @property
    def moves(self) -> bool:
        """Whether the scale changed by more than one per cent."""
        return abs(self.change) > MOVING

    def __str__(self) -> str:
        last = "the last epoch" if self.epochs == 1 else f"the last {self.epochs} epochs"
        what = f"still {'falls' if self.change < 0 else 'rises'}" if self.moves else self.doubt or "settled"
        return f"{what}: {self.change:+.1%} in {last}"


@dataclass(frozen=True)
class ScaleReport(Report):
    """Posterior scales of every site, and whether they have converged.

    ``print(report)`` shows a table and the verdict; :func:`pyro_dvi.analysis.plots.posterior_scales` draws it.

    Attributes:
        rows: one for each site with a Gaussian posterior, in the order of the model.
        course: the mean scale over the last tenth of training; None without a history of three epochs.
        guide: name of the guide.
    """

    rows: tuple[SiteScales, ...]
    course: ScaleCourse | None
    guide: str

    @property
    def converged(self) -> bool | None:
        """Whether the scales stand still; None where neither a snapshot nor a history can tell."""
        states = {row.state for row in self.rows}
        if states == {"not trained"}:
            return True
        if "at its start" in states or "moves" in states or (self.course is not None and self.course.moves):
            return False
        settled = "settled" in states if self.course is None else not self.course.doubt
        return True if settled else None

    @property
    def verdict(self) -> str:
        """The finding in words, with what to do about it."""
        longer = "train longer or, where gradients train them, raise scale_multiplier of learning_rates"
        if all(row.state == "not trained" for row in self.rows):
            return "Scales are not trained but computed, or fixed: there is nothing to converge."
        findings = []
        states = {"at its start": "are where they started: hardly trained", "moves": "still move"}
        for state, what in states.items():
            names = [row.site for row in self.rows if row.state == state]
            if names:
                findings.append(f"{_sites(names, len(self.rows))} {what}.")
        if self.course is not None:
            findings.append(f"The mean scale {self.course}.")
        if self.converged is False:
            return f"Scales have not converged; {longer}. " + " ".join(findings)
        if self.converged:
            return "Scales have settled. " + " ".join(findings)
        known = all(row.state != "unknown" for row in self.rows)
        moved = (
            "Scales have moved from their start; whether they still do" if known else "Whether scales move"
        )
        history = ", or history" if self.course is None else ""
        advice = f"Pass earlier=scale_snapshot(guide) of some epochs ago{history}."
        return " ".join([f"{moved} is not known. {advice}", *findings])

    def _shown(self) -> list[Any]:
        quantities = ("σ / prior", "like prior", "σ / start", "change")
        titles = ("site", "elements", "σ 5 %", "median", "95 %", *quantities, "")
        lines = [
            (
                row.site,
                f"{row.num_elements:,}",
                *(f"{row.quantiles[k]:.3g}" for k in (0, 2, 4)),
                _number(row.to_prior[2], ".3g"),
                _number(row.like_prior, ".0%"),
                _number(row.to_start, ".3g"),
                _number(row.change, ".1%"),
                row.state,
            )
            for row in self.rows
        ]
        return [f"Posterior scales of {self.guide}", Columns(titles, lines), self.verdict]

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return the rows as a ``pandas.DataFrame``, one column for each quantile."""
        import pandas

        records = []
        for row in self.rows:
            record = asdict(row)
            for name, title in (("quantiles", "scale"), ("to_prior", "to_prior")):
                values = record.pop(name)
                record |= {f"{title}_{level:.0%}": value for level, value in zip(LEVELS, values, strict=True)}
            records.append(record)
        return pandas.DataFrame(records).set_index("site")


def scale_report(
    guide: Any,
    *,
    earlier: Mapping[str, Tensor] | None = None,
    history: Any = None,
    tolerance: float = MOVING,
) -> ScaleReport:
    r"""Report whether posterior standard deviations have converged, site by site.

    Scales converge after the means, and training that stops when the loss looks flat leaves them near their start: the
    posterior is then as narrow, or as wide, as it was initialised. Each site's σ is compared with the prior's, with the
    start, and with an earlier snapshot. Sites are judged by the typical change of their elements,
    :math:`\exp(\mathrm{mean}\,|\log(\sigma/\sigma_{\mathrm{then}})|) - 1`.

    Status: the numbers are exact; the verdict is a rule of thumb. A change below ``tolerance`` between two snapshots
    means little if they are a few steps apart, or if the learning rate has decayed to nothing in between.

    Args:
        guide: a guide of this library (a :class:`~pyro_dvi.LaplaceGuide` after its fit), Pyro's ``AutoNormal``,
            ``AutoDiagonalNormal``, ``AutoMultivariateNormal``, or an ``AutoGuideList`` of these.
        earlier: what :func:`scale_snapshot` returned some epochs ago.
        history: what :func:`~pyro_dvi.fit` returned; its ``posterior_scale`` is judged by :func:`scale_course`.
        tolerance: relative change up to which scales have settled.

    Returns:
        The report, to print.

    Raises:
        ArgumentError: a tolerance that is not positive.
        DataError: no snapshot, one of other sites or shapes, or a history without posterior scales.
        GuideError: a guide without Gaussians, or one that has not seen its model.
        UnsupportedError: the method of a LaplaceGuide has no variances.

    Source: Unlu & Aitchison (2021), section 4, on the slow convergence of variances.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi import MeanFieldGuide
        >>> guide = MeanFieldGuide(
        ...     lambda: pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        ... )
        >>> guide.initialize()
        >>> report = scale_report(guide)
        >>> report.rows[0].state, report.converged
        ('at its start', False)
    """
    check_positive("tolerance", tolerance)
    if earlier is not None and not isinstance(earlier, Mapping):
        raise DataError(f"earlier is what scale_snapshot(guide) returned, not {type(earlier).__name__}")
    course = None if history is None else _course(history)
    rows = tuple(_row(spread, earlier, tolerance) for spread in posterior_spread(guide))
    return ScaleReport(rows, course, type(guide).__name__)


def scale_course(scales: Sequence[float], rates: Sequence[float] | None = None) -> ScaleCourse | None:
    r"""Judge by the mean posterior scale of each epoch whether scales still move.

    That the mean stands still is no sign of convergence where the learning rate had fallen to a twentieth of its
    largest value or less, or where the mean is within 5 % of that of the first epoch.

    Status: a rule of thumb. Scales of single sites may move while their mean stands still;
    :func:`~pyro_dvi.analysis.diagnostics.scale_report` with an earlier snapshot looks at each.

    Args:
        scales: mean posterior scale after each epoch, ``history["posterior_scale"]``; what is not finite is left out.
        rates: learning rates at the end of these epochs, ``history["lr"]``; None: not known.

    Returns:
        The change over the last tenth of the epochs, at least one of them; None for fewer than three epochs.

    Raises:
        DataError: a scale that is not positive.

    Example:
        >>> print(scale_course([0.10, 0.05, 0.04, 0.03]))
        still falls: -25.0% in the last epoch
    """
    rates = [1.0] * len(scales) if rates is None else rates
    known = [(float(scale), rate) for scale, rate in zip(scales, rates, strict=True) if math.isfinite(scale)]
    finite = [scale for scale, _ in known]
    if any(scale <= 0 for scale in finite):
        raise DataError(f"posterior scales are positive, but the history holds {min(finite)!r}")
    if len(finite) < 3:
        return None
    epochs = max(1, len(finite) // 10)
    doubt = "hardly moved since epoch 1" if abs(finite[-1] / finite[0] - 1) < AT_START else ""
    if max(rate for _, rate in known[-epochs:]) <= FALLEN * max(rates):
        doubt = "stood still at learning rate 0"
    return ScaleCourse(epochs, finite[-1] / finite[-1 - epochs] - 1, doubt)


def _row(spread: Spread, earlier: Mapping[str, Tensor] | None, tolerance: float) -> SiteScales:
    scale = _array(spread.scale)
    to_prior = (math.nan,) * len(LEVELS)
    like_prior = to_start = start_to_prior = moved = change = math.nan
    if spread.prior_scale is not None:
        prior = _array(spread.prior_scale.expand_as(spread.scale))
        ratio = scale / prior
        ratio = ratio[np.isfinite(ratio)]
        to_prior, like_prior = _quantiles(ratio), float((ratio >= LIKE_PRIOR).mean())
    if spread.initial_scale is not None:
        start = _array(spread.initial_scale.expand_as(spread.scale))
        log_ratio = np.log(scale / start)
        start_to_prior = float(np.nanmedian(start / prior)) if to_prior[2] > 0 else math.nan
        to_start, moved = math.exp(log_ratio.mean()), math.expm1(np.abs(log_ratio).mean())
    if earlier is not None:
        log_ratio = np.log(scale / _array(_then(spread, earlier)))
        change = math.expm1(np.abs(log_ratio).mean())
    if not spread.is_learned:
        state = "not trained"
    elif change > tolerance:
        state = "moves"
    elif moved < AT_START:
        state = "at its start"
    elif earlier is not None:
        state = "settled"
    else:
        state = "unknown" if math.isnan(moved) else "has moved"
    sizes = scale.size, _quantiles(scale), to_prior, to_start, start_to_prior, like_prior, change
    return SiteScales(spread.site, *sizes, state)


def _then(spread: Spread, earlier: Mapping[str, Tensor]) -> Tensor:
    if spread.site not in earlier:
        raise DataError(
            f"the snapshot has no site {spread.site!r}; it has {list(earlier)}. Make it by scale_snapshot(guide)."
        )
    then = earlier[spread.site]
    if getattr(then, "shape", None) != spread.scale.shape or not bool((then > 0).all()):
        raise DataError(
            f"the snapshot of site {spread.site!r} is {reprlib.repr(then)}, where the guide has positive scales of "
            f"shape {tuple(spread.scale.shape)}: make it by scale_snapshot(guide)"
        )
    return then


def _course(history: Any) -> ScaleCourse | None:
    columns = getattr(history, "epochs", history)
    if not isinstance(columns, Mapping) or "posterior_scale" not in columns:
        what = list(columns) if isinstance(columns, Mapping) else type(history).__name__
        raise DataError(
            f"history is what fit returned, or a mapping of columns with 'posterior_scale' among them, not {what}: "
            "fit records it where it recognises the guide's scales. Compare with scale_snapshot(guide) of some epochs "
            "ago instead."
        )
    return scale_course(columns["posterior_scale"], columns.get("lr"))


def _array(values: Tensor) -> np.ndarray:
    array: np.ndarray = values.detach().cpu().double().flatten().numpy()
    return array


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.quantile(values, LEVELS).tolist())


def _number(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def _sites(names: list[str], total: int) -> str:
    shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
    return f"Scales of {len(names)} of {total} sites ({shown})"


THRESHOLDS = (0.5, 1.0, 2.0)  # of the table


@dataclass(frozen=True)
class SignalToNoise(Report):
    r"""The ratio :math:`|\mu|/\sigma` of every weight.

    ``print(ratios)`` shows quantiles, and what could be pruned; :func:`pyro_dvi.analysis.plots.signal_to_noise` draws it.

    Attributes:
        ratios: array of the site's shape by site name, in single precision.
        guide: name of the guide.
    """

    ratios: Mapping[str, np.ndarray]
    guide: str

    @property
    def num_weights(self) -> int:
        """Weights of all sites."""
        return sum(ratio.size for ratio in self.ratios.values())

    def prunable(self, threshold: float) -> float:
        r"""Return the share of weights below a threshold: those that could be set to zero.

        A weight at the threshold has its density at zero below that at its mean by the factor
        :math:`\exp(-\text{threshold}^2/2)`.

        Args:
            threshold: of :math:`|\mu|/\sigma`.

        Raises:
            ArgumentError: a threshold that is negative or no number.
        """
        _check(threshold)
        return sum(int((ratio < threshold).sum()) for ratio in self.ratios.values()) / self.num_weights

    def threshold(self, share: float) -> float:
        """Return the threshold below which this share of all weights lies.

        Args:
            share: between 0 and 1; Blundell et al. prune 0.75 and more.
        """
        return float(np.quantile(np.concatenate([ratio.ravel() for ratio in self.ratios.values()]), share))

    def kept(self, threshold: float) -> dict[str, np.ndarray]:
        """Return masks of the weights at or above a threshold, by site name.

        Args:
            threshold: as for :meth:`prunable`.

        Raises:
            ArgumentError: a threshold that is negative or no number.
        """
        _check(threshold)
        return {name: ratio >= threshold for name, ratio in self.ratios.items()}

    def _records(self) -> list[dict[str, Any]]:
        return [
            {
                "site": name,
                "num_elements": ratio.size,
                **dict(
                    zip(("5%", "50%", "95%"), np.quantile(ratio, (0.05, 0.5, 0.95)).tolist(), strict=True)
                ),
                **{f"below_{t:g}": float((ratio < t).mean()) for t in THRESHOLDS},
            }
            for name, ratio in self.ratios.items()
        ]

    def _shown(self) -> list[Any]:
        titles = ("site", "elements", "5 %", "median", "95 %", *(f"< {t:g}" for t in THRESHOLDS))
        rows = [
            (
                r["site"],
                f"{r['num_elements']:,}",
                *(f"{r[q]:.3g}" for q in ("5%", "50%", "95%")),
                *(f"{r[f'below_{t:g}']:.1%}" for t in THRESHOLDS),
            )
            for r in self._records()
        ]
        everything = (
            "all",
            f"{self.num_weights:,}",
            "",
            "",
            "",
            *(f"{self.prunable(t):.1%}" for t in THRESHOLDS),
        )
        return [f"|mean| / sd of the weights of {self.guide}", Columns(titles, [*rows, everything])]

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return quantiles and shares by site as a ``pandas.DataFrame``."""
        import pandas

        return pandas.DataFrame(self._records()).set_index("site")


def signal_to_noise(guide: Any) -> SignalToNoise:
    r"""Return :math:`|\mu|/\sigma` of every weight of a Gaussian posterior.

    Weights with a low ratio may as well be zero: their posterior density there is hardly lower than at the mean. The
    share that can be pruned says how much of a network the data needed. Latents with a constrained support (a noise
    scale, say) are left out, since zero means nothing there. Multiplicative noise has one ratio for each input unit,
    :math:`\alpha_j^{-1/2}`.

    Status: exact for the marginals of the posterior; a joint posterior may contradict them.

    Args:
        guide: as for :func:`scale_report`.

    Returns:
        The ratios by site, to print.

    Raises:
        GuideError: a guide without Gaussians over real numbers, or one that has not seen its model.
        UnsupportedError: the method of a LaplaceGuide has no variances.

    Source: Graves (2011), "Practical variational inference for neural networks", for the heuristic of pruning;
    Blundell et al. (2015), "Weight uncertainty in neural networks", for the ratio.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer.autoguide import AutoNormal, init_to_value
        >>> values = {"w": torch.tensor([0.0, 0.05, 3.0])}
        >>> model = lambda: pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        >>> guide = AutoNormal(model, init_loc_fn=init_to_value(values=values), init_scale=0.1)
        >>> _ = guide()
        >>> round(signal_to_noise(guide).prunable(1.0), 3)
        0.667
    """
    ratios = {
        spread.site: (spread.loc.abs() / spread.scale).cpu().float().numpy()
        for spread in posterior_spread(guide)
        if spread.is_real
    }
    if not ratios:
        raise GuideError(
            f"{type(guide).__name__} has no Gaussian over real numbers: all its sites have a constrained support"
        )
    return SignalToNoise(ratios, type(guide).__name__)


def _check(threshold: float) -> None:
    if not threshold >= 0 or not math.isfinite(threshold):
        raise ArgumentError(f"threshold is a ratio |mean| / sd such as 1.0, got {threshold!r}")
