# SPDX-License-Identifier: Apache-2.0
"""Networks whose prior scales are optimal in closed form: every objective, what cannot be trained, prior draws."""

from functools import partial

import pyro
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.bayesian import OptimalScale, fan_in, init_to_module
from pyro_dvi.curvature import HessianDiagonal
from pyro_dvi.errors import ArgumentError, ModelError, UnsupportedError
from pyro_dvi.laplace import Dense, Diagonal, PriorPrecision

X = torch.randn(60, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, 0] - X[:, 1] + 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(1))
BATCHES = [(X[:40], Y[:40]), (X[40:], Y[40:])]


def network(activation: type[nn.Module] = nn.Tanh, **options) -> dvi.bayesian.likelihoods.Regressor:
    net = nn.Sequential(nn.Linear(3, 8), activation(), nn.Linear(8, 1))
    return dvi.regressor(dvi.to_bayesian_(net, OptimalScale(fan_in, **options)), 60, noise_scale=0.3)


moments = partial(network, nn.ReLU)
TRAININGS = {
    "Taylor": (network, dvi.MeanFieldGuide, dvi.TaylorELBO),
    "Hessian": (network, dvi.MeanFieldGuide, partial(dvi.TaylorELBO, curvature=HessianDiagonal())),
    "moments": (moments, dvi.MeanFieldGuide, dvi.MomentPropagationELBO),
    "DVI": (moments, dvi.MeanFieldGuide, partial(dvi.MomentPropagationELBO, full_covariance=True)),
    "noise": (moments, dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO),
    "AutoNormal": (moments, partial(AutoNormal, init_loc_fn=init_to_module), dvi.MomentPropagationELBO),
    "sampled": (network, dvi.MeanFieldGuide, partial(dvi.SampledELBO, kl_weight=0.5)),
    "cold": (network, dvi.MeanFieldGuide, partial(dvi.SampledELBO, temperature=0.3)),
    "dense": (network, partial(AutoMultivariateNormal, init_scale=0.05), dvi.SampledELBO),
    "MAP": (network, partial(AutoDelta, init_loc_fn=init_to_module), dvi.SampledELBO),
    "Pyro": (network, partial(AutoNormal, init_scale=0.05), Trace_ELBO),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", TRAININGS)
def test_every_objective_learns(name):
    model, guide, elbo = TRAININGS[name]
    made = model()
    svi = SVI(made, guide(made), dvi.optim.Adam({"lr": 0.03}), loss=elbo())
    before = svi.evaluate_loss(X, Y)
    dvi.fit(svi, BATCHES, epochs=40, progress=False)
    assert svi.evaluate_loss(X, Y) < 0.5 * before
    assert dvi.predict(made, svi.guide, (X, Y)).metrics()["rmse"] < 0.5


def test_scales_follow_the_weights():
    model = network()
    guide = dvi.MeanFieldGuide(model)
    dvi.fit(
        SVI(model, guide, dvi.optim.Adam({"lr": 0.03}), loss=dvi.TaylorELBO()), BATCHES, 40, progress=False
    )
    prior = model.net[0]._pyro_samples["weight"](model.net[0])
    q = guide.get_posterior()["net.0.weight"]
    expected = (q.mean.square() + q.variance).sum() + 2 * 5.4798 * (2 / 3)
    torch.testing.assert_close(prior.optimal_variance(q.mean, q.stddev), expected / (24 + 2 * 5.4798))
    assert guide.initial_scales()["net.0.weight"].mean() == pytest.approx(
        fan_in("", q.mean) * torch.tensor(-3.0).exp()
    )


def test_natural_gradients_are_refused():
    for guide in (dvi.NaturalGradientGuide, dvi.KroneckerGuide):
        with pytest.raises(
            ModelError, match=r"'net.0.weight' is OptimalScaleNormal, but natural-gradient .*Normal prior"
        ):
            guide(network())(X, Y)


@pytest.mark.slow
def test_laplace_takes_couplings_of_the_prior_or_refuses_them():
    guide = dvi.LaplaceGuide(network())
    guide.polish(BATCHES, progress=False)
    with pytest.raises(
        UnsupportedError, match=r"Diagonal\(\) needs independent latents.*'net.0.weight' couples them"
    ):
        guide.fit(BATCHES, Diagonal())
    guide.fit(BATCHES, Dense())
    with pytest.raises(UnsupportedError, match="OptimalScaleNormal, whose scale cannot be multiplied"):
        guide.tune(BATCHES, PriorPrecision("net.0.*"))


def test_alpha_is_positive():
    with pytest.raises(ArgumentError, match="OptimalScale: alpha is 0"):
        network(alpha=0.0)


def test_prior_draws_and_log_priors():
    model = network()
    draws = Predictive(model, num_samples=3)(X)
    assert draws["net.0.weight"].shape[-2:] == (8, 3) and draws["obs"].shape == (3, 60)
    guide = dvi.MeanFieldGuide(model)
    guide(X, Y)
    exported = dvi.to_arviz(model, guide, (X, Y), 4, log_prior=True, prior=5, seed=0)
    posterior, found = exported["posterior"], exported["log_prior"]
    weights = torch.tensor(posterior["net.0.weight"].values[0])
    expected = model.net[0]._pyro_samples["weight"](model.net[0]).log_prob(weights)
    torch.testing.assert_close(torch.tensor(found["net.0.weight"].values[0]), expected)
    assert exported["prior"]["net.0.weight"].shape == (1, 5, 8, 3)


def trained(**options) -> tuple[SVI, dvi.training.History]:
    pyro.clear_param_store()
    model = network(**options)
    svi = SVI(model, dvi.MeanFieldGuide(model), dvi.optim.Adam({"lr": 0.03}), loss=dvi.TaylorELBO())
    return svi, dvi.fit(svi, BATCHES, epochs=3, progress=False)


def test_a_saved_posterior_is_loaded(tmp_path):
    svi, history = trained()
    expected = svi.guide.median()["net.0.weight"]
    dvi.save(tmp_path / "posterior.pt", svi, history=history)
    again, _ = trained()
    dvi.load(tmp_path / "posterior.pt", again)
    torch.testing.assert_close(again.guide.median()["net.0.weight"], expected)
