# SPDX-License-Identifier: Apache-2.0
"""Analysis of trained posteriors: export to ArviZ, diagnostics, plots, and tuning."""
