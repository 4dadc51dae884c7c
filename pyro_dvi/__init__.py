# SPDX-License-Identifier: Apache-2.0
"""Deterministic variational inference for Bayesian neural networks in Pyro."""
