# SPDX-License-Identifier: Apache-2.0
"""Launched updates of natural gradients equal ordinary ones to rounding; those without a fixed form stay ordinary."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.core.launch import LAUNCHING
from pyro_dvi.core.triton_kernels import triton_kernel
from pyro_dvi.natural_gradients import fixed_update
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
    elbo = Captured(dvi.NaturalGradientELBO(temperature=temperature, kl_weight=0.5), after=1)
    return SVI(model, guide(model), optimizer, loss=elbo)


def steps(svi, number, device):
    x, y = X.to(device), Y.to(device)
    return [svi.step(x[k % 3 * 20 :][:20], y[k % 3 * 20 :][:20]) for k in range(number)]


def launches(svi):
    return [one for one in svi.optim._launches._captured.values() if one is not None]


CASES = {
    "VOGN": lambda: dvi.VOGN({}),
    "VOGN, damped, unbounded": lambda: dvi.VOGN({"damping": 0.1, "max_step": None, "total_steps": 40}),
    "VOGN, started": lambda: dvi.VOGN({"initial_curvature": 0.2, "data_augmentation": 2.0}),
    "OGN": lambda: dvi.OGN({"betas": (0.8, 0.9), "warmup_steps": 3}),
    "IVON": lambda: dvi.IVON({"total_steps": 30}),
    "IVON, damped": lambda: dvi.IVON({"damping": 0.05, "max_step": None, "lr": 1.0}),
}


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
    torch.testing.assert_close(results[1], results[0], rtol=2e-5, atol=1e-7)


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
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)
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
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=0)


ORDINARY = {
    "as printed": (lambda: dvi.VOGN({"formulation": AsPrinted()}), dvi.NaturalGradientGuide),
    "NoisyKFAC": (lambda: dvi.NoisyKFAC({}), dvi.KroneckerGuide),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_other_updates_stay_ordinary(name, device):
    optimizer, guide = ORDINARY[name]
    svi = svi_of(optimizer(), device, guide, temperature=1.0)
    steps(svi, 12, device)
    assert not launches(svi)


def test_the_kernel_in_the_interpreter():
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of earlier ones needs an earlier NumPy
    command = [sys.executable, "-W", "ignore", "-m", "tests.natural_gradients.test_fixed_update"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr


def check_in_the_interpreter() -> None:
    """Compare the kernel with torch functions; in a process of its own, because Triton reads the variable once."""
    cpu = torch.device("cpu")
    kernel = triton_kernel("pyro_dvi.natural_gradients.update_kernel:update", cpu, lambda found: (X, X))
    numbers = torch.tensor([0.1, 0.3, 2.0, 0.7, 0.2, 0.9, 0.4, 0.5, 0.9], dtype=torch.float64)
    for size in (1, 7, 1024, 1500):
        for ivon in (False, True):
            for one in ((), (6,), (7,), (6, 7)):  # priors with a single element
                for bound in (0.01, float("inf")):
                    numbers[6] = bound
                    tensors = [torch.randn(1 if k in one else size) for k in range(8)]
                    for k in (1, 5, 7):
                        tensors[k] = tensors[k].abs() + 0.1
                    others = [tensor.clone() for tensor in tensors]
                    kernel(tensors, numbers, 0.7, ivon)
                    fixed_update.updated(others, numbers, 0.7, ivon)
                    torch.testing.assert_close(tensors, others, rtol=1e-5, atol=1e-6)
    found, expected = fixed_update._checked(kernel, cpu)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


if __name__ == "__main__":
    check_in_the_interpreter()
