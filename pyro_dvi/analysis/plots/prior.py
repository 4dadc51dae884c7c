# SPDX-License-Identifier: Apache-2.0
"""Do data from the prior look like the data?"""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from pyro_dvi.analysis.diagnostics.model_checking import PriorPredictiveCheck, StatisticCheck
from pyro_dvi.analysis.plots.style import VERMILLION, blue, own_panels, shortened
from pyro_dvi.errors import DataError


def prior_predictive(check: PriorPredictiveCheck, *, axes: Sequence[Axes] | None = None) -> np.ndarray:
    """Draw each statistic of data sets from the prior, and where the data lie among them.

    Histograms are draws of the prior, the vertical line is the data. Below is the p-value, the share of draws above
    the data, marked where it is unusual: less than one data set of the prior in a hundred is as far out.

    Args:
        check: what :func:`~pyro_dvi.analysis.diagnostics.prior_predictive_check` returned.
        axes: one for each statistic.

    Returns:
        Array of the axes, one for each statistic.

    Raises:
        ArgumentError: another number of axes than of statistics.
        DataError: draws that are infinite.

    Source: Gabry et al. (2019), section 3.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi.analysis.diagnostics import prior_predictive_check
        >>> def model(x, y=None):
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(x, 1.0), obs=y)
        >>> x = torch.linspace(-1, 1, 20)
        >>> [
        ...     ax.get_title("left")
        ...     for ax in prior_predictive(prior_predictive_check(model, (x, x), seed=0))
        ... ]
        ['mean', 'sd', 'min', 'max']
    """
    names = [row.statistic for row in check.rows]
    drawn = own_panels(axes, names, f"the check has {len(names)} statistics", columns=4, size=(2.5, 2.0))
    for ax, row in zip(drawn, check.rows, strict=True):
        values = check.draws[row.statistic]
        if not np.isfinite(values).all() or not np.isfinite(row.observed):
            raise DataError(
                f"statistic {row.statistic!r} has infinite draws, which have no histogram: the prior overflows"
            )
        _panel(ax, row, values)
    return drawn


def _panel(ax: Axes, row: StatisticCheck, values: np.ndarray) -> None:
    ax.hist(values, bins=_edges(values, row.observed).tolist(), color=blue(ax), alpha=0.5)
    ax.axvline(row.observed, color=VERMILLION, linewidth=2)
    mark = "unusual: " if row.is_unusual else ""
    ax.set_title(shortened(row.statistic), fontsize="medium", fontweight="bold", loc="left")
    label = ax.set_xlabel(f"{mark}p = {row.p_value:.3f} ± {row.error:.3f}")
    if row.is_unusual:
        label.set_color(VERMILLION)
    ax.set_yticks([])
    ax.xaxis.set_major_locator(MaxNLocator(4))


def _edges(values: np.ndarray, observed: float) -> np.ndarray:
    """Bins of whole width for counts, else 30; one where all values are the same."""
    low, high = values.min(), values.max()
    if low == high:
        half = 0.02 * abs(observed - low) or 0.02 * abs(low) or 0.5
        return np.array([low - half, low + half])
    if (values == np.round(values)).all() and high - low < 30:
        return np.arange(low - 0.5, high + 1)
    edges: np.ndarray = np.linspace(low, high, 31)
    return edges
