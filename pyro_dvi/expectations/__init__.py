# SPDX-License-Identifier: Apache-2.0
"""Expected log-likelihoods of distributions whose parameters are uncertain: one rule for each family."""

from pyro_dvi.expectations import bernoulli, categorical, laplace, multivariate_normal, normal, rates
from pyro_dvi.expectations.logits import LogitEstimator, MonteCarlo, Sobol, Taylor2, TiltedBound
from pyro_dvi.expectations.rules import expectation_rule, expected_log_prob, families_with_rules

__all__ = [
    "LogitEstimator",
    "MonteCarlo",
    "Sobol",
    "Taylor2",
    "TiltedBound",
    "bernoulli",
    "categorical",
    "expectation_rule",
    "expected_log_prob",
    "families_with_rules",
    "laplace",
    "multivariate_normal",
    "normal",
    "rates",
]
