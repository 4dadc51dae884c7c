# SPDX-License-Identifier: Apache-2.0
"""Nonlinear functions of each element."""

from pyro_dvi.moments.activations import clipped, exponential, odd, rectified, sigmoidal

__all__ = ["clipped", "exponential", "odd", "rectified", "sigmoidal"]
