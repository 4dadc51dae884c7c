# SPDX-License-Identifier: Apache-2.0
"""What a comparison of propagated and sampled moments found, layer by layer."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.table import Columns, Report
from pyro_dvi.errors import DataError

_MOST_RANKED = 200_000  # elements whose ranks are compared


@dataclass(frozen=True)
class LayerComparison:
    r"""Propagated against sampled moments of one tensor.

    Attributes:
        layer: path of the module, or the parameter of the observed site.
        kind: class of the module or of the distribution.
        call: which call of the module it is, from 0.
        num_elements: size of the tensor.
        mean_error: average of :math:`|m - \hat m| / \hat\sigma` over elements. Draws alone explain
            :attr:`Comparison.chance`.
        sd_ratio: average propagated standard deviation over the average sampled one.
        rms_ratio: the same of root mean squares, in which wide elements count more.
        rank_correlation: Spearman's, of the standard deviations: are the wide elements the wide ones?
    """

    layer: str
    kind: str
    call: int
    num_elements: int
    mean_error: float
    sd_ratio: float
    rms_ratio: float
    rank_correlation: float


@dataclass(frozen=True)
class Comparison(Report):
    """Propagated against sampled moments of every layer, in the order of the computation.

    ``print(report)`` shows a table; ``pandas.DataFrame(report.rows)`` makes a frame of it.

    Attributes:
        rows: one for each module that returned moments, in the order in which they finish; then the
            uncertain parameters of the observed site.
        num_samples: draws of the weights.
        num_examples: inputs.
        site: the observed site.
    """

    rows: tuple[LayerComparison, ...]
    num_samples: int
    num_examples: int
    site: str

    @property
    def chance(self) -> float:
        """The error of a mean that the draws explain, for Gaussian values: the root of 2 / (pi n)."""
        return math.sqrt(2 / (math.pi * self.num_samples))

    def worst(self) -> LayerComparison:
        """Return the layer whose standard deviations are off by the largest factor, up or down."""
        return max(self.rows, key=lambda row: abs(math.log(row.sd_ratio)) if row.sd_ratio > 0 else math.inf)

    def _shown(self) -> list[Any]:
        titles = ("layer", "class", "elements", "mean error", "sd ratio", "rms ratio", "rank corr.")
        lines = []
        for row in self.rows:
            layer = row.layer + (f" (call {row.call + 1})" if row.call else "")
            numbers = (row.mean_error, row.sd_ratio, row.rms_ratio, row.rank_correlation)
            lines.append((layer, row.kind, f"{row.num_elements:,}", *(f"{number:.3f}" for number in numbers)))
        return [
            f"Propagated moments against {self.num_samples:,} draws of the weights, {self.num_examples:,} examples.\n"
            f"Mean error in sampled standard deviations; {self.chance:.3f} of it is chance. Ratios are propagated over "
            "sampled.",
            Columns(titles, lines, names=2),
        ]


def compared(
    layer: str, kind: str, call: int, loc: Tensor, variance: Tensor, mean: Tensor, sampled: Tensor
) -> LayerComparison:
    """Compare the moments of one tensor.

    Args:
        layer: name.
        kind: class.
        call: number of the call.
        loc: propagated means.
        variance: propagated variances.
        mean: means of the draws.
        sampled: variances of the draws.

    Raises:
        DataError: a number is not finite.
    """
    if not all(bool(t.isfinite().all()) for t in (loc, variance, mean, sampled)):
        raise DataError(
            f"{layer} ({kind}) has moments or draws that are NaN or infinite: look at its input first"
        )
    loc, variance, mean, sampled = (t.cpu().double() for t in (loc, variance, mean, sampled))
    sd, truth = variance.sqrt().flatten(), sampled.sqrt().flatten()
    varying = truth > 0
    error = ((loc - mean).abs().flatten()[varying] / truth[varying]).mean()
    return LayerComparison(
        layer,
        kind,
        call,
        loc.numel(),
        error.item() if bool(varying.any()) else 0.0,
        _ratio(sd.mean(), truth.mean()),
        _ratio(variance.mean().sqrt(), sampled.mean().sqrt()),
        _rank_correlation(sd, truth),
    )


def _ratio(ours: Tensor, truth: Tensor) -> float:
    """Their ratio; 1 if both are zero."""
    return 1.0 if ours.item() == truth.item() else (ours / truth).item()


def _rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's; NaN where one of them is constant."""
    import pandas

    pairs = torch.stack([a, b], 1)[:: math.ceil(len(a) / _MOST_RANKED)]
    return float(pandas.DataFrame(pairs.detach().numpy()).corr("spearman").iloc[0, 1])
