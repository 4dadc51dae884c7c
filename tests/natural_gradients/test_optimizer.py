# SPDX-License-Identifier: Apache-2.0
"""What all optimizers of natural gradients share: what they remember, serve and refuse, and for how long they learn."""

import copy
import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_dvi.bayesian import classifier, to_bayesian_
from pyro_dvi.errors import ArgumentError, GuideError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import OGN, VOGN, VOGNOptimizer
from pyro_dvi.training import fit
from tests.natural_gradients.reference import M, N, data, model, state

pytestmark = pytest.mark.usefixtures("double")


def test_the_learning_rate_falls_over_the_length_that_fit_announces():
    x, y = data()
    batches = [(x[k : k + M], y[k : k + M]) for k in range(0, N, M)]
    guide = NaturalGradientGuide(model)
    optimizer = VOGN({})
    svi = SVI(model, guide, optimizer, loss=NaturalGradientELBO(kl_weight=0.1))
    history = fit(svi, batches, epochs=5, progress=False)
    assert optimizer.total_steps == 20
    before = guide.locs.w.detach().clone()
    svi.step(*batches[0])  # one step after the end
    assert torch.equal(before, guide.locs.w.detach())
    fit(svi, batches, epochs=5, progress=False, history=history)
    assert optimizer.total_steps == 40
    assert not torch.equal(before, guide.locs.w.detach())


def test_a_saved_optimizer_goes_on_as_if_never_stopped():
    x, y = data()

    def started():
        pyro.clear_param_store()
        guide = NaturalGradientGuide(model)
        guide.initialize(x, y)
        return guide, SVI(model, guide, VOGN({"lr": 0.05}), loss=NaturalGradientELBO(kl_weight=0.3))

    torch.manual_seed(0)
    guide, svi = started()
    for _ in range(5):
        svi.step(x, y)
    weights, memory = copy.deepcopy((guide.state_dict(), svi.optim.get_state()))
    torch.manual_seed(1)
    for _ in range(5):
        svi.step(x, y)
    expected = np.concatenate(state(guide))
    guide, svi = started()
    guide.load_state_dict(weights)
    svi.optim.set_state(memory)
    torch.manual_seed(1)
    for _ in range(5):
        svi.step(x, y)
    np.testing.assert_allclose(np.concatenate(state(guide)), expected, rtol=1e-12)


def test_parameters_that_are_no_latents_get_adam():
    class Net(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))
            self.w = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([2]).to_event(1))

        def forward(self, x, y=None):
            logits = x @ self.w + self.shift
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

    x, y = data()
    net = Net()
    guide = NaturalGradientGuide(net)
    svi = SVI(net, guide, VOGN({"deterministic_lr": 0.01}), loss=NaturalGradientELBO())
    svi.step(x, y)
    assert net.shift.item() == pytest.approx(math.copysign(0.01, net.shift.item()), rel=1e-4)


class Calls(TorchDispatchMode):
    """Count operator calls."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("optimizer", "most"), [(VOGN, 24), (OGN, 24), (IVON, 32)])
def test_all_sites_move_in_the_same_operator_calls(optimizer, most):
    def calls(depth: int) -> int:
        pyro.clear_param_store()
        net = nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth)))
        model = classifier(to_bayesian_(net), num_data=N)
        x, y = data()
        svi = SVI(model, NaturalGradientGuide(model), optimizer({}), NaturalGradientELBO())
        for _ in range(3):
            svi.step(x, y.long())
        parameters = [p for p in model.parameters() if p.requires_grad]
        svi.loss_and_grads(model, svi.guide, x, y.long())
        with Calls() as counted:
            svi.optim([*parameters, *svi.guide.parameters()])
        assert all(p.grad is None for p in svi.guide.precisions.parameters())
        return counted.number

    assert calls(1) == calls(4) <= most


def test_elbo_modules_train_with_the_torch_optimizer():
    x, y = data()
    with pyro.settings.context(module_local_params=True):
        net = pyro.nn.PyroModule[nn.Linear](2, 1)
        net.weight = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([1, 2]).to_event(2))
        net.bias = pyro.nn.PyroSample(dist.Normal(0.0, 1.0).expand([1]).to_event(1))

        class Model(pyro.nn.PyroModule):
            def __init__(self):
                super().__init__()
                self.net = net

            def forward(self, x, y=None):
                logits = self.net(x)[:, 0]
                with pyro.plate("data", len(x)):
                    return pyro.sample("y", dist.Bernoulli(logits=logits), obs=y)

        module_model = Model()
        guide = NaturalGradientGuide(module_model)
        guide.initialize(x, y)
        module = NaturalGradientELBO(kl_weight=0.5)(module_model, guide)
        optimizer = VOGNOptimizer(module.parameters(), lr=0.1)
        losses = []
        for _ in range(60):
            optimizer.zero_grad()
            loss = module(x, y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert sum(losses[-10:]) < sum(losses[:10])


# Mistakes ------------------------------------------------------------------------------------------------------


def test_another_optimizer_is_found_out():
    x, y = data()
    guide = NaturalGradientGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), loss=NaturalGradientELBO())
    svi.step(x, y)
    for _ in range(2):
        before = guide.locs.w.detach().clone()
        with pytest.raises(
            GuideError, match=r"no natural-gradient optimizer has used the gradients.*VOGN.*prepare"
        ):
            svi.step(x, y)
        assert torch.equal(guide.locs.w.detach(), before)
    elbo = svi.loss.__self__
    with pytest.raises(GuideError, match=r"Adam.*VOGN"):
        elbo.prepare(guide, svi.optim)
    with pytest.raises(GuideError, match=r"Adam.*VOGN"):
        fit(svi, [(x, y)], epochs=1, progress=False)
    optimizer = VOGN({})
    elbo.prepare(guide, optimizer)
    assert math.isfinite(SVI(model, guide, optimizer, loss=elbo).step(x, y))


def test_another_objective_is_found_out():
    x, y = data()
    guide = NaturalGradientGuide(model)
    elbo = NaturalGradientELBO()
    SVI(model, guide, VOGN({}), loss=elbo).step(x, y)
    with pytest.raises(GuideError, match="no squared gradients for them"):
        SVI(model, guide, VOGN({}), loss=pyro.infer.Trace_ELBO()).step(x, y)


def test_another_guide_is_found_out():
    x, y = data()
    with pytest.raises(GuideError, match="NaturalGradientGuide"):
        NaturalGradientELBO().loss(model, MeanFieldGuide(model), x, y)


def test_a_temperature_of_zero():
    x, y = data()
    guide = NaturalGradientGuide(model)
    with pytest.raises(ArgumentError, match="is divided by kl_weight"):
        NaturalGradientELBO(kl_weight=0.0).loss_and_grads(model, guide, x, y)


def test_counts_that_are_never_inflated_train_as_poisson_counts():
    """Zero-inflated distributions of Pyro give their batch shape as a plain tuple."""
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    counts = torch.tensor([0.0, 1.0, 3.0, 0.0, 2.0, 1.0])

    def trained(likelihood):
        def model(x, y=None):
            w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
            with pyro.plate("data", 20, subsample_size=len(x)):
                return pyro.sample("y", likelihood((x @ w).exp()), obs=y)

        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        svi = SVI(model, NaturalGradientGuide(model), VOGN({}), NaturalGradientELBO())
        return [svi.step(x, counts) for _ in range(3)], svi.guide.median()["w"]

    losses, loc = trained(dist.Poisson)
    inflated, same_loc = trained(lambda rate: dist.ZeroInflatedPoisson(rate, gate=torch.zeros(())))
    assert inflated == pytest.approx(losses)
    torch.testing.assert_close(same_loc, loc)
