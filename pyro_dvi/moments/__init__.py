# SPDX-License-Identifier: Apache-2.0
"""Means and variances through torch functions: the value type, and one rule for each function."""

from pyro_dvi.moments import (
    activations,
    affine,
    arithmetic,
    attention,
    conversion,
    convolution,
    dropout,
    embedding,
    indexing,
    interpolation,
    joining,
    normalisation,
    pooling,
    recurrent,
    reduction,
    refusals,
    shape,
    softmax,
)
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.moments.floor import variance_floor
from pyro_dvi.moments.rules import Kind, moment_rule, rule_for, rules
from pyro_dvi.moments.value import GaussianMoments, Link, MultiplicativeMoments

__all__ = [
    "Kind",
    "Link",
    "GaussianMoments",
    "MultiplicativeMoments",
    "activations",
    "affine",
    "arithmetic",
    "attention",
    "conversion",
    "convolution",
    "dropout",
    "embedding",
    "indexing",
    "interpolation",
    "joining",
    "moment_rule",
    "normalisation",
    "observed_by",
    "pooling",
    "recurrent",
    "reduction",
    "refusals",
    "rule_for",
    "rules",
    "shape",
    "softmax",
    "variance_floor",
]
