# SPDX-License-Identifier: Apache-2.0
"""summary: what it counts, what it reads from a guide, and that looking changes nothing."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal, init_to_value
from torch import nn
from torch.distributions import constraints

from pyro_dvi.bayesian import HierarchicalScale, classifier, init_to_module, regressor, summary, to_bayesian_
from pyro_dvi.errors import ArgumentError, GuideError


def network() -> nn.Sequential:
    return to_bayesian_(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 2)), 0.5)


def test_network():
    net = network()
    table = summary(net)
    assert table["site"] == ["0.weight", "0.bias", "3.weight", "3.bias"]
    assert table["weights"] == [12, 3, 6, 2]
    assert table["start_rms"][0] == pytest.approx(
        net[0]._buffers["weight_initial"].square().mean().sqrt().item()
    )
    text = str(table)
    assert "0.weight  3×4" in text and "Normal(loc=0, scale=0.5)" in text
    assert table.note == "23 latent weights, 6 deterministic parameters"


def test_model_with_guide_and_arguments():
    model = regressor(network(), 10, dist.HalfNormal(1.0))
    x, y = torch.randn(5, 4), torch.randn(5, 2)
    guide = AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.03)
    with pytest.raises(GuideError, match="is not initialised"):
        summary(model, guide)
    guide(x, y)
    before = (
        torch.get_rng_state(),
        model.net[1].running_mean.clone(),
        model.net[1].num_batches_tracked.clone(),
    )
    table = summary(model, guide, x, y)
    assert table["site"][-1] == "noise_scale"
    assert table["scale"][:-1] == pytest.approx([0.03] * 4, rel=1e-4)
    assert table["mean_rms"][0] == pytest.approx(table["start_rms"][0])
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], model.net[1].running_mean)
    assert torch.equal(before[2], model.net[1].num_batches_tracked)
    assert "mean rms" in str(table)


def test_guides_without_quantiles_show_no_scale():
    model = classifier(network(), 10)
    guide = AutoDelta(model, init_loc_fn=init_to_module)
    guide(torch.randn(5, 4), torch.zeros(5).long())
    assert all(map(math.isnan, summary(model, guide)["scale"]))


def test_functional_model():
    def model(x: torch.Tensor) -> torch.Tensor:
        w = pyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(x @ w, 1.0), obs=torch.zeros(len(x)))

    table = summary(model, None, torch.randn(4, 3))
    assert (table["site"], table["shape"], table["prior"]) == (["w"], ["3"], ["Normal(loc=0, scale=2)"])


def test_hierarchical_scales_and_ties_are_listed():
    net = nn.Sequential(nn.Embedding(3, 4), nn.Linear(4, 3, bias=False))
    net[1].weight = net[0].weight
    table = summary(to_bayesian_(net, HierarchicalScale()))
    assert dict(zip(table["site"], table["prior"], strict=True)) == {
        "0.weight": "Normal(0, 1·weight_scale)",
        "0.weight_scale": "LogNormal(loc=0, scale=1)",
        "1.weight": "= 0.weight",
    }


def test_priors_that_depend_on_other_sites_say_so_instead_of_showing_a_draw():
    def model(x: torch.Tensor) -> torch.Tensor:
        top = pyro.sample("top", dist.HalfNormal(1.0))
        s = pyro.sample("s", dist.LogNormal(0.0, top))
        w = pyro.sample("w", dist.Normal(0.0, 2 * s).expand([3]).to_event(1))
        return pyro.sample("y", dist.Normal(x @ w, s).to_event(1))

    with torch.no_grad():
        table = summary(model, None, torch.randn(4, 3))
    assert dict(zip(table["site"], table["prior"], strict=True)) == {
        "top": "HalfNormal(scale=1)",
        "s": "LogNormal(loc=0, scale varies)",
        "w": "Normal(loc=0, scale varies)",
        "y": "Normal(loc varies, scale varies)",
    }


def test_scale_is_positive_where_the_transform_decreases():
    class Negative(dist.Normal):
        support = constraints.less_than(0.0)  # type: ignore[assignment]

    def model() -> None:
        pyro.sample("a", Negative(-1.0, 1.0))

    guide = AutoNormal(model, init_loc_fn=init_to_value(values={"a": torch.tensor(-1.0)}), init_scale=0.01)
    guide()
    assert summary(model, guide)["scale"][0] == pytest.approx(0.01, rel=0.01)


def test_data_in_place_of_the_guide_are_refused():
    net = to_bayesian_(nn.Linear(2, 1))
    with pytest.raises(ArgumentError, match=r"guide of summary .* Tensor.*summary\(model, None, x, y\)"):
        summary(classifier(net, num_data=4), torch.ones(4, 2), torch.ones(4, 1))
