# SPDX-License-Identifier: Apache-2.0
"""Plots: matplotlib axes in, matplotlib axes out.

The only chapter that knows matplotlib; ``import pyro_dvi`` does not load it. Every function draws into the axes that
it is given, or makes a figure, and returns the axes for titles, limits and saving. Styles and ``rcParams`` are
respected and left alone.
"""

from pyro_dvi.analysis.plots.entropies import entropy_histogram
from pyro_dvi.analysis.plots.methods import compare
from pyro_dvi.analysis.plots.moments import moment_comparison
from pyro_dvi.analysis.plots.prior import prior_predictive
from pyro_dvi.analysis.plots.regression import regression_band
from pyro_dvi.analysis.plots.rejection import rejection_curve
from pyro_dvi.analysis.plots.reliability import reliability_diagram
from pyro_dvi.analysis.plots.scales import posterior_scales
from pyro_dvi.analysis.plots.signal import signal_to_noise
from pyro_dvi.analysis.plots.training import training_history

__all__ = [
    "compare",
    "entropy_histogram",
    "moment_comparison",
    "posterior_scales",
    "prior_predictive",
    "regression_band",
    "rejection_curve",
    "reliability_diagram",
    "signal_to_noise",
    "training_history",
]
