# SPDX-License-Identifier: Apache-2.0
"""Launched updates of natural gradients equal ordinary ones; those without a fixed form stay ordinary."""

import copy

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.core.launch import LAUNCHING
from pyro_dvi.natural_gradients.updates import AsPrinted
from pyro_dvi.objectives import Captured

X = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


@pytest.fixture
def device(request):
    """Give a device whose updates are launched."""
    name = request.config.getoption("--device")
    device = torch.device("cuda", 0) if name == "cuda" else torch.device("cpu")
    known = device.type in LAUNCHING
    LAUNCHING.add(device.type)
    yield device
    if not known:
        LAUNCHING.discard(device.type)


def svi_of(optimizer, device, guide=dvi.NaturalGradientGuide, temperature=0.1, **priors):
    """Return a training with batch normalisation, whose parameters are updated with Adam."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    model = dvi.classifier(dvi.to_bayesian_(net, **priors), num_data=60)
    if "formulation" in optimizer.pt_optim_args:  # as printed, where the temperature is the KL weight
        temperature = 1.0
    elbo = Captured(dvi.NaturalGradientELBO(temperature=temperature, kl_weight=0.5), after=1)
    return SVI(model, guide(model), optimizer, loss=elbo)


def steps(svi, number, device):
    x, y = X.to(device), Y.to(device)
    return [svi.step(x[k % 3 * 20 :][:20], y[k % 3 * 20 :][:20]) for k in range(number)]


def close(found, expected, device):
    """Bitwise equal; on a GPU, a number is rounded in another place if it is a tensor."""
    exact = device.type == "cpu"
    torch.testing.assert_close(found, expected, rtol=0 if exact else 1e-5, atol=0 if exact else 1e-5)


def launches(svi):
    return [one for one in svi.optim._launches._captured.values() if one is not None]


CASES = {
    "VOGN": lambda: dvi.VOGN({}),
    "VOGN, damped, unbounded": lambda: dvi.VOGN({"damping": 0.1, "max_step": None, "total_steps": 40}),
    "VOGN, started": lambda: dvi.VOGN({"initial_curvature": 0.2, "data_augmentation": 2.0}),
    "OGN": lambda: dvi.OGN({"betas": (0.8, 0.9), "warmup_steps": 3}),
    "VOGN, as printed": lambda: dvi.VOGN({"formulation": AsPrinted(initial_batches=3)}),
    "IVON": lambda: dvi.IVON({"total_steps": 30}),
    "IVON, damped": lambda: dvi.IVON({"damping": 0.05, "max_step": None, "lr": 1.0}),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", CASES)
def test_one_update_equals_an_ordinary_one(name, device):
    svi = svi_of(CASES[name](), device)
    steps(svi, 7, device)
    svi.optim._launches.take = lambda *_: False
    with pyro.poutine.trace(param_only=True) as trace:
        svi.loss_and_grads(svi.model, svi.guide, X.to(device), Y.to(device))
    parameters = [site["value"].unconstrained() for site in trace.trace.nodes.values()]
    (optimizer,) = set(svi.optim.optim_objs.values())
    before = [p.detach().clone() for p in parameters]
    gradients = [None if p.grad is None else p.grad.clone() for p in parameters]
    state, results = copy.deepcopy(optimizer.state_dict()), []
    for fixed in (False, True):
        optimizer.load_state_dict(copy.deepcopy(state))
        with torch.no_grad():
            for p, value, gradient in zip(parameters, before, gradients, strict=True):
                p.copy_(value)
                p.grad = None if gradient is None else gradient.clone()
        if fixed:
            update = optimizer.fixed_update()
            with torch.no_grad():
                update.run(torch.tensor(update.numbers(), dtype=torch.float64, device=device))
            update.finish()
        else:
            optimizer.step()
        memory = {
            f"{k} {name}": torch.as_tensor(value, dtype=torch.float64)
            for k, entry in optimizer.state_dict()["state"].items()
            for name, value in entry.items()
        }
        values = {str(k): p.detach().clone() for k, p in enumerate(parameters)}
        results.append({**memory, **values, "rate": torch.tensor(optimizer.rate_factor)})
        assert all(site.precision.grad is None for site in svi.guide.natural_step.sites)
    close(results[1], results[0], device)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", CASES)
def test_training_with_launches_equals_one_without(name, device):
    losses, others = [], []
    for launched in (False, True):
        svi = svi_of(CASES[name](), device)
        if not launched:
            svi.optim._launches.take = lambda *_: False
        losses.append(steps(svi, 16, device))
        others.append({name: s["state"][0]["step"] for name, s in svi.optim.get_state().items()})
    assert len(launches(svi)) == 1
    # Launches leave constants of the recorded step alone; other initial steps have a recording of their own.
    assert len(svi.loss_and_grads.__self__.recordings) == (2 if "printed" in name else 1)
    close(losses[1], losses[0], device)
    assert others[0] == others[1]


def test_a_learned_prior_scale(device):
    """The prior of a step comes from the step, at the same address each time."""
    losses = []
    for launched in (False, True):
        svi = svi_of(dvi.VOGN({}), device, temperature=1.0, prior_scale=dvi.bayesian.LearnedScale())
        if not launched:
            svi.optim._launches.take = lambda *_: False
        losses.append(steps(svi, 20, device))
    assert launches(svi)
    close(losses[1], losses[0], device)


ORDINARY = {
    "NoisyKFAC": (lambda: dvi.NoisyKFAC({}), dvi.KroneckerGuide),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_other_updates_stay_ordinary(name, device):
    optimizer, guide = ORDINARY[name]
    svi = svi_of(optimizer(), device, guide, temperature=1.0)
    steps(svi, 12, device)
    assert not launches(svi)
