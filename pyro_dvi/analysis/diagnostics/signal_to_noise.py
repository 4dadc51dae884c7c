# SPDX-License-Identifier: Apache-2.0
"""How sure is the posterior that a weight is not zero?"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from pyro_dvi.analysis.diagnostics.posterior_spread import posterior_spread
from pyro_dvi.core.table import Columns, Report
from pyro_dvi.errors import ArgumentError, GuideError

if TYPE_CHECKING:
    import pandas

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
