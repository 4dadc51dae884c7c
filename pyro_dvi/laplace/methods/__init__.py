# SPDX-License-Identifier: Apache-2.0
"""Representations of the Gaussian around a mode."""
