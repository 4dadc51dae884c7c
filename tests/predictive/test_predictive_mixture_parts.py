# SPDX-License-Identifier: Apache-2.0
"""Noise and posterior told apart by the rules that predict with one distribution: beside many draws."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.bayesian import Heteroscedastic, LearnedScale
from pyro_dvi.links import GaussHermite
from pyro_dvi.links.noise_links import Normal
from pyro_dvi.predictive.engine.model_runs import Response
from pyro_dvi.predictive.predictive_mixture import Mixture

X = torch.linspace(-1, 1, 6, dtype=torch.float64).unsqueeze(-1)
Y = 2 * X.squeeze(-1)


def linear(noise: object, columns: int = 1):
    torch.manual_seed(0)
    return dvi.regressor(dvi.to_bayesian_(nn.Linear(1, columns).double()), 6, noise)


@pytest.mark.every(3)
@pytest.mark.parametrize("noise", [0.5, LearnedScale(0.5), dist.HalfNormal(0.5), Heteroscedastic()], ids=repr)
@pytest.mark.parametrize("link", [dvi.Moments().noise, GaussHermite(32)], ids=repr)
def test_moments_have_the_parts_of_draws(noise: object, link):
    model = linear(noise, 2 if isinstance(noise, Heteroscedastic) else 1)
    guide = dvi.MeanFieldGuide(model, scale=dvi.guides.PerWeight(-1.0))
    guide(X, Y)
    one = dvi.predict(model, guide, X, dvi.Moments(noise=link))
    many = dvi.predict(model, guide, X, dvi.Samples(5_000), seed=0)
    # Standard errors of the variances of 5,000 draws are 2 %, of a log-normal noise 1.5 %: five of them are allowed.
    torch.testing.assert_close(one.epistemic, many.epistemic, rtol=0.1, atol=0)
    torch.testing.assert_close(one.aleatoric, many.aleatoric, rtol=0.08, atol=0)
    torch.testing.assert_close(one.epistemic + one.aleatoric, one.variance)


@pytest.mark.parametrize("columns", [1, 2])
def test_laplace_tells_the_linear_regression_its_parts(columns: int):
    """The variance of a linear function is x' Σ x, whatever the noise."""
    model = linear(0.5, columns)
    y = Y if columns == 1 else torch.stack([Y, -Y], -1)
    guide = dvi.LaplaceGuide(model)
    guide.polish([(X, y)], progress=False)
    guide.fit([(X, y)])
    prediction = dvi.predict(model, guide, X)
    design = torch.cat([X, torch.ones_like(X)], -1)
    covariance = torch.linalg.inv(design.T @ design / 0.5**2 + torch.eye(2, dtype=torch.float64))
    expected = torch.einsum("ni,ij,nj->n", design, covariance, design)
    for epistemic in prediction.epistemic.reshape(6, -1).T:
        torch.testing.assert_close(epistemic, expected)
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(prediction.aleatoric, 0.25))


def test_noise_that_rounding_hides_is_not_negative():
    model = dvi.regressor(dvi.to_bayesian_(nn.Linear(1, 1)), 50, 1e-3)
    guide = dvi.MeanFieldGuide(model, scale=dvi.guides.PerWeight(-1.0))
    x = 1000 * torch.linspace(-1, 1, 50).unsqueeze(-1)
    guide(x, x[:, 0])
    prediction = dvi.predict(model, guide, x, dvi.Moments())
    assert (prediction.aleatoric >= 0).all() and (prediction.epistemic > 1).all()


def test_what_one_member_does_not_know_the_ensemble_does_not_say():
    """A mixture of a component that tells its parts with one that does not has no parts."""

    def parts(*components):
        mixture = Mixture(None, 3, room=torch.inf)
        for fn in components:
            mixture.add(Response("obs", fn, torch.zeros(3), False, -1, None))
        part = mixture.finish()
        assert part.draws.keys() == {"mean", "variance"}
        return part.values

    zeros = torch.zeros(3)
    knowing, plain = Normal(zeros, zeros + 1, zeros + 3), dist.Normal(zeros, 2.0)
    both = parts(knowing, knowing)
    torch.testing.assert_close((both["epistemic"], both["aleatoric"]), (zeros + 1, zeros + 3))
    for mixed in (parts(knowing, plain), parts(plain, knowing)):
        assert "function_variance" not in mixed
        torch.testing.assert_close(mixed["epistemic"] + mixed["aleatoric"], zeros + 4)
