# SPDX-License-Identifier: Apache-2.0
"""Plots: every function takes and returns matplotlib axes.

Only this folder imports matplotlib; ``import pyro_dvi`` does not load it. Every function draws into given axes or into
a new figure, and returns the axes, so that the user can set titles and limits or save the figure. Styles and
``rcParams`` are respected and not changed.
"""

from pyro_dvi.errors import MissingLibraryError

try:
    import matplotlib  # noqa: F401
except ImportError as error:
    raise MissingLibraryError('plots need matplotlib: python -m pip install "pyro-dvi[plots]"') from error

from pyro_dvi.analysis.plots.predictions import compare, regression_band, rejection_curve, reliability_diagram

__all__ = ["compare", "regression_band", "rejection_curve", "reliability_diagram"]
