# SPDX-License-Identifier: Apache-2.0
"""Statistics of batch normalisation, computed anew at the mean of the posterior."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoIAFNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.optim import Adam
from torch import nn

from pyro_dvi.errors import DataError, GuideError, ModelError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.training import fit, recompute_batch_norm
from tests.training.problems import Net, same, sequence, shuffled, svi_of, weights_of


class Deep(Net):
    """Its second BatchNorm sees latent weights, and there is dropout between the two."""

    def __init__(self, dtype=torch.float32):
        super().__init__(dtype)
        self.dropout = nn.Dropout(0.5)
        self.after = nn.BatchNorm1d(1).to(dtype)

    def forward(self, x, y=None):
        hidden = self.dropout(nn.functional.softplus(self.norm(self.first(x))))
        mean = self.after(self.last(hidden)).squeeze(-1)
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("obs", dist.Normal(mean, 0.3), obs=y)


GUIDES = [MeanFieldGuide, AutoNormal, AutoDiagonalNormal, AutoMultivariateNormal, AutoDelta]


def expected_statistics(model, weights, batches):
    """The averages by hand: mean and unbiased variance of each batch, with the weights at their mean."""
    means, variances = [], []
    weight, bias = weights["last.weight"], weights["last.bias"]
    for x, _ in batches:
        hidden = model.first(x)
        normed = (hidden - hidden.mean(0)) / (hidden.var(0, unbiased=False) + model.norm.eps).sqrt()
        normed = model.norm.weight * normed + model.norm.bias
        out = nn.functional.softplus(normed) @ weight.T + bias
        means.append((hidden.mean(0), out.mean(0)))
        variances.append((hidden.var(0), out.var(0)))
    average = lambda values: [torch.stack(layer).mean(0) for layer in zip(*values, strict=True)]  # noqa: E731
    return average(means), average(variances)


@pytest.mark.parametrize("guide_class", GUIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_statistics_are_averages_at_the_posterior_mean(guide_class, dtype):
    model = Deep(dtype)
    guide = guide_class(model)
    batches = sequence(dtype)
    guide(*batches[0])
    momenta = [model.norm.momentum, model.after.momentum]
    with torch.no_grad():
        layers = recompute_batch_norm(model, guide, batches)
        means, variances = expected_statistics(model, guide.median(*batches[0]), batches)
    assert layers == [model.norm, model.after]
    for layer, mean, variance in zip(layers, means, variances, strict=True):
        torch.testing.assert_close(layer.running_mean, mean)
        torch.testing.assert_close(layer.running_var, variance)
        assert layer.num_batches_tracked == 3
    assert [model.norm.momentum, model.after.momentum] == momenta
    assert all(module.training for module in model.modules())


def test_functions():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))

    def model(x, y=None):
        w = pyro.sample("w", dist.LogNormal(torch.zeros(3), 1.0).to_event(1))
        pyro.sample("obs", dist.Normal(net(x) @ w, 1.0).to_event(1), obs=y)

    def guide(x, y=None):
        pyro.sample("w", dist.LogNormal(torch.ones(3), 0.1).to_event(1))

    batches = sequence()
    assert recompute_batch_norm(model, guide, batches[:2]) == [net[1]]
    expected = torch.stack([net[0](x).mean(0) for x, _ in batches[:2]]).mean(0)
    torch.testing.assert_close(net[1].running_mean, expected)
    assert net[1].num_batches_tracked == 2


def test_latents_inside_a_subsampled_plate():
    net = nn.BatchNorm1d(1)

    def model(x, y=None):
        with pyro.plate("data", 24, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(torch.zeros(()), 1.0))
            pyro.sample("obs", dist.Normal(net((x[:, 0] + z)[:, None])[:, 0], 1.0), obs=y)

    def create_plates(x, y=None):
        return pyro.plate("data", 24, subsample_size=len(x))

    guide = AutoNormal(model, create_plates=create_plates)
    batches = sequence()
    guide(*batches[0])
    recompute_batch_norm(model, guide, batches)
    assert net.num_batches_tracked == 3


def test_failure_leaves_everything_as_it_was():
    svi = svi_of("AutoNormal + Trace_ELBO")
    fit(svi, sequence(), 1, progress=False)
    before = weights_of(svi)
    with pytest.raises(RuntimeError):
        recompute_batch_norm(svi.model, svi.guide, [*sequence(), (torch.ones(2, 7), torch.ones(2))])
    assert same(weights_of(svi), before)
    assert svi.model.norm.momentum == 0.1
    with pytest.raises(DataError, match="empty"):
        recompute_batch_norm(svi.model, svi.guide, [])
    assert same(weights_of(svi), before)


def test_bad_input():
    svi = svi_of("AutoNormal + Trace_ELBO")
    svi.model.norm = nn.BatchNorm1d(4, track_running_stats=False)
    svi.guide(*sequence()[0])
    with pytest.raises(ModelError, match="no BatchNorm with track_running_stats"):
        recompute_batch_norm(svi.model, svi.guide, sequence())
    pyro.clear_param_store()
    model = Net()
    guide = AutoIAFNormal(model)
    with pytest.raises(GuideError, match="AutoIAFNormal|factorised"):
        recompute_batch_norm(model, guide, sequence())


def test_the_network_at_the_mean_predicts_better_than_with_running_statistics():
    """What it is for: after a jump of the weights, running statistics lag behind."""
    torch.manual_seed(0)
    model = Net()
    guide = AutoDelta(model)
    svi = SVI(model, guide, Adam({"lr": 0.02}), Trace_ELBO())
    fit(svi, shuffled(), 20, progress=False)
    with torch.no_grad():
        model.first.weight.mul_(3.0)
    model.eval()

    def error():
        x, y = (torch.cat(parts) for parts in zip(*sequence(), strict=True))
        with torch.no_grad():
            trace = poutine.trace(poutine.condition(model, data=guide.median())).get_trace(x)
        return float((trace.nodes["obs"]["fn"].mean - y).square().mean())

    lagging = error()
    recompute_batch_norm(model, guide, sequence())
    assert error() < lagging
