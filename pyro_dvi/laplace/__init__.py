# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation: a Gaussian around a mode, with several representations of the Gaussian.

The base classes for your own methods, precisions and criteria are in the files of the built-in ones.
"""

from pyro_dvi.laplace.approximation import largest_variance
from pyro_dvi.laplace.energy.precision import GGN, Hessian
from pyro_dvi.laplace.evidence.candidates import NoiseScale, PriorPrecision
from pyro_dvi.laplace.evidence.criteria import ByEvidence, ByTrainingLoss, ByValidation
from pyro_dvi.laplace.evidence.evidence import ByLanczos
from pyro_dvi.laplace.evidence.online_evidence import OnlineEvidence
from pyro_dvi.laplace.guide import LaplaceGuide
from pyro_dvi.laplace.last_layer import last_layer
from pyro_dvi.laplace.methods.conjugate_gradient import ConjugateGradient, PosteriorSamples
from pyro_dvi.laplace.methods.full_and_low_rank import Dense, TopEigen
from pyro_dvi.laplace.methods.functional import Functional
from pyro_dvi.laplace.methods.hessian_free import HessianFree
from pyro_dvi.laplace.methods.kronecker_factored import Diagonal, KroneckerFactored
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method

__all__ = [
    "GGN",
    "ByEvidence",
    "ByLanczos",
    "ByTrainingLoss",
    "ByValidation",
    "ConjugateGradient",
    "Dense",
    "Diagonal",
    "Functional",
    "Hessian",
    "HessianFree",
    "KroneckerFactored",
    "LaplaceGuide",
    "LaplacePosterior",
    "Method",
    "NoiseScale",
    "OnlineEvidence",
    "PosteriorSamples",
    "PriorPrecision",
    "TopEigen",
    "largest_variance",
    "last_layer",
]
