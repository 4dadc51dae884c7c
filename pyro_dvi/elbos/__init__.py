# SPDX-License-Identifier: Apache-2.0
"""Objectives for ``pyro.infer.SVI``."""

from pyro_dvi.elbos.moment_propagation import MomentPropagationELBO
from pyro_dvi.elbos.natural_gradient import NaturalGradientELBO
from pyro_dvi.elbos.sampled import SampledELBO
from pyro_dvi.elbos.taylor import TaylorELBO
from pyro_dvi.elbos.weighting import ExampleWeighting, VarianceWeighted

__all__ = [
    "ExampleWeighting",
    "MomentPropagationELBO",
    "NaturalGradientELBO",
    "SampledELBO",
    "TaylorELBO",
    "VarianceWeighted",
]
