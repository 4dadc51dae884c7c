# SPDX-License-Identifier: Apache-2.0
"""Means and variances through torch functions: the value type, and one rule for each function."""

from pyro_dvi.moments import activations, affine
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.moments.floor import variance_floor
from pyro_dvi.moments.rules import Kind, moment_rule, rule_for, rules
from pyro_dvi.moments.value import Link, Moments, MultiplicativeMoments

__all__ = [
    "Kind",
    "Link",
    "Moments",
    "MultiplicativeMoments",
    "activations",
    "affine",
    "moment_rule",
    "observed_by",
    "rule_for",
    "rules",
    "variance_floor",
]
