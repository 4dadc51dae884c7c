# SPDX-License-Identifier: Apache-2.0
"""Prediction rules, which represent the posterior by values of the latents or by Gaussians over the outputs."""
