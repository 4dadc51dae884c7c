# SPDX-License-Identifier: Apache-2.0
"""Small problems that the tests of training share."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoNormal
from pyro.nn import PyroModule, PyroSample
from pyro.optim import Adam
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.optim import learning_rates, parameter_groups
from pyro_dvi.variational_laplace.taylor import TaylorELBO

NUM_DATA, BATCH = 24, 8


class Net(PyroModule):
    """A Bayesian layer after BatchNorm, softplus and a deterministic layer."""

    def __init__(self, dtype=torch.float32, num_data=NUM_DATA):
        super().__init__()
        self.num_data = num_data
        self.first = nn.Linear(2, 4).to(dtype)
        self.norm = nn.BatchNorm1d(4).to(dtype)
        self.last = PyroModule[nn.Linear](4, 1)
        # Buffers, so that the priors move with the module.
        self.last.register_buffer("zero", torch.zeros((), dtype=dtype), persistent=False)
        self.last.register_buffer("one", torch.ones((), dtype=dtype), persistent=False)
        self.last.weight = PyroSample(
            lambda layer: dist.Normal(layer.zero, layer.one).expand([1, 4]).to_event(2)
        )
        self.last.bias = PyroSample(lambda layer: dist.Normal(layer.zero, layer.one).expand([1]).to_event(1))

    def forward(self, x, y=None):
        mean = self.last(nn.functional.softplus(self.norm(self.first(x)))).squeeze(-1)
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("obs", dist.Normal(mean, 0.3), obs=y)


def data(dtype=torch.float32):
    x = torch.randn(NUM_DATA, 2, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x, torch.sin(2 * x[:, 0]) + 0.5 * x[:, 1]


def shuffled(dtype=torch.float32, seed=7):
    return DataLoader(
        TensorDataset(*data(dtype)),
        batch_size=BATCH,
        shuffle=True,
        generator=torch.Generator().manual_seed(seed),
    )


def sequence(dtype=torch.float32):
    """The same batches in the same order, every pass."""
    x, y = data(dtype)
    return list(zip(x.split(BATCH), y.split(BATCH), strict=True))


METHODS = {
    "AutoNormal + Trace_ELBO": (AutoNormal, Trace_ELBO),
    "MeanFieldGuide + TaylorELBO": (MeanFieldGuide, TaylorELBO),
}


def svi_of(method, dtype=torch.float32, optimizer=None, seed=0, elbo=None):
    """Fresh model, guide, optimizer and ELBO."""
    torch.manual_seed(seed)
    guide_class, elbo_class = METHODS[method]
    model = Net(dtype)
    return SVI(model, guide_class(model), optimizer or Adam(learning_rates(0.01)), elbo or elbo_class())


def module_of(method, dtype=torch.float32, seed=0):
    """Fresh ELBOModule and torch optimizer."""
    torch.manual_seed(seed)
    guide_class, elbo_class = METHODS[method]
    model = Net(dtype)
    guide = guide_class(model)
    guide(*sequence(dtype)[0])
    module = elbo_class()(model, guide)
    return module, torch.optim.Adam(parameter_groups(module, 0.01))


def weights_of(target):
    """Copies of all parameters and buffers of model and guide."""
    return {
        f"{role}.{name}": value.detach().clone()
        for role in ("model", "guide")
        for name, value in getattr(target, role).state_dict().items()
        if torch.is_tensor(value) and not name.endswith("_extra_state")
    }


def same(first, second):
    return set(first) == set(second) and all(torch.equal(first[name], second[name]) for name in first)


BOTH = pytest.mark.parametrize("method", METHODS)


def fresh_start():
    """As in a new process: an empty store, other random states."""
    pyro.clear_param_store()
    pyro.set_rng_seed(999)


class FunctionalProblem:
    """Model and guide as functions: parameters in Pyro's store only, a network that no module lists."""

    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Softplus())

        def model(x, y=None):
            pyro.module("net", self.net)
            w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
            noise = pyro.param("noise", torch.tensor(0.5), dist.constraints.positive)
            with pyro.plate("data", 24, subsample_size=len(x)):
                pyro.sample("obs", dist.Normal(self.net(x) @ w, noise), obs=y)

        def guide(x, y=None):
            loc = pyro.param("loc", torch.randn(4))
            scale = pyro.param("scale", torch.full((4,), 0.1), dist.constraints.softplus_positive)
            pyro.sample("w", dist.Normal(loc, scale).to_event(1))

        self.svi = SVI(model, guide, Adam(learning_rates(0.01, scale_pattern="^scale$")), Trace_ELBO())

    def weights(self):
        return {
            **{name: value.detach().clone() for name, value in self.net.state_dict().items()},
            **{name: value.detach().clone() for name, value in pyro.get_param_store().items()},
        }


class Interrupting:
    """Validation, or a loader, that is interrupted once."""

    def __init__(self, inner, at):
        self.inner, self.at, self.count = inner, at, 0

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def __iter__(self):
        for batch in self.inner:
            self.count += 1
            if self.count == self.at:
                raise KeyboardInterrupt
            yield batch
