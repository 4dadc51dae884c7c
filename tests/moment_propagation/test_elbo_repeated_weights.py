# SPDX-License-Identifier: Apache-2.0
"""Networks that are applied twice and layers that share a weight: moments drop a covariance, and say so."""

import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning

X = torch.linspace(-1, 1, 24).reshape(6, 4)
Y = torch.zeros(6, 1)


def pair_head() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1))


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.b = pair_head()

    def forward(self, x):
        return self.b(x[:, :2]) - self.b(x[:, 2:])


class Stepped(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(2, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.cell(x[:, 2:], self.cell(x[:, :2], torch.zeros(len(x), 3))))


class AttentionTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(2, 1, batch_first=True)

    def forward(self, x):
        x = x.reshape(-1, 2, 2)
        for _ in range(2):
            x = self.attention(x, x, x)[0]
        return x.mean((1, 2))[:, None]


def tied() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    net[2].weight = net[0].weight
    return net


def started(net, guide_class=dvi.MeanFieldGuide):
    model = dvi.regressor(
        dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in, include=nn.Module), num_data=6, noise_scale=1.0
    )
    guide = guide_class(model)
    guide.initialize(X, Y)
    return model, guide


REPEATED = {
    "a siamese network": (Siamese, "'net.b.0.weight', 'net.b.0.bias', 'net.b.2.weight', 'net.b.2.bias'"),
    "tied layers": (tied, "'net.0.weight' along two paths"),
    "a cell in a loop": (Stepped, "'net.cell.weight_ih', 'net.cell.weight_hh'"),
    "attention twice": (AttentionTwice, "'net.attention.in_proj_weight'"),
}


@pytest.mark.parametrize("name", REPEATED)
def test_a_weight_that_is_used_twice_is_named_once(name):
    make, message = REPEATED[name]
    model, guide = started(make())
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), loss=dvi.MomentPropagationELBO())
    with pytest.warns(DviWarning, match=message) as caught:
        for _ in range(3):
            svi.step(X, Y)
    assert len(caught) == 1
    with pytest.warns(DviWarning, match=message) as caught:
        dvi.predict(model, guide, X, method=dvi.Moments(), batch_size=2)
    assert len(caught) == 1


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.steps, self.out = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, x):
        return self.out(self.steps(x.reshape(-1, 2, 2))[0][:, -1])


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        h = self.a(x).relu()
        return self.out(h + self.b(h).relu_())


class Heads(nn.Module):
    """One parameter that holds the weights of two linear maps, taken apart in several ways."""

    def __init__(self):
        super().__init__()
        self.maps = nn.Parameter(torch.randn(2, 4, 4) / 2)

    def forward(self, x):
        h = x @ self.maps[0].T + x @ self.maps[1, :, :]
        return h.sum(-1, keepdim=True)


@pytest.mark.parametrize("make", [Recurrent, Residual, Heads, lambda: nn.Linear(4, 1)])
def test_one_use_of_each_weight_is_no_repetition(make):
    model, guide = started(make())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dvi.MomentPropagationELBO().loss(model, guide, X, Y)
        dvi.predict(model, guide, X, method=dvi.Moments())


def test_a_network_for_two_data_sets_is_no_repetition():
    """Expected log-likelihoods add up, whatever the covariance of outputs for different observations."""

    class TwoDataSets(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.net = dvi.to_bayesian_(nn.Linear(4, 1), prior_scale=1.0)

        def forward(self, x, y=None):
            for name in ("first", "second"):
                mean = self.net(x)[:, 0]
                with pyro.plate(f"{name}_data", len(x)):
                    pyro.sample(name, dist.Normal(mean, 1.0), obs=None if y is None else y[:, 0])

    model = TwoDataSets()
    guide = dvi.MeanFieldGuide(model)
    guide.initialize(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        dvi.MomentPropagationELBO().loss(model, guide, X, Y)


def test_the_covariance_that_is_dropped_is_as_large_as_the_warning_says():
    """f(a) - f(b) of almost equal inputs is almost certain; independent uses are far from it."""
    torch.manual_seed(0)
    x = torch.cat([X[:, :2], X[:, :2] + 1e-3], -1)
    model, guide = started(Siamese())
    sampled = dvi.predict(model, guide, x, method=dvi.Samples(200), seed=0)
    with pytest.warns(DviWarning, match=r"too large for differences f\(a\) - f\(b\)"):
        propagated = dvi.predict(model, guide, x, method=dvi.Moments())
    assert (propagated.variance - 1 > 100 * sampled.epistemic).all()


@pytest.mark.parametrize("guide_class", [dvi.MeanFieldGuide, dvi.MultiplicativeNoiseGuide])
def test_tied_layers_have_the_loss_of_one_weight_that_is_written_twice(guide_class):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False))
    net[2].weight = net[0].weight
    start = net[0].weight.detach().clone()

    def written(x, y=None):
        w = pyro.sample("0.weight", dist.Normal(torch.zeros(4, 4), 1.0).to_event(2))
        with pyro.plate("data", len(x)):
            f = F.linear(F.linear(x, w).tanh(), w)
            return pyro.sample("obs", dist.Normal(f, 1.0).to_event(1), obs=y)

    class Module(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.net = dvi.to_bayesian_(net, prior_scale=1.0)

        def forward(self, x, y=None):
            f = self.net(x)
            with pyro.plate("data", len(x)):
                return pyro.sample("obs", dist.Normal(f, 1.0).to_event(1), obs=y)

    losses, gradients, means = [], [], []
    for model in (Module(), written):
        pyro.clear_param_store()
        guide = guide_class(model)
        guide.initialize(X, X)
        with torch.no_grad():
            next(guide.locs.parameters()).copy_(start)
        with pytest.warns(DviWarning, match=r"0.weight' along two paths"):
            loss = dvi.MomentPropagationELBO().differentiable_loss(model, guide, X, X)
        gradients.append(torch.autograd.grad(loss, list(guide.parameters())))
        with pytest.warns(DviWarning, match=r"0.weight' along two paths"):
            means.append(dvi.predict(model, guide, X, method=dvi.Moments()))
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    torch.testing.assert_close(means[0].mean, means[1].mean)
    torch.testing.assert_close(means[0].variance, means[1].variance)


def test_tied_layers_can_be_compared_with_sampling():
    model, guide = started(tied())
    report = dvi.diagnostics.compare_with_sampling(model, guide, X, num_samples=50, seed=0)
    assert report.rows
