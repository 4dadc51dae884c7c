# SPDX-License-Identifier: Apache-2.0
"""Nonlinear functions of each element."""

from pyro_dvi.moments.activations import (
    clipped,
    exponential,
    gated,
    halves,
    odd,
    periodic,
    rectified,
    sigmoidal,
    tangent,
)

__all__ = [
    "clipped",
    "exponential",
    "gated",
    "halves",
    "odd",
    "periodic",
    "rectified",
    "sigmoidal",
    "tangent",
]
