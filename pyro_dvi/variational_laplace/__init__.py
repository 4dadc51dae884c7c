# SPDX-License-Identifier: Apache-2.0
"""Variational Laplace: the log-likelihood at the mean, a squared-gradient penalty, and the KL divergence."""

from pyro_dvi.variational_laplace.taylor import TaylorELBO

__all__ = ["TaylorELBO"]
