# SPDX-License-Identifier: Apache-2.0
"""Propagation of means and variances through torch functions: the value type, and one rule for each function."""

from pyro_dvi.moments import (  # noqa: F401  # they register their rules
    activations,
    arithmetic,
    bilinear,
    elements,
    layers,
    normalisation,
    piecewise,
    reduction,
    sequences,
    softmax,
)
from pyro_dvi.moments.dispatch import Kind
from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["GaussianMoments", "Kind", "moment_rule"]
