# SPDX-License-Identifier: Apache-2.0
"""Colours and axes of the figures in reports."""

from typing import Any

__all__ = ["COLOURS", "MARKERS", "plain_numbers"]

# Of Okabe & Ito, which colour-blind readers tell apart; markers, where lines have them, differ as well.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00")
MARKERS = ("o", "s", "^", "v", "D")


def plain_numbers(axis: Any, ticks: tuple[float, ...]) -> None:
    """Write ticks of a logarithmic axis as numbers, such as 0.6 and not 6 × 10⁻¹."""
    from matplotlib.ticker import NullFormatter

    low, high = axis.get_view_interval()
    axis.set_ticks([tick for tick in ticks if low <= tick <= high])
    axis.set_major_formatter(lambda value, place: f"{value:g}")
    axis.set_minor_formatter(NullFormatter())
