# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation: a mode, then a Gaussian around it, by several methods."""

from pyro_dvi.laplace.energy.precision import GGN, Hessian, PrecisionMatrix
from pyro_dvi.laplace.evidence.by_evidence import ByEvidence
from pyro_dvi.laplace.evidence.by_validation import ByValidation
from pyro_dvi.laplace.evidence.evidence import ByLanczos, Determinant, Evidence, Exactly
from pyro_dvi.laplace.evidence.tuning import Criterion, NoiseScale, PriorPrecision, Scale, TuningCurve
from pyro_dvi.laplace.guide import LaplaceGuide
from pyro_dvi.laplace.methods.conjugate_gradient import ConjugateGradient
from pyro_dvi.laplace.methods.dense import Dense
from pyro_dvi.laplace.methods.diagonal import Diagonal
from pyro_dvi.laplace.methods.hessian_free import (
    LBFGS as LBFGS,
)
from pyro_dvi.laplace.methods.hessian_free import (
    AbsoluteSum,
    HessianFree,
    InSample,
    LabelShift,
    NewtonCG,
    Pointwise,
    Sum,
)
from pyro_dvi.laplace.methods.hessian_free import (
    Adam as Adam,
)
from pyro_dvi.laplace.methods.kronecker import KroneckerFactored
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method
from pyro_dvi.laplace.methods.posterior_samples import PosteriorSamples
from pyro_dvi.laplace.methods.top_eigen import TopEigen
from pyro_dvi.laplace.mode.convergence import Accept, Refuse, Unconverged, UseGGN
from pyro_dvi.laplace.mode.diagnosis import Diagnosis
from pyro_dvi.laplace.mode.polish import Polished
from pyro_dvi.laplace.outputs import GaussianOutputs
from pyro_dvi.laplace.parameter_uncertainty import parameter_uncertainty

# Without the solvers Adam and LBFGS: a star import would put them in the place of those of torch.optim.
__all__ = [
    "GGN",
    "AbsoluteSum",
    "Accept",
    "ByEvidence",
    "ByLanczos",
    "ByValidation",
    "ConjugateGradient",
    "Criterion",
    "Dense",
    "Determinant",
    "Diagnosis",
    "Diagonal",
    "Evidence",
    "Exactly",
    "GaussianOutputs",
    "Hessian",
    "HessianFree",
    "InSample",
    "KroneckerFactored",
    "LabelShift",
    "LaplaceGuide",
    "LaplacePosterior",
    "Method",
    "NewtonCG",
    "NoiseScale",
    "Pointwise",
    "Polished",
    "PosteriorSamples",
    "PrecisionMatrix",
    "PriorPrecision",
    "Refuse",
    "Scale",
    "Sum",
    "TopEigen",
    "TuningCurve",
    "Unconverged",
    "UseGGN",
    "parameter_uncertainty",
]
