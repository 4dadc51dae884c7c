# SPDX-License-Identifier: Apache-2.0
"""Modes and first-order solvers of McInerney & Kallus (2024), which ``pyro_dvi.laplace.HessianFree`` does not have.

A mode chooses the functions that are added to the energy (the tilts) and computes variances from the fits. A solver
sets the strength of the tilts and runs the fits.
"""
