# SPDX-License-Identifier: Apache-2.0
"""init_to_module: guides start where the module was, and other sites where the fallback says."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoLowRankMultivariateNormal,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_sample
from torch import nn

from pyro_dvi.bayesian import init_to_module, regressor, to_bayesian_

GUIDES = [AutoNormal, AutoDiagonalNormal, AutoDelta, AutoMultivariateNormal, AutoLowRankMultivariateNormal]


@pytest.mark.parametrize("guide_type", GUIDES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pyros_guides_start_from_the_module(guide_type, dtype):
    net = nn.Linear(3, 1).to(dtype)
    weight = net.weight.detach().clone()
    model = regressor(to_bayesian_(net), 5, dist.HalfNormal(1.0)).to(dtype)
    guide = guide_type(model, init_loc_fn=init_to_module)
    torch.set_default_dtype(dtype)  # some of Pyro's guides make their scales in the default dtype
    guide(torch.zeros(5, 3), torch.zeros(5))
    assert torch.allclose(guide.median()["net.weight"], weight)
    with torch.no_grad():  # training the guide must not train the kept weight
        for parameter in guide.parameters():
            parameter.add_(1.0)
    assert torch.equal(net._buffers["weight_initial"], weight)


def test_fallback():
    def model() -> None:
        pyro.sample("s", dist.LogNormal(3.0, 0.1))

    guide = AutoNormal(model, init_loc_fn=init_to_module)
    guide()
    assert guide.median()["s"].log().item() == pytest.approx(3.0, abs=0.3)
    strategy = init_to_module(fallback=init_to_feasible)
    for one in (strategy, copy.deepcopy(strategy), pickle.loads(pickle.dumps(strategy))):
        pyro.clear_param_store()
        other = AutoNormal(model, init_loc_fn=one)
        other()
        assert other.median()["s"].item() == pytest.approx(1.0)
    assert init_to_module(fallback=init_to_sample)({"fn": dist.Normal(0.0, 1.0)}).shape == ()
