# SPDX-License-Identifier: Apache-2.0
"""Rates for means and for scales, in Pyro's optimizers and in parameter groups of torch."""

import inspect
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.nn import PyroModule, PyroParam, PyroSample
from pyro.optim import Adam, ClippedAdam, ExponentialLR
from torch import nn

from pyro_dvi.errors import ArgumentError, GuideError, UnsupportedError
from pyro_dvi.optim import learning_rates, parameter_groups
from pyro_dvi.optim.learning_rates import parameter_names


class Regression(PyroModule):
    """One Bayesian layer, a deterministic one with a parameter called scale, and BatchNorm."""

    def __init__(self):
        super().__init__()
        self.linear = PyroModule[nn.Linear](3, 1)
        self.linear.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, 3]).to_event(2))
        self.norm = nn.BatchNorm1d(3)
        self.scale = nn.Parameter(torch.ones(()))
        self.noise = PyroParam(torch.tensor(1.0), dist.constraints.positive)

    def forward(self, x, y=None):
        mean = self.scale * self.linear(self.norm(x)).squeeze(-1)
        with pyro.plate("data", 20, subsample_size=len(x)):
            return pyro.sample("obs", dist.Normal(mean, self.noise), obs=y)


X, Y = torch.randn(5, 3), torch.randn(5)
BASE, MULTIPLIED = 1e-2, 1e-1


def optimizer_rates(svi):
    """Learning rate of every parameter that the SVI has stepped, by its name in the store."""
    store = pyro.get_param_store()
    return {
        store.param_name(parameter): getattr(optimizer, "optimizer", optimizer).param_groups[0]["lr"]
        for parameter, optimizer in svi.optim.optim_objs.items()
    }


@pytest.mark.parametrize(
    ("guide_class", "scales"),
    [
        (AutoNormal, {"AutoNormal.scales.linear.weight"}),
        (AutoDiagonalNormal, {"AutoDiagonalNormal.scale"}),
        (AutoMultivariateNormal, {"AutoMultivariateNormal.scale"}),
        (AutoDelta, set()),
    ],
)
def test_scales_have_their_own_rate_under_svi(guide_class, scales):
    model = Regression()
    svi = SVI(model, guide_class(model), ClippedAdam(learning_rates(BASE)), Trace_ELBO())
    svi.step(X, Y)
    rates = optimizer_rates(svi)
    assert {name for name, rate in rates.items() if rate == MULTIPLIED} == scales
    assert {"scale", "noise", "norm$$$weight"} <= {name for name, rate in rates.items() if rate == BASE}


def test_guide_list_and_scheduler():
    model = Regression()
    guide = AutoGuideList(model)
    guide.append(AutoDiagonalNormal(pyro.poutine.block(model, expose=["linear.weight"])))
    optimizer = ExponentialLR(
        {"optimizer": torch.optim.SGD, "optim_args": learning_rates(BASE, momentum=0.5), "gamma": 0.5}
    )
    svi = SVI(model, guide, optimizer, Trace_ELBO())
    svi.step(X, Y)
    assert optimizer_rates(svi)["AutoGuideList.0.scale"] == MULTIPLIED
    assert optimizer_rates(svi)["noise"] == BASE


def test_hand_written_guide_by_pattern():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(w * x[:, 0], 1.0), obs=y)

    def guide(x, y):
        loc = pyro.param("w_loc", torch.zeros(()))
        pyro.sample("w", dist.Normal(loc, pyro.param("w_sigma", torch.ones(()), dist.constraints.positive)))

    svi = SVI(model, guide, Adam(learning_rates(BASE, scale_pattern=r"_sigma$")), Trace_ELBO())
    svi.step(X, Y)
    assert optimizer_rates(svi) == {"w_loc": BASE, "w_sigma": MULTIPLIED}


def test_learning_rates_has_one_argument_and_survives_pickling():
    rates = learning_rates(1e-3, 5, betas=(0.9, 0.99))
    # Two arguments would select Pyro's deprecated form, in which names arrive cut in pieces.
    assert list(inspect.signature(rates).parameters) == ["param_name"]
    again = pickle.loads(pickle.dumps(rates))
    for name in (
        "MeanFieldGuide.scales.fc.weight",
        "MeanFieldGuide.locs.fc.weight",
        "net.scale",
        "net.scales.0.weight",
    ):
        assert again(name) == rates(name)
    assert again("MeanFieldGuide.scales.fc.weight") == {"betas": (0.9, 0.99), "lr": pytest.approx(5e-3)}
    assert again("net.scales.0.weight")["lr"] == again("net.scale")["lr"] == 1e-3


@pytest.mark.parametrize("local", [False, True], ids=["global store", "module_local_params"])
@pytest.mark.parametrize("guide_class", [AutoNormal, AutoDiagonalNormal, AutoDelta])
def test_parameter_groups_hold_every_parameter_once(local, guide_class):
    with pyro.settings.context(module_local_params=local):
        model = Regression()
        guide = guide_class(model)
        guide(X, Y)
        module = Trace_ELBO()(model, guide)
        groups = parameter_groups(module, BASE, weight_decay=0.1)
        grouped = [id(p) for group in groups for p in group["params"]]
        assert sorted(grouped) == sorted({id(p) for p in module.parameters()})
        assert [group["name"] for group in groups] == (
            ["parameters"] if guide_class is AutoDelta else ["parameters", "scales"]
        )
        if guide_class is not AutoDelta:
            assert groups[1]["lr"] == MULTIPLIED
            assert len(groups[1]["params"]) == 1
        optimizer = torch.optim.Adam(groups)
        module(X, Y).backward()
        optimizer.step()
        assert all(group["weight_decay"] == 0.1 for group in optimizer.param_groups)


def test_parameter_groups_share_no_parameter_of_a_guide_that_holds_its_model():
    class Guide(PyroModule):
        def __init__(self, model):
            super().__init__()
            self.model = model
            self.scale = PyroParam(torch.ones(1, 3), dist.constraints.positive)

        def forward(self, x, y=None):
            pyro.sample("linear.weight", dist.Normal(torch.zeros(1, 3), self.scale).to_event(2))

    model = Regression()
    module = Trace_ELBO()(model, Guide(model))
    parameters, scales = parameter_groups(module, BASE)
    assert len(parameters["params"]) == len(list(model.parameters()))
    assert len(scales["params"]) == 1


def test_parameter_names_agree_with_the_store():
    model = Regression()
    guide = AutoNormal(model)
    Trace_ELBO().loss(model, guide, X, Y)
    expected = {name.replace("$$$", ".") for name in pyro.get_param_store()}
    names = dict([*parameter_names(model), *parameter_names(guide)])
    # The bias of a PyroModule[nn.Linear] is an ordinary, trained parameter.
    assert set(names) == expected
    for name, value in pyro.get_param_store().named_parameters():
        assert names[name.replace("$$$", ".")] is value


def test_frozen_parameters_are_left_out():
    model = Regression()
    model.linear.bias.requires_grad_(False)
    (group,) = parameter_groups(model, BASE)
    assert len(group["params"]) == len(list(model.parameters())) - 1


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: learning_rates(0.0), ArgumentError, "base must be a positive"),
        (lambda: learning_rates(1e-3, scale_multiplier=-1), ArgumentError, "scale_multiplier must be"),
        (lambda: learning_rates(float("nan")), ArgumentError, "base must be a positive"),
        (lambda: learning_rates("1e-3"), ArgumentError, "base must be a positive"),
        (
            lambda: parameter_groups(AutoNormal(Regression()), 1e-3),
            GuideError,
            "AutoNormal has no parameters before",
        ),
        (
            lambda: parameter_groups(Trace_ELBO()(lambda: None, AutoNormal(lambda: None)), 1e-3),
            UnsupportedError,
            "model of the ELBOModule is a function",
        ),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
