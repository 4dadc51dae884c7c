# SPDX-License-Identifier: Apache-2.0
"""Moment propagation: means and variances of activations in one pass, and posteriors for this method."""

from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO, VarianceWeighted
from pyro_dvi.moment_propagation.last_layer import AllOutputs, LastLayerGuide, LowRank, PerOutput
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide

__all__ = [
    "AllOutputs",
    "LastLayerGuide",
    "LowRank",
    "MomentPropagationELBO",
    "MultiplicativeNoiseGuide",
    "PerOutput",
    "VarianceWeighted",
]
