# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation: a mode, then a Gaussian around it, by several methods.

Contracts for methods, matrices and criteria of one's own are in the files beside them; what ``HessianFree`` is made of
is in ``hessian_free``.
"""

from pyro_dvi.laplace.energy.precision import GGN, Hessian
from pyro_dvi.laplace.evidence.criteria import ByEvidence, ByValidation
from pyro_dvi.laplace.evidence.evidence import ByLanczos, Evidence, Exactly
from pyro_dvi.laplace.evidence.scales import NoiseScale, PriorPrecision
from pyro_dvi.laplace.evidence.tuning import TuningCurve
from pyro_dvi.laplace.guide import LaplaceGuide
from pyro_dvi.laplace.methods import hessian_free
from pyro_dvi.laplace.methods.conjugate_gradient import ConjugateGradient
from pyro_dvi.laplace.methods.dense import Dense
from pyro_dvi.laplace.methods.diagonal import Diagonal
from pyro_dvi.laplace.methods.functional import Functional
from pyro_dvi.laplace.methods.hessian_free.method import HessianFree
from pyro_dvi.laplace.methods.kronecker import KroneckerFactored
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method
from pyro_dvi.laplace.methods.posterior_samples import PosteriorSamples
from pyro_dvi.laplace.methods.top_eigen import TopEigen
from pyro_dvi.laplace.mode.convergence import Accept, Refuse, UseGGN
from pyro_dvi.laplace.mode.diagnosis import Diagnosis
from pyro_dvi.laplace.mode.search import Polished
from pyro_dvi.laplace.online_evidence import OnlineEvidence
from pyro_dvi.laplace.outputs import GaussianOutputs
from pyro_dvi.laplace.parameter_uncertainty import parameter_uncertainty
from pyro_dvi.laplace.subnetwork import largest_variance

__all__ = [
    "GGN",
    "Accept",
    "ByEvidence",
    "ByLanczos",
    "ByValidation",
    "ConjugateGradient",
    "Dense",
    "Diagnosis",
    "Diagonal",
    "Evidence",
    "Exactly",
    "Functional",
    "GaussianOutputs",
    "Hessian",
    "HessianFree",
    "KroneckerFactored",
    "LaplaceGuide",
    "LaplacePosterior",
    "Method",
    "NoiseScale",
    "OnlineEvidence",
    "Polished",
    "PosteriorSamples",
    "PriorPrecision",
    "Refuse",
    "TopEigen",
    "TuningCurve",
    "UseGGN",
    "hessian_free",
    "largest_variance",
    "parameter_uncertainty",
]
