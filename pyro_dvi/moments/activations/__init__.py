# SPDX-License-Identifier: Apache-2.0
"""Nonlinear functions of each element."""

from pyro_dvi.moments.activations import rectified

__all__ = ["rectified"]
