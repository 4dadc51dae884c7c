# SPDX-License-Identifier: Apache-2.0
"""Schedules of the learning rate move as Pyro's do."""

import copy
from functools import partial

import pyro
import pytest
import torch
from pyro.optim import PyroLRScheduler
from torch.optim import lr_scheduler as torch_schedulers

from pyro_dvi.optim import Adam, learning_rates

SCHEDULES = {
    "ExponentialLR": {"gamma": 0.8},
    "StepLR": {"step_size": 2},
    "CosineAnnealingLR": {"T_max": 7, "eta_min": 1e-3},
    "OneCycleLR": {"max_lr": 0.1, "total_steps": 20},
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
}


def scheduler_of(name):
    return partial(getattr(torch_schedulers, name), **SCHEDULES[name])


def pyros(name, options):
    given = {"optimizer": torch.optim.Adam, "optim_args": options, **SCHEDULES[name]}
    return PyroLRScheduler(getattr(torch_schedulers, name), given)


def rates(optim):
    """Present learning rate by name."""
    return {name: held["optimizer"]["param_groups"][0]["lr"] for name, held in optim.get_state().items()}


def stepped(optim, names, times=1, move=True):
    """Step parameters of these names along gradients that depend on name and value; move the schedule each time."""
    for _ in range(times):
        parameters = [pyro.param(name, torch.ones(2, dtype=torch.float64)) for name in names]
        for size, parameter in enumerate(parameters):
            parameter.grad = parameter.detach() + size
        optim(parameters)
        for parameter in parameters:
            parameter.grad = None
        if move:
            optim.step()


NAMES = ["Guide.locs.a", "Guide.scales.a", "free"]


def values():
    return {name: value.detach().clone() for name, value in pyro.get_param_store().named_parameters()}


@pytest.mark.parametrize("name", SCHEDULES)
def test_numbers_and_rates_are_those_of_pyro(name):
    found = []
    for optim in (
        Adam(learning_rates(0.01), scheduler=scheduler_of(name)),
        pyros(name, learning_rates(0.01)),
    ):
        pyro.clear_param_store()
        stepped(optim, NAMES, 8)
        found.append((values(), rates(optim)))
    (ours, our_rates), (theirs, their_rates) = found
    assert our_rates == their_rates
    for parameter, value in ours.items():
        torch.testing.assert_close(value, theirs[parameter], rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", ["ExponentialLR", "OneCycleLR", "CosineAnnealingLR"])
@pytest.mark.parametrize("taken_over", ["ours", "Pyro's"])
def test_states_are_exchanged_with_pyro(name, taken_over):
    through = Adam(learning_rates(0.01), scheduler=scheduler_of(name))
    stepped(through, NAMES, 8)
    expected = values(), rates(through)
    pyro.clear_param_store()
    ours, theirs = (
        Adam(learning_rates(0.01), scheduler=scheduler_of(name)),
        pyros(name, learning_rates(0.01)),
    )
    before, after = (ours, theirs) if taken_over == "Pyro's" else (theirs, ours)
    stepped(before, NAMES, 4)
    after.set_state(copy.deepcopy(before.get_state()))
    stepped(after, NAMES, 4)
    assert rates(after) == pytest.approx(expected[1], rel=1e-14)
    assert len(set(ours.optim_objs.values())) == len(set(rates(ours).values()))
    for parameter, value in values().items():
        torch.testing.assert_close(value, expected[0][parameter], rtol=1e-12, atol=0)


def test_copies_keep_their_place_in_the_schedule():
    optim = Adam(learning_rates(0.01), scheduler=scheduler_of("ExponentialLR"))
    stepped(optim, NAMES, 3)
    copied = copy.deepcopy(optim)
    stepped(copied, NAMES, 1)
    stepped(optim, NAMES, 1)
    assert rates(copied) == rates(optim)
