# SPDX-License-Identifier: Apache-2.0
"""Deterministic variational inference for Bayesian neural networks in Pyro.

This module lists the public names. Optional libraries are imported when they are first needed: matplotlib by ``plots``,
ArviZ by ``to_arviz``, and pandas when a report is converted to a table.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from pyro_dvi import (
    bayesian,
    curvature,
    errors,
    expectations as expectations,
    guides,
    laplace,
    links as links,
    methods as methods,
    moment_propagation as moment_propagation,
    moments as moments,
    natural_gradients as natural_gradients,
    objectives as objectives,
    optim,
    predictive as predictive,
    training,
    variational_laplace as variational_laplace,
)
from pyro_dvi.analysis import diagnostics
from pyro_dvi.analysis.arviz_export import to_arviz
from pyro_dvi.analysis.tuning import tune
from pyro_dvi.bayesian import classifier, regressor, summary, to_bayesian_
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.laplace import LaplaceGuide
from pyro_dvi.methods import MAP, Ensemble, Laplace, MomentPropagation, NaturalGradients, VariationalLaplace
from pyro_dvi.moment_propagation import LastLayerGuide, MomentPropagationELBO, MultiplicativeNoiseGuide
from pyro_dvi.natural_gradients import (
    IVON,
    OGN,
    VOGN,
    KroneckerGuide,
    NaturalGradientELBO,
    NaturalGradientGuide,
    NoisyKFAC,
)
from pyro_dvi.objectives import SampledELBO, schedules
from pyro_dvi.predictive import (
    AtMean,
    FullCovariance,
    Linearised,
    Moments,
    ReverseDelta,
    Samples,
    metrics,
    predict,
    predictor,
)
from pyro_dvi.training import fit, load, save, train_ensemble
from pyro_dvi.variational_laplace import TaylorELBO

if TYPE_CHECKING:
    from pyro_dvi.analysis import plots

    __version__: str

__all__ = [
    # One object per method, which trains the posterior of a network
    "VariationalLaplace",
    "MomentPropagation",
    "NaturalGradients",
    "Laplace",
    "MAP",
    "Ensemble",
    # Bayesian models; other priors and noise scales are in ``bayesian``
    "bayesian",
    "to_bayesian_",
    "classifier",
    "regressor",
    "summary",
    # Variational Laplace
    "curvature",
    "MeanFieldGuide",
    "TaylorELBO",
    # Moment propagation
    "MultiplicativeNoiseGuide",
    "LastLayerGuide",
    "MomentPropagationELBO",
    # Natural gradients
    "NaturalGradientGuide",
    "KroneckerGuide",
    "NaturalGradientELBO",
    "VOGN",
    "OGN",
    "IVON",
    "NoisyKFAC",
    # Laplace's approximation; its methods are in ``laplace``
    "laplace",
    "LaplaceGuide",
    # Training; early stopping, checkpoints and batch-norm statistics are in ``training``
    "guides",
    "optim",
    "schedules",
    "SampledELBO",
    "training",
    "fit",
    "save",
    "load",
    "train_ensemble",
    "tune",
    # Predictions, scores, export and plots
    "predict",
    "predictor",
    "AtMean",
    "Linearised",
    "Moments",
    "FullCovariance",
    "ReverseDelta",
    "Samples",
    "metrics",
    "diagnostics",
    "plots",
    "to_arviz",
    "errors",
]


if not TYPE_CHECKING:  # a type checker knows all names from the imports above and rejects others

    def __getattr__(name: str) -> object:
        if name == "plots":
            return _import_module("pyro_dvi.analysis.plots")
        if name == "__version__":  # of the installed package, read on first use
            return _import_module("importlib.metadata").version("pyro-dvi")
        raise AttributeError(f"module 'pyro_dvi' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
