# SPDX-License-Identifier: Apache-2.0
"""One object per method, which combines guide, objective, optimizer and prediction rule, and trains a posterior."""

from pyro_dvi.methods.ensemble import Ensemble
from pyro_dvi.methods.laplace import Laplace
from pyro_dvi.methods.method import Method
from pyro_dvi.methods.posterior import Posterior
from pyro_dvi.methods.trained import MAP, MomentPropagation, NaturalGradients, VariationalLaplace

__all__ = [
    "MAP",
    "Ensemble",
    "Laplace",
    "Method",
    "MomentPropagation",
    "NaturalGradients",
    "Posterior",
    "VariationalLaplace",
]
