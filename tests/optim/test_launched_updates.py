# SPDX-License-Identifier: Apache-2.0
"""Updates that are launched equal ordinary ones, and are taken only where memory is the same as before."""

import copy
import pickle
from functools import partial

import pyro
import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR

from pyro_dvi.core.launch import LAUNCHING
from pyro_dvi.optim import Adam, JointOptim, launched_updates, learning_rates

NAMES = ("X.locs.w", "X.scales.w", "X.locs.b")


@pytest.fixture
def device(request):
    """Give a device that has fused optimizers, which the emulated one has not."""
    return torch.device("cuda", 0) if request.config.getoption("--device") == "cuda" else torch.device("cpu")


@pytest.fixture(autouse=True)
def _launching(device):
    known = device.type in LAUNCHING
    LAUNCHING.add(device.type)
    yield
    if not known:
        LAUNCHING.discard(device.type)


class Training:
    """Parameters in Pyro's store, and gradients that are always in the same memory."""

    def __init__(self, optimizer, device):
        pyro.clear_param_store()
        torch.manual_seed(0)
        for name, shape in zip(NAMES, ((5, 3), (3,), ()), strict=True):
            pyro.param(name, torch.randn(shape, device=device))
        self.gradients = [torch.zeros_like(p) for p in self.parameters]
        self.optimizer, self.count = optimizer, 0

    @property
    def parameters(self):
        return [pyro.get_param_store()._params[name] for name in NAMES]

    def steps(self, number, missing=()):
        for _ in range(number):
            self.count += 1
            for k, (p, g) in enumerate(zip(self.parameters, self.gradients, strict=True)):
                g.copy_(p.detach() * 2 + self.count)
                p.grad = None if k in missing else g
            self.optimizer(self.parameters)
            assert all(p.grad is None for p in self.parameters)
        return self

    @property
    def launches(self):
        return [one for one in self.optimizer._launches._captured.values() if one is not None]


def both(run, make, device):
    """Run a training with and without launches, and return both."""
    results = []
    for launches in (False, True):
        training = Training(make(), device)
        if not launches:
            training.optimizer._launches.take = lambda *_: False
        results.append(run(training) or training)
    ordinary, launched = results
    assert not ordinary.launches
    for one, other in zip(ordinary.parameters, launched.parameters, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-6, atol=1e-7)
    return launched


MAKERS = {
    "one rate": lambda: Adam({"lr": 0.01}),
    "two rates": lambda: Adam(learning_rates(0.01, weight_decay=1e-3, betas=(0.8, 0.95))),
    "AdamW": lambda: JointOptim(torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "amsgrad": lambda: Adam({"lr": 0.01, "amsgrad": True}),
    "clipped": lambda: Adam({"lr": 0.01}, {"clip_norm": 1.0}),
    "clipped together": lambda: Adam({"lr": 0.01}, {"max_norm": 1.0}),
}


@pytest.mark.parametrize("name", MAKERS)
def test_launched_updates_equal_ordinary_ones(name, device):
    launched = both(lambda t: t.steps(12), MAKERS[name], device)
    assert len(launched.launches) == 1


def test_learning_rates_may_change(device):
    def run(training):
        for _ in range(5):
            training.steps(3)
            training.optimizer.step()
        for optimizer in set(training.optimizer.optim_objs.values()):
            optimizer.optimizer.param_groups[0]["lr"] = 0.5
        training.steps(2)

    rates = partial(Adam, learning_rates(0.1), scheduler=partial(ExponentialLR, gamma=0.5))
    assert len(both(run, rates, device).launches) == 1
    both(run, partial(Adam, 0.1, scheduler=partial(CosineAnnealingLR, T_max=4)), device)


def test_other_options_are_another_update(device):
    def run(training):
        training.steps(5)
        for optimizer in set(training.optimizer.optim_objs.values()):
            optimizer.param_groups[0]["weight_decay"] = 0.3
        training.steps(5)

    assert len(both(run, lambda: Adam({"lr": 0.01}), device).launches) == 2


def test_parameters_without_gradients_stay(device):
    def run(training):
        training.steps(5, missing=(1,))
        training.steps(5)
        training.steps(5, missing=(1, 2))

    assert len(both(run, lambda: Adam({"lr": 0.01}), device).launches) >= 2


def test_moved_memory_is_noticed(device):
    def run(training):
        training.steps(5)
        training.parameters[0].data = training.parameters[0].data.clone()
        training.steps(5)
        training.gradients = [g.clone() for g in training.gradients]
        training.steps(5)
        pyro.get_param_store()["X.locs.b"] = torch.ones((), device=device)
        training.steps(5)

    assert len(both(run, lambda: Adam({"lr": 0.01}), device).launches) >= 3


def test_states_are_those_of_ordinary_updates(device):
    states = []

    def run(training):
        training.steps(8)
        state = copy.deepcopy(training.optimizer.get_state())
        states.append({name: one["state"][0] for name, one in state.items()})
        training.steps(4)
        training.optimizer.set_state(state)
        training.steps(4)

    both(run, lambda: Adam({"lr": 0.01}), device)
    for name in NAMES:
        assert float(states[0][name]["step"]) == float(states[1][name]["step"]) == 8
        for key in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(states[1][name][key], states[0][name][key], rtol=1e-6, atol=1e-7)


def test_copies_hold_no_launches(device):
    training = Training(Adam({"lr": 0.01}), device).steps(6)
    assert training.launches
    for other in (copy.deepcopy(training.optimizer), pickle.loads(pickle.dumps(training.optimizer))):
        assert not other._launches._captured


ORDINARY = {
    "RMSprop": lambda: JointOptim(torch.optim.RMSprop, {"lr": 0.01}),
    "SGD": lambda: JointOptim(torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    "not fused": lambda: JointOptim(torch.optim.Adam, {"lr": 0.01, "foreach": True}),
    "rate in a tensor": lambda: JointOptim(torch.optim.Adam, {"lr": torch.tensor(0.01)}),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_other_optimizers_take_ordinary_steps(name, device):
    if name == "rate in a tensor" and device.type == "cuda":
        pytest.skip("torch wants it on the device")
    assert not Training(ORDINARY[name](), device).steps(6).launches


@pytest.mark.parametrize("before", [2, 6])
def test_hooks_run(before, device):
    training, seen = Training(Adam({"lr": 0.01}), device).steps(before), []
    (optimizer,) = set(training.optimizer.optim_objs.values())
    optimizer.register_step_post_hook(lambda *_: seen.append(1))
    training.steps(5)
    assert len(seen) == 5 and len(training.launches) == (before == 6)


def test_memory_that_never_recurs_is_not_captured(device):
    training = Training(Adam({"lr": 0.01}), device)
    kept = []
    for _ in range(10):
        training.gradients = [torch.zeros_like(p) for p in training.parameters]
        kept.append(training.gradients)
        training.steps(1)
    assert not training.launches


def test_a_cleared_state_is_noticed(device):
    training = Training(Adam({"lr": 0.01}), device).steps(8)
    (optimizer,) = set(training.optimizer.optim_objs.values())
    optimizer.state.clear()
    training.steps(1)
    assert {float(state["step"]) for state in optimizer.state.values()} == {1.0}


def test_memory_that_recurs_for_a_while_is_captured_a_bounded_number_of_times(device, monkeypatch):
    captures, capture = [], launched_updates._captured

    def counted(*parts):
        captures.append(parts)
        return capture(*parts)

    monkeypatch.setattr(launched_updates, "_captured", counted)
    training = Training(Adam({"lr": 0.01}), device)
    kept = []
    for _ in range(40):
        training.gradients = [torch.zeros_like(p) for p in training.parameters]
        kept.append(training.gradients)
        training.steps(3)
    assert len(captures) == 32 and len(training.launches) == 8
