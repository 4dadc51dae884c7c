# SPDX-License-Identifier: Apache-2.0
"""Checks of priors, of posterior scales, of propagated moments, and of predictions on held-out data."""

from pyro_dvi.analysis.diagnostics.model_checking import compare_held_out, prior_predictive_check
from pyro_dvi.analysis.diagnostics.moment_comparison import compare_with_sampling
from pyro_dvi.analysis.diagnostics.posterior_scales import scale_report, scale_snapshot, signal_to_noise

__all__ = [
    "compare_held_out",
    "compare_with_sampling",
    "prior_predictive_check",
    "scale_report",
    "scale_snapshot",
    "signal_to_noise",
]
