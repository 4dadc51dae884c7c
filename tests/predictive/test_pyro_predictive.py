# SPDX-License-Identifier: Apache-2.0
"""``pyro.infer.Predictive`` takes every guide of the library, and says what ``predict`` says."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive

import pyro_dvi
from pyro_dvi import (
    KroneckerGuide,
    LaplaceGuide,
    MeanFieldGuide,
    MultiplicativeNoiseGuide,
    NaturalGradientGuide,
    Samples,
    predict,
)
from pyro_dvi.errors import DviWarning
from pyro_dvi.guides.base import FactorisedGuide

X = torch.linspace(-1, 1, 30, dtype=torch.float64)
Y = 2 * X + 0.1


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.ones(2), 1.0).to_event(1))
    with pyro.plate("data", 30, subsample_size=len(x)):
        mean = pyro.deterministic("mean", w[0] * x + w[1])
        return pyro.sample("obs", dist.Normal(mean, 0.3), obs=y)


def fitted_laplace():
    guide = LaplaceGuide(model)
    guide.polish([(X, Y)], progress=False)
    guide.fit([(X, Y)])
    return guide


GUIDES = {
    MeanFieldGuide: lambda: MeanFieldGuide(model),
    MultiplicativeNoiseGuide: lambda: MultiplicativeNoiseGuide(model),
    NaturalGradientGuide: lambda: NaturalGradientGuide(model),
    KroneckerGuide: lambda: KroneckerGuide(model),
    LaplaceGuide: fitted_laplace,
}


def subclasses(cls):
    return {cls}.union(*(subclasses(child) for child in cls.__subclasses__()))


def test_every_guide_of_the_library_is_here():
    public = {cls for cls in subclasses(FactorisedGuide) if getattr(pyro_dvi, cls.__name__, None) is cls}
    assert public == GUIDES.keys()


@pytest.mark.every(3)
@pytest.mark.parametrize("guide_class", GUIDES)
def test_predictive_agrees_with_predict(guide_class):
    torch.set_default_dtype(torch.float64)
    guide = GUIDES[guide_class]()
    guide(X, Y)
    num_samples = 400
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DviWarning)  # draws of a Laplace approximation are no good predictor
        prediction = predict(model, guide, X, Samples(num_samples), seed=0)
        run = Predictive(model, guide=guide, num_samples=num_samples, return_sites=["obs", "mean", "w"])
        drawn = run(X)
    assert drawn["w"].shape[-1] == 2
    assert drawn["obs"].shape == (num_samples, 30)
    for name, spread in (("mean", prediction.epistemic), ("obs", prediction.variance)):
        error = (spread / num_samples).sqrt() * 2**0.5  # of the difference of two Monte-Carlo means
        z = (drawn[name].mean(0) - prediction.mean) / error.clamp_min(1e-9)
        assert float(z.abs().max()) < 4.5  # 60 z-tests: fails for less than one seed in 2,000
