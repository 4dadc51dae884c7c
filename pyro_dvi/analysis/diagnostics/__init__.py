# SPDX-License-Identifier: Apache-2.0
"""Checks of posterior scales and of propagated moments, and comparison of methods on held-out data."""

from pyro_dvi.analysis.diagnostics.held_out import compare_held_out
from pyro_dvi.analysis.diagnostics.moment_comparison import compare_with_sampling
from pyro_dvi.analysis.diagnostics.posterior_scales import scale_report, scale_snapshot, signal_to_noise

__all__ = [
    "compare_held_out",
    "compare_with_sampling",
    "scale_report",
    "scale_snapshot",
    "signal_to_noise",
]
