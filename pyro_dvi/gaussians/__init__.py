# SPDX-License-Identifier: Apache-2.0
"""Gaussian vectors with covariances, Gaussians with multiplicative noise, and divergences between Gaussians."""
