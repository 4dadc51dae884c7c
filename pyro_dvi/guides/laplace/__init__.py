# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation: a mode, then a Gaussian around it, by several methods."""

from pyro_dvi.guides.laplace.by_evidence import ByEvidence
from pyro_dvi.guides.laplace.conjugate_gradient import ConjugateGradient
from pyro_dvi.guides.laplace.convergence import Accept, Refuse, Unconverged, UseGGN
from pyro_dvi.guides.laplace.dense import Dense
from pyro_dvi.guides.laplace.diagnosis import Diagnosis
from pyro_dvi.guides.laplace.diagonal import Diagonal
from pyro_dvi.guides.laplace.evidence import Evidence
from pyro_dvi.guides.laplace.gaussian_outputs import GaussianOutputs
from pyro_dvi.guides.laplace.guide import LaplaceGuide
from pyro_dvi.guides.laplace.hessian_free import (
    LBFGS as LBFGS,
)
from pyro_dvi.guides.laplace.hessian_free import (
    AbsoluteSum,
    HessianFree,
    InSample,
    LabelShift,
    NewtonCG,
    Pointwise,
    Sum,
    parameter_uncertainty,
)
from pyro_dvi.guides.laplace.hessian_free import (
    Adam as Adam,
)
from pyro_dvi.guides.laplace.kronecker import KroneckerFactored
from pyro_dvi.guides.laplace.polish import Polished
from pyro_dvi.guides.laplace.posterior import LaplacePosterior, Method
from pyro_dvi.guides.laplace.posterior_samples import PosteriorSamples
from pyro_dvi.guides.laplace.precision import GGN, Hessian, PrecisionMatrix
from pyro_dvi.guides.laplace.scales import NoiseScale, PriorPrecision, Scale
from pyro_dvi.guides.laplace.spectrum import ByLanczos, Determinant, Exactly
from pyro_dvi.guides.laplace.top_eigen import TopEigen
from pyro_dvi.guides.laplace.tuning import Criterion, TuningCurve

# Without the solvers Adam and LBFGS: a star import would put them in the place of those of torch.optim.
__all__ = [
    "GGN",
    "AbsoluteSum",
    "Accept",
    "ByEvidence",
    "ByLanczos",
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
