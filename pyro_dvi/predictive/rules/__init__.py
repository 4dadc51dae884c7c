# SPDX-License-Identifier: Apache-2.0
"""Prediction rules, which represent the posterior by latent values or by Gaussians of the outputs."""
