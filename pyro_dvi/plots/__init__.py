# SPDX-License-Identifier: Apache-2.0
"""Plots: matplotlib axes in, matplotlib axes out.

The only chapter that knows matplotlib; ``import pyro_dvi`` does not load it. Every function draws into the axes that
it is given, or makes a figure, and returns the axes for titles, limits and saving. Styles and ``rcParams`` are
respected and left alone.
"""

from pyro_dvi.plots.moments import moment_comparison
from pyro_dvi.plots.reliability import reliability_diagram
from pyro_dvi.plots.training import training_history

__all__ = ["moment_comparison", "reliability_diagram", "training_history"]
