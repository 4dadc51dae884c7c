# SPDX-License-Identifier: Apache-2.0
"""Laplace's approximation: a mode, then a Gaussian around it, by several methods."""

from pyro_dvi.guides.laplace.conjugate_gradient import ConjugateGradient
from pyro_dvi.guides.laplace.dense import Dense
from pyro_dvi.guides.laplace.diagonal import Diagonal
from pyro_dvi.guides.laplace.gaussian_outputs import GaussianOutputs
from pyro_dvi.guides.laplace.guide import LaplaceGuide
from pyro_dvi.guides.laplace.hessian_free import (
    LBFGS,
    AbsoluteSum,
    Adam,
    HessianFree,
    InSample,
    LabelShift,
    NewtonCG,
    Pointwise,
    Sum,
    parameter_uncertainty,
)
from pyro_dvi.guides.laplace.kronecker import KroneckerFactored
from pyro_dvi.guides.laplace.posterior import LaplacePosterior, Method
from pyro_dvi.guides.laplace.posterior_samples import PosteriorSamples
from pyro_dvi.guides.laplace.precision import GGN, Hessian, PrecisionMatrix
from pyro_dvi.guides.laplace.top_eigen import TopEigen

__all__ = [
    "GGN",
    "LBFGS",
    "AbsoluteSum",
    "Adam",
    "ConjugateGradient",
    "Dense",
    "Diagonal",
    "GaussianOutputs",
    "Hessian",
    "HessianFree",
    "InSample",
    "LabelShift",
    "KroneckerFactored",
    "LaplaceGuide",
    "LaplacePosterior",
    "Method",
    "NewtonCG",
    "Pointwise",
    "PosteriorSamples",
    "PrecisionMatrix",
    "Sum",
    "TopEigen",
    "parameter_uncertainty",
]
