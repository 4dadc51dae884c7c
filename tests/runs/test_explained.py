# SPDX-License-Identifier: Apache-2.0
"""Errors of Pyro in a run of a model name what to do."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.nn import PyroModule
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import ModelError

X = torch.linspace(-1, 1, 8)[:, None]


class Twice(PyroModule):
    def __init__(self):
        super().__init__()
        self.net = dvi.to_bayesian_(nn.Linear(1, 1))

    def forward(self, x, y=None):
        return odd(self.net, x, y)


def odd(net, x, y=None):
    mean = (net(x) - net(-x)).squeeze(-1)
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(mean, 0.1), obs=y)


@pytest.mark.slow
def test_a_network_called_twice_in_a_function_is_told_how_to_be_called_twice():
    net, data = dvi.to_bayesian_(nn.Linear(1, 1)), [(X, X[:, 0])]
    with pytest.raises(ModelError, match=r"'weight'.* draws its weights again.*PyroModule.*self\.net = net"):
        dvi.VariationalLaplace().fit(lambda x, y=None: odd(net, x, y), data, 1, progress=False)
    posterior = dvi.VariationalLaplace().fit(Twice(), data, 120, lr_schedule=None, progress=False)
    # odd(x) = 2 w x, so that w is 0.5
    torch.testing.assert_close(posterior.predict(X).mean, X[:, 0], atol=0.05, rtol=0)
