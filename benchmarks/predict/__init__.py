# SPDX-License-Identifier: Apache-2.0
"""Predictions and their export."""
