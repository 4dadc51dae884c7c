# SPDX-License-Identifier: Apache-2.0
"""Settings of a training run, chosen on validation data."""

from pyro_dvi.analysis.tuning.settings import Tuned, tune

__all__ = ["Tuned", "tune"]
