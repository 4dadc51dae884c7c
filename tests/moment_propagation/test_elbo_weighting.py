# SPDX-License-Identifier: Apache-2.0
"""Weights of examples by a power of their variance: what they are, when they end, and mistakes."""

import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, ModelError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.moment_propagation.elbo import MomentPropagationELBO, VarianceWeighted


def test_weighted_training_ends_on_the_plain_objective():
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(12, 2)
    data = x, torch.sin(x.sum(1, keepdim=True))
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 2)).double())
    model = dvi.regressor(net, num_data=12, noise_scale=dvi.bayesian.Heteroscedastic())
    guide = MeanFieldGuide(model)
    plain = MomentPropagationELBO().loss(model, guide, *data)
    exponent = dvi.schedules.LinearWarmup(steps=2, start=1.0, end=0.0)
    elbo = MomentPropagationELBO(weighting=VarianceWeighted(exponent))
    losses = [elbo.loss_and_grads(model, guide, *data) for _ in range(3)]
    assert losses[0] != pytest.approx(plain)
    assert losses[2] == pytest.approx(plain)
    assert elbo.loss(model, guide, *data) == pytest.approx(plain)  # evaluation is never weighted


def test_weights_are_powers_of_the_variance_with_mean_one():
    fn = dist.Normal(torch.zeros(2, 3), torch.tensor([[1.0, 2.0, 3.0], [1.0, 1.0, 2.0]]))
    weights = VarianceWeighted(1.0, dim=-1)(fn, 0)
    torch.testing.assert_close(
        weights, torch.tensor([[1.0, 4.0, 9.0], [1.0, 1.0, 4.0]]) / torch.tensor([[14 / 3], [2.0]])
    )
    assert VarianceWeighted(0.0)(fn, 0) == 1


def test_weighting_needs_a_variance_and_a_sensible_exponent():
    with pytest.raises(ModelError, match="no variance"):
        VarianceWeighted(0.5)(dist.VonMises3D(torch.ones(3)), 0)
    with pytest.raises(ArgumentError, match="between 0 and 1"):
        VarianceWeighted(-1.0)
    with pytest.raises(ArgumentError, match="variance_floor must not be negative"):
        dvi.MomentPropagationELBO(variance_floor=-1e-5)
