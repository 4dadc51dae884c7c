# SPDX-License-Identifier: Apache-2.0
"""Deterministic variational inference for Bayesian neural networks in Pyro.

The public names, in the order of the chapters. matplotlib is loaded when ``plots`` is first used, ArviZ when
``to_arviz`` is called, and pandas by the tables of reports.
"""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING

from pyro_dvi import (
    bayesian,
    curvature,
    errors,
    expectations,
    guides,
    laplace,
    links,
    moment_propagation,
    moments,
    natural_gradients,
    objectives,
    optim,
    predictive,
    training,
    variational_laplace,
)
from pyro_dvi.analysis import diagnostics
from pyro_dvi.analysis.arviz_export import to_arviz
from pyro_dvi.analysis.diagnostics import (
    compare_with_sampling,
    prior_predictive_check,
    scale_report,
    scale_snapshot,
    signal_to_noise,
)
from pyro_dvi.analysis.tuning import tune_kl_weight
from pyro_dvi.bayesian import (
    classifier,
    fan_in,
    init_to_module,
    regressor,
    smooth_activations_,
    summary,
    to_bayesian_,
    to_deterministic,
)
from pyro_dvi.guides import MeanFieldGuide, PerSite, PerWeight, SGDStepSize
from pyro_dvi.laplace import LaplaceGuide
from pyro_dvi.moment_propagation import (
    LastLayerGuide,
    MomentPropagationELBO,
    MultiplicativeNoiseGuide,
    VarianceWeighted,
)
from pyro_dvi.natural_gradients import IVON, OGN, VOGN, NaturalGradientELBO, NaturalGradientGuide
from pyro_dvi.objectives import SampledELBO, schedules
from pyro_dvi.optim import learning_rates, parameter_groups
from pyro_dvi.predictive import (
    AtMean,
    Linearised,
    Moments,
    Prediction,
    ReverseDelta,
    Samples,
    metrics,
    predict,
    predictor,
)
from pyro_dvi.training import EnsembleGuide, fit, load, save, train_ensemble
from pyro_dvi.variational_laplace import TaylorELBO

if TYPE_CHECKING:
    from pyro_dvi.analysis import plots

    __version__: str

__all__ = [
    # Errors
    "errors",
    # Bayesian models; their other priors and noises are in ``bayesian``
    "bayesian",
    "to_bayesian_",
    "fan_in",
    "smooth_activations_",
    "init_to_module",
    "classifier",
    "regressor",
    "summary",
    "to_deterministic",
    # Posteriors and objectives; the methods of LaplaceGuide are in ``laplace``
    "curvature",
    "guides",
    "laplace",
    "MeanFieldGuide",
    "MultiplicativeNoiseGuide",
    "LastLayerGuide",
    "PerWeight",
    "PerSite",
    "SGDStepSize",
    "variational_laplace",
    "TaylorELBO",
    "moments",
    "expectations",
    "links",
    "moment_propagation",
    "MomentPropagationELBO",
    "VarianceWeighted",
    "natural_gradients",
    "NaturalGradientGuide",
    "NaturalGradientELBO",
    "objectives",
    "SampledELBO",
    "LaplaceGuide",
    # Training; early stopping, checkpoints and batch-norm statistics are in ``training``
    "optim",
    "VOGN",
    "OGN",
    "IVON",
    "schedules",
    "training",
    "learning_rates",
    "parameter_groups",
    "fit",
    "train_ensemble",
    "EnsembleGuide",
    "save",
    "load",
    "tune_kl_weight",
    # Predictions, scores, export and plots
    "metrics",
    "predictive",
    "diagnostics",
    "predict",
    "predictor",
    "AtMean",
    "Moments",
    "ReverseDelta",
    "Linearised",
    "Samples",
    "Prediction",
    "compare_with_sampling",
    "scale_report",
    "scale_snapshot",
    "signal_to_noise",
    "prior_predictive_check",
    "to_arviz",
    "plots",
]


if not TYPE_CHECKING:  # a type checker knows all names from the imports above, and objects to others

    def __getattr__(name: str) -> object:
        if name == "plots":
            return _import_module("pyro_dvi.analysis.plots")
        if name == "__version__":  # of the installed package, read where somebody asks
            return _import_module("importlib.metadata").version("pyro-dvi")
        raise AttributeError(f"module 'pyro_dvi' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, *(name for name in globals() if name.startswith("__"))]
