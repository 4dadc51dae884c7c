# SPDX-License-Identifier: Apache-2.0
"""Reports of posterior standard deviations: have they converged, and which weights differ from zero?"""

import math
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pyro_dvi.analysis.diagnostics.posterior_spread import Spread, posterior_spread
from pyro_dvi.core.table import Table
from pyro_dvi.errors import ArgumentError, DataError, GuideError

LEVELS = {
    "5%": 0.05,
    "25%": 0.25,
    "50%": 0.5,
    "75%": 0.75,
    "95%": 0.95,
}  # of quantiles over the elements of a site

MOVING = 0.01  # relative change above which scales are said to move
AT_START = 0.05  # relative change since the start below which a scale was hardly trained
FALLEN = 0.05  # share of the largest learning rate below which hardly anything moves
LIKE_PRIOR = 0.9  # fraction of the prior scale above which an element has learned next to nothing


@dataclass(frozen=True)
class ScaleReport(Table):
    r"""Posterior scales of every site, and whether they have converged.

    A row for each site with a Gaussian posterior, with the columns ``site``, ``elements``, ``scale_5%`` to
    ``scale_95%`` (quantiles of σ over elements, in unconstrained space), ``to_prior_5%`` to ``to_prior_95%`` (of σ over
    the prior's standard deviation), ``like_prior`` (the share of elements with a σ of at least 90 % of the prior's,
    which have learned next to nothing), ``to_start`` (the exponential of the mean :math:`\log(\sigma/\sigma_0)`),
    ``start_to_prior`` (median), ``change`` since the snapshot, and ``state``: ``"moves"``, ``"settled"``,
    ``"at its start"``, ``"not trained"`` or ``"unknown"``. A quantity that is not known is NaN.

    Attributes:
        converged: whether the scales stand still; None where neither a snapshot nor a history can tell.
    """

    converged: bool | None = None


def scale_report(
    guide: Any, *, earlier: Mapping[str, Tensor] | None = None, history: Any = None
) -> ScaleReport:
    r"""Report whether posterior standard deviations have converged, site by site.

    Scales converge after the means, and training that stops when the loss looks flat leaves them near their start: the
    posterior is then as narrow, or as wide, as it was initialised. Each site's σ is compared with the prior's, with the
    start, and with an earlier snapshot. Sites are judged by the typical change of their elements,
    :math:`\exp(\mathrm{mean}\,|\log(\sigma/\sigma_{\mathrm{then}})|) - 1`, above one per cent of which they move. The
    mean scale of a history is judged by the last tenth of its epochs.

    Status: the numbers are exact; the verdict is a rule of thumb. A small change between two snapshots means little if
    they are a few steps apart, or if the learning rate has decayed to nothing in between.

    Args:
        guide: a guide of this library (a :class:`~pyro_dvi.LaplaceGuide` after its fit), Pyro's ``AutoNormal``,
            ``AutoDiagonalNormal``, ``AutoMultivariateNormal``, or an ``AutoGuideList`` of these.
        earlier: the value of :func:`scale_snapshot` some epochs ago.
        history: the history that :func:`~pyro_dvi.fit` returned, or a mapping with its column ``posterior_scale``.

    Returns:
        The report, to print.

    Raises:
        DataError: no snapshot, one of other sites or shapes, or a history without posterior scales.
        GuideError: a guide without Gaussians, or one that has not seen its model.
        UnsupportedError: the method of a LaplaceGuide has no variances.

    Source: Unlu & Aitchison (2021), section 4, on the slow convergence of variances.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro_dvi import MeanFieldGuide
        >>> guide = MeanFieldGuide(
        ...     lambda: pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        ... )
        >>> guide.initialize()
        >>> report = scale_report(guide)
        >>> report["state"], report.converged
        (['at its start'], False)
    """
    if earlier is not None and not isinstance(earlier, Mapping):
        raise DataError(f"earlier is what scale_snapshot(guide) returned, not {type(earlier).__name__}")
    course = None if history is None else _course_of(history)
    rows = [_row(spread, earlier) for spread in posterior_spread(guide)]
    converged, verdict = _verdict({row["site"]: row["state"] for row in rows}, course)
    formats = {
        "site": "",
        "elements": ",",
        "scale_5%": ".3g",
        "scale_50%": ".3g",
        "scale_95%": ".3g",
        "to_prior_50%": ".3g",
    }
    formats |= {"like_prior": ".0%", "to_start": ".3g", "change": ".1%", "state": ""}
    return ScaleReport(f"Posterior scales of {type(guide).__name__}", rows, formats, verdict, converged)


def _row(spread: Spread, earlier: Mapping[str, Tensor] | None) -> dict[str, Any]:
    scale = _array(spread.scale)
    to_prior = like_prior = to_start = start_to_prior = moved = change = np.asarray(math.nan)
    if spread.prior_scale is not None:
        prior = _array(spread.prior_scale.expand_as(spread.scale))
        ratio = scale / prior
        to_prior = ratio[np.isfinite(ratio)]
        like_prior = (to_prior >= LIKE_PRIOR).mean()
    if spread.initial_scale is not None:
        start = _array(spread.initial_scale.expand_as(spread.scale))
        log_ratio = np.log(scale / start)
        to_start, moved = np.exp(log_ratio.mean()), np.expm1(np.abs(log_ratio).mean())
        if spread.prior_scale is not None:
            start_to_prior = np.nanmedian(start / prior)
    if earlier is not None:
        change = np.expm1(np.abs(np.log(scale / _array(_then(spread, earlier)))).mean())
    if not spread.is_learned:
        state = "not trained"
    elif change > MOVING:
        state = "moves"
    elif moved < AT_START:
        state = "at its start"
    else:
        state = "unknown" if earlier is None else "settled"
    return {
        "site": spread.site,
        "elements": scale.size,
        **{f"scale_{name}": float(np.quantile(scale, level)) for name, level in LEVELS.items()},
        **{f"to_prior_{name}": float(np.quantile(to_prior, level)) for name, level in LEVELS.items()},
        "like_prior": float(like_prior),
        "to_start": float(to_start),
        "start_to_prior": float(start_to_prior),
        "change": float(change),
        "state": state,
    }


def _then(spread: Spread, earlier: Mapping[str, Tensor]) -> Tensor:
    """Return the scales of a snapshot.

    Raises:
        DataError: it has none of this site, or of another shape.
    """
    then = earlier.get(spread.site)
    if then is None or getattr(then, "shape", None) != spread.scale.shape or not bool((then > 0).all()):
        raise DataError(
            f"the snapshot of site {spread.site!r} is {reprlib.repr(then)}, where the guide has positive scales of "
            f"shape {tuple(spread.scale.shape)}: make it by scale_snapshot(guide)"
        )
    return then


def _verdict(states: Mapping[str, str], course: "Course | None") -> tuple[bool | None, str]:
    """Return whether the scales have converged, and the finding in words, with what to do about it."""
    found = set(states.values())
    if found == {"not trained"}:
        return True, "Scales are not trained but computed, or fixed: there is nothing to converge."
    findings = []
    for state, what in (("at its start", "are where they started: hardly trained"), ("moves", "still move")):
        names = [site for site, own in states.items() if own == state]
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            findings.append(f"Scales of {len(names)} of {len(states)} sites ({shown}) {what}.")
    if course is not None:
        findings.append(f"The mean scale {course}.")
    if found & {"at its start", "moves"} or (course is not None and course.moves):
        longer = "train longer or, where gradients train them, raise scale_multiplier of learning_rates"
        return False, " ".join([f"Scales have not converged; {longer}.", *findings])
    if course.state == "settled" if course is not None else "settled" in found:
        return True, " ".join(["Scales have settled.", *findings])
    advice = "Pass earlier=scale_snapshot(guide) of some epochs ago" + (
        ", or history." if course is None else "."
    )
    return None, " ".join([f"Whether scales still move is not known. {advice}", *findings])


class Course(NamedTuple):
    r"""Change of the mean posterior scale over the last tenth of training.

    Args:
        state: ``"still falls"``, ``"still rises"``, ``"settled"``, or why a constant mean scale says nothing.
        change: relative change :math:`\bar\sigma_T / \bar\sigma_{T-k} - 1` over the last k epochs.
        epochs: k.
    """

    state: str
    change: float
    epochs: int

    @property
    def moves(self) -> bool:
        """Whether the scale changed by more than one per cent."""
        return abs(self.change) > MOVING

    def __str__(self) -> str:
        last = "the last epoch" if self.epochs == 1 else f"the last {self.epochs} epochs"
        return f"{self.state}: {self.change:+.1%} in {last}"


def scale_course(scales: Sequence[float], rates: Sequence[float] | None = None) -> Course | None:
    r"""Judge by the mean posterior scale of each epoch whether scales still move.

    A mean that stands still is no sign of convergence where the learning rate had fallen to a twentieth of its
    largest value or less, or where the mean is within 5 % of its value after the first epoch.

    Status: a rule of thumb. Scales of single sites may move while their mean stands still.

    Args:
        scales: mean posterior scale after each epoch, ``history["posterior_scale"]``; infinities and NaN are left out.
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
    change = finite[-1] / finite[-1 - epochs] - 1
    if abs(change) > MOVING:
        state = "still falls" if change < 0 else "still rises"
    elif max(rate for _, rate in known[-epochs:]) <= FALLEN * max(rates):
        state = "stood still at learning rate 0"
    else:
        state = "hardly moved since epoch 1" if abs(finite[-1] / finite[0] - 1) < AT_START else "settled"
    return Course(state, change, epochs)


def _course_of(history: Any) -> Course | None:
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


# Signal to noise --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SignalToNoise(Table):
    r"""The ratio :math:`|\mu|/\sigma` of every weight: a row of quantiles and shares for each site.

    Attributes:
        ratios: array of the site's shape by site name, in single precision.
    """

    ratios: Mapping[str, np.ndarray] = field(default_factory=dict)

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
        if not threshold >= 0 or not math.isfinite(threshold):
            raise ArgumentError(f"threshold is a ratio |mean| / sd such as 1.0, got {threshold!r}")
        return sum(int((ratio < threshold).sum()) for ratio in self.ratios.values()) / self.num_weights


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
        >>> import pyro, pyro.distributions as dist, torch
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
    levels, thresholds = ("5%", "50%", "95%"), (0.5, 1, 2)
    formats = {"site": "", "elements": ","} | dict.fromkeys(levels, ".3g")
    formats |= {f"<_{threshold}": ".1%" for threshold in thresholds}
    rows = [
        {"site": name, "elements": ratio.size}
        | {level: float(np.quantile(ratio, LEVELS[level])) for level in levels}
        | {f"<_{threshold}": float((ratio < threshold).mean()) for threshold in thresholds}
        for name, ratio in [*ratios.items(), ("all", np.concatenate([r.ravel() for r in ratios.values()]))]
    ]
    heading = f"|mean| / sd of the weights of {type(guide).__name__}"
    return SignalToNoise(heading, rows, formats, ratios=ratios)
