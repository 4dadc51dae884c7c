# SPDX-License-Identifier: Apache-2.0
"""The report says where propagated moments deviate from draws, and where they do not."""

import copy
import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoMultivariateNormal, AutoNormal
from torch import nn

from pyro_dvi import MeanFieldGuide, MultiplicativeNoiseGuide, classifier, to_bayesian_
from pyro_dvi.analysis.diagnostics.moment_comparison import _compared, _RunningMoments, compare_with_sampling
from pyro_dvi.errors import ArgumentError, ModelError, UnsupportedError
from pyro_dvi.predictive import ReverseDelta


def classifier_of(net, make_guide=MeanFieldGuide, num_inputs=4):
    torch.manual_seed(0)
    x, y = torch.randn(12, num_inputs), torch.randint(3, (12,))
    model = classifier(to_bayesian_(net), num_data=12)
    guide = make_guide(model)
    guide(x, y)
    return model, guide, x


def mlp():
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(inplace=True), nn.Linear(16, 3))


def hand_written(model):
    locs = {name: buffer.clone() for name, buffer in model.named_buffers() if name.endswith("_initial")}

    def guide(x, y=None):
        for name, loc in locs.items():
            pyro.sample(name.removesuffix("_initial"), dist.Normal(loc, 0.1).to_event(loc.dim()))

    return guide


@pytest.mark.slow
@pytest.mark.parametrize("make_guide", [MeanFieldGuide, MultiplicativeNoiseGuide, AutoNormal, hand_written])
def test_one_hidden_layer_agrees_with_draws(make_guide):
    """Ratios of average deviations: 1,000 draws, 5 times the 2.2 % of a single one."""
    model, guide, x = classifier_of(mlp(), make_guide)
    report = compare_with_sampling(model, guide, x, num_samples=1000, seed=0)
    assert report["layer"] == ["net.0", "net.1", "net.2", "net.3", "net", "obs.logits"]
    assert report["class"][:3] == ["Linear", "BatchNorm1d", "ReLU"]
    for row in report.rows:
        assert abs(row["sd_ratio"] - 1) < 0.1, row
        assert row["mean_error"] < 6 * math.sqrt(2 / (math.pi * 1000))
        assert row["rank_correlation"] > 0.5
    assert "12 examples" in report.heading


class Doubled(nn.Module):
    """Adds a layer to itself through two paths, which moments take for independent ones."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.first, self.second = nn.Identity(), nn.Identity()

    def forward(self, x):
        h = self.linear(x)
        return 0.5 * h + 0.5 * h


@pytest.mark.slow
def test_the_layer_that_drops_covariances_is_the_worst():
    model, guide, x = classifier_of(nn.Sequential(Doubled()))
    report = compare_with_sampling(model, guide, x, num_samples=500, seed=0)
    by_name = {row["layer"]: row["sd_ratio"] for row in report.rows}
    assert abs(by_name["net.0.linear"] - 1) < 0.1
    assert abs(by_name["net.0"] - math.sqrt(0.5)) < 0.07
    pulled = compare_with_sampling(model, guide, x, num_samples=500, seed=0, propagation=ReverseDelta())
    assert abs(pulled["sd_ratio"][-1] - 1) < 0.1


def test_modules_called_twice_and_modules_of_functions_have_names():
    shared, net = nn.ReLU(), to_bayesian_(nn.Linear(4, 4))

    def model(x, y=None):
        h = shared(shared(net(x)))
        with pyro.plate("data", 12, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(h, 0.1 + h.exp()).to_event(1), obs=y)

    x = torch.randn(12, 4)
    guide = AutoNormal(model, init_scale=0.02)
    guide(x, x)
    report = compare_with_sampling(model, guide, x, num_samples=50, seed=0)
    assert report["layer"] == ["Linear", "ReLU", "ReLU (call 2)", "y.loc", "y.scale"]


def test_nothing_is_left_behind():
    model, guide, x = classifier_of(mlp())
    buffers = copy.deepcopy(dict(model.named_buffers()))
    state = torch.get_rng_state()
    first = compare_with_sampling(model, guide, x, num_samples=3, seed=0)
    assert first == compare_with_sampling(model, guide, (x, None), num_samples=3, seed=0)
    assert torch.equal(state, torch.get_rng_state())
    assert model.training and torch.backends.mha.get_fastpath_enabled()
    assert not nn.modules.module._global_forward_hooks
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name])


def test_statistics_by_hand():
    loc, variance = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([4.0, 1.0, 0.0])
    mean, sampled = torch.tensor([0.0, 2.0, 0.0]), torch.tensor([16.0, 4.0, 0.0])
    draws = _RunningMoments()
    draws.count, draws.mean, draws._squares = 2, mean, sampled
    row = _compared(loc, variance, draws)
    assert row == {
        "elements": 3,
        "mean_error": 0.125,
        "sd_ratio": 0.5,
        "rank_correlation": pytest.approx(1.0),
    }


def draws_of_ones():
    moments = _RunningMoments()
    for _ in range(2):
        moments.add(torch.ones(1))
    return moments


def test_running_moments():
    values, moments = torch.randn(7, 3).double(), _RunningMoments()
    for value in values:
        moments.add(value)
    torch.testing.assert_close(moments.mean, values.mean(0))
    torch.testing.assert_close(moments.variance, values.var(0))


def test_mistakes_are_named():
    model, guide, x = classifier_of(mlp())
    with pytest.raises(ArgumentError, match="at least 2"):
        compare_with_sampling(model, guide, x, num_samples=1)
    with pytest.raises(ArgumentError, match="propagation must be an object"):
        compare_with_sampling(model, guide, x, propagation=ReverseDelta)
    dependent = AutoMultivariateNormal(model)
    dependent(x, torch.zeros(12).long())
    with pytest.raises(UnsupportedError, match="has covariances"):
        compare_with_sampling(model, dependent, x)

    def certain(x, y=None):
        pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    guide = AutoNormal(certain)
    guide(x[:, 0], x[:, 0])
    with pytest.raises(ModelError, match="the outputs of the model are deterministic"):
        compare_with_sampling(certain, guide, x[:, 0])
