# SPDX-License-Identifier: Apache-2.0
"""Adam and SGD: which kernels run, and mistakes in their options."""

import pickle
import re
from functools import partial

import pyro
import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR

import pyro_dvi
from pyro_dvi.errors import ArgumentError
from pyro_dvi.optim import SGD, Adam, learning_rates

MAKERS = [Adam, SGD]


def moved(optim, names, gradient=0.0):
    """Where ones are after a step along a constant gradient."""
    parameters = [pyro.param(name, torch.ones(1)) for name in names]
    for parameter in parameters:
        parameter.grad = torch.full((1,), gradient)
    optim(parameters)
    return [float(parameter.detach()) for parameter in parameters]


@pytest.mark.parametrize("make", MAKERS)
def test_the_fused_kernels_of_torch_run(make):
    optim = make(learning_rates(0.1))
    moved(optim, ["a", "Guide.scales.b", "c"], gradient=1.0)
    assert len(set(optim.optim_objs.values())) == 2
    assert all(held.param_groups[0]["fused"] for held in optim.optim_objs.values())
    assert all(held["param_groups"][0]["fused"] is None for held in optim.get_state().values())


@pytest.mark.parametrize("make", MAKERS)
def test_optimizers_can_be_pickled(make):
    optim = make(learning_rates(0.1), {"clip_norm": 1.0}, scheduler=partial(ExponentialLR, gamma=0.9))
    assert pickle.loads(pickle.dumps(optim)).pt_optim_constructor is getattr(torch.optim, make.__name__)


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"lr": 0.1, "learning_rate": 1}, "learning_rate"),
        (learning_rates(0.1, momentums=0.9), "momentums"),
        ({"lr": -1.0}, "-1.0"),
        ([torch.zeros(2)], "dict of options"),
        (-0.1, "positive"),
        ("0.1", "got '0.1'"),
    ],
)
def test_mistaken_options(make, options, said):
    with pytest.raises((TypeError, ValueError), match=said):
        make(options)


@pytest.mark.parametrize("make", MAKERS)
def test_a_number_is_the_rate_of_means(make):
    pyro.clear_param_store()
    names = "AutoNormal.locs.w", "AutoNormal.scales.w"
    optimizer = make(0.02)
    assert [optimizer.pt_optim_args(name)["lr"] for name in names] == [0.02, 0.2]
    with pytest.raises(ArgumentError, match="dictionary of options"):
        pyro_dvi.VOGN(0.02)


@pytest.mark.parametrize(
    "scheduler",
    [0.9, lambda optimizer: 0.9, torch.optim.SGD, OneCycleLR],
    ids=["number", "function of a number", "optimizer", "without its options"],
)
def test_mistaken_schedulers(scheduler):
    with pytest.raises(ArgumentError, match="partial"):
        Adam({"lr": 0.1}, scheduler=scheduler)


def test_a_built_scheduler_says_how_to_pass_it():
    built = ExponentialLR(torch.optim.Adam([torch.zeros(1)]), 0.9)
    with pytest.raises(ArgumentError, match="partial"):
        Adam({"lr": 0.1}, scheduler=built)


@pytest.mark.parametrize("name", ["Adam", "SGD", "VOGN", "OGN", "IVON"])
@pytest.mark.parametrize(
    "call",
    [
        lambda make: make(lr=0.01),
        lambda make: make({}, lr=0.01),
        lambda make: make(),
        lambda make: make("0.01"),
        lambda make: make([torch.zeros(2)]),
        lambda make: make(torch.nn.Linear(2, 2).parameters(), lr=0.01),
    ],
    ids=["lr", "options and lr", "nothing", "a string", "parameters", "as in torch"],
)
def test_options_outside_of_a_dictionary_say_where_they_go(name, call):
    chapter = pyro_dvi.optim if hasattr(torch.optim, name) else pyro_dvi.natural_gradients
    torch_class = (
        f"torch.optim.{name}" if hasattr(torch.optim, name) else f"{chapter.__name__}.{name}Optimizer"
    )
    said = f"a dictionary of options: {name}({{'lr': ...}})"
    with pytest.raises(ArgumentError, match=re.escape(said)) as caught:
        call(getattr(chapter, name))
    assert str(caught.value).endswith(f"use {torch_class}.") and len(str(caught.value)) < 500
