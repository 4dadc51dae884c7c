# SPDX-License-Identifier: Apache-2.0
"""Expected log-likelihoods of distributions with uncertain parameters: one rule for each family."""

from pyro_dvi.expectations import closed_forms  # noqa: F401  # it registers rules
from pyro_dvi.expectations.expectation import expectation_rule
from pyro_dvi.expectations.logits import Sobol, TiltedBound

__all__ = [
    "Sobol",
    "TiltedBound",
    "expectation_rule",
]
