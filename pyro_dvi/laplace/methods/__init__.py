# SPDX-License-Identifier: Apache-2.0
"""Representations of the Gaussian around a mode: a file for each method."""
