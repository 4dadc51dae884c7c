# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation."""
