# SPDX-License-Identifier: Apache-2.0
"""How sure the posterior is of each weight."""

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide import AutoNormal, init_to_value

from pyro_dvi import MultiplicativeNoiseGuide, to_bayesian_
from pyro_dvi.analysis.diagnostics.posterior_scales import signal_to_noise


def model():
    pyro.sample("w", dist.Normal(torch.zeros(2, 2), 1.0).to_event(2))
    pyro.sample("b", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    pyro.sample("noise", dist.LogNormal(0.0, 1.0))


def ratios():
    values = {
        "w": torch.tensor([[0.0, 0.1], [-0.3, 0.4]]),
        "b": torch.tensor([0.05, -2.0]),
        "noise": torch.tensor(2.0),
    }
    guide = AutoNormal(model, init_loc_fn=init_to_value(values=values), init_scale=0.1)
    guide()
    return signal_to_noise(guide)


def test_ratios():
    found = ratios()
    assert list(found) == ["w", "b"]  # zero means nothing to a noise
    np.testing.assert_allclose(found["w"], [[0, 1], [3, 4]], rtol=1e-5)
    np.testing.assert_allclose(found["b"], [0.5, 20], rtol=1e-5)


def test_multiplicative_noise_has_one_ratio_for_each_input():
    net = to_bayesian_(torch.nn.Linear(3, 5))
    guide = MultiplicativeNoiseGuide(net)
    guide.initialize(torch.ones(1, 3))
    with torch.no_grad():
        guide.alphas.weight_unconstrained.copy_(torch.tensor([[-2.0, 0.0, 2.0]]))
        guide.locs.weight_unconstrained.add_(guide.locs.weight_unconstrained.sign())  # far above epsilon
    alpha = torch.nn.functional.softplus(torch.tensor([-2.0, 0.0, 2.0]))
    found = signal_to_noise(guide)["weight"]
    np.testing.assert_allclose(found, alpha.rsqrt().expand(5, 3), rtol=1e-5)
