# SPDX-License-Identifier: Apache-2.0
"""Plots: matplotlib axes in, matplotlib axes out.

The only chapter that knows matplotlib; ``import pyro_dvi`` does not load it. Every function draws into the axes that
it is given, or makes a figure, and returns the axes for titles, limits and saving. Styles and ``rcParams`` are
respected and left alone.
"""

from pyro_dvi.analysis.plots.comparisons import compare, moment_comparison
from pyro_dvi.analysis.plots.reliability import rejection_curve, reliability_diagram
from pyro_dvi.analysis.plots.training import posterior_scales, signal_to_noise, training_history
from pyro_dvi.analysis.plots.uncertainty import entropy_histogram, regression_band

__all__ = [
    "compare",
    "entropy_histogram",
    "moment_comparison",
    "posterior_scales",
    "regression_band",
    "rejection_curve",
    "reliability_diagram",
    "signal_to_noise",
    "training_history",
]
