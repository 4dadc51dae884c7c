# SPDX-License-Identifier: Apache-2.0
"""Prediction rules: latent values, or Gaussians of the outputs, in place of the posterior."""
