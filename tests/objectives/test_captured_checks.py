# SPDX-License-Identifier: Apache-2.0
"""Replays fail where ordinary steps do, and follow what the model finds in classes, settings, sets and modules."""

import warnings
from argparse import Namespace
from collections import UserList
from types import ModuleType

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta

import pyro_dvi as dvi
from pyro_dvi.errors import NonFiniteError
from pyro_dvi.objectives import Captured
from pyro_dvi.objectives.recorded_step import RecordedStep

X = torch.linspace(-1, 1, 20)
Y = 2 * X
ONES, ZEROS = torch.ones(20), torch.zeros(20)


def losses_of(model, data, capture, epochs=3, change=None, step=50):
    """Train a point estimate; ``change`` is called once, between two epochs."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    svi = SVI(model, AutoDelta(model), dvi.optim.Adam({"lr": 0.05}), loss=dvi.SampledELBO())
    callbacks = [lambda state: change() if change and state.epoch == step else None]
    history = dvi.fit(svi, data, epochs, progress=False, capture=capture, callbacks=callbacks)
    return history["loss"]


def with_probabilities(x, y=None):
    w = pyro.sample("w", dist.Normal(0.5, 10.0))
    with pyro.plate("data", 20):
        pyro.sample("y", dist.Bernoulli(probs=torch.sigmoid(w) + x), obs=y)


def line(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 20):
        pyro.sample("y", dist.Normal(w * x, 0.5), obs=y)


def with_factorisation(x, y=None):
    w, c = pyro.sample("w", dist.Normal(0.1, 10.0)), x.mean()
    factor = torch.linalg.cholesky(torch.eye(3) * (1 - c) + c)
    with pyro.plate("data", 20):
        pyro.sample("y", dist.Normal(factor[1, 0] * w * x, 0.5), obs=y)


@pytest.mark.parametrize("capture", [False, True])
def test_invalid_parameters_of_a_distribution_are_an_error(capture):
    good = [(ZEROS + 0.001 * k, ONES) for k in range(7)] * 8
    with pytest.raises(NonFiniteError, match="epoch 1, step 57"):
        losses_of(with_probabilities, [*good, (ZEROS + 0.9, ONES), (ZEROS, ONES)], capture)


@pytest.mark.parametrize("capture", [False, True])
def test_a_factorisation_that_fails_is_an_error(capture):
    good = [(X + 0.1 * k, Y) for k in range(-2, 3)] * 11
    with pytest.raises(torch.linalg.LinAlgError):
        losses_of(with_factorisation, [*good, (X - 2.0, Y), (X, Y)], capture)


class Base:
    factor = 1.0


class Derived(Base):
    pass


def of_a_class():
    return lambda: Derived.factor, lambda: setattr(Base, "factor", 0.3)


def of_a_subclass():
    return lambda: Derived.factor, lambda: setattr(Derived, "factor", 0.3)


def of_arguments():
    arguments = Namespace(factor=1.0)
    return lambda: arguments.factor, lambda: setattr(arguments, "factor", 0.3)


def of_a_set():
    options = {"whole"}

    def change():
        options.clear()
        options.add("part")

    return lambda: 1.0 if "whole" in options else 0.3, change


def of_a_module():
    settings = ModuleType("settings")
    settings.factor = 1.0
    return lambda: settings.factor, lambda: setattr(settings, "factor", 0.3)


def of_a_list():
    class Options(list):
        factor = 1.0

    options = Options()
    return lambda: options.factor, lambda: setattr(options, "factor", 0.3)


def of_a_hidden_tensor():
    hidden = UserList([torch.tensor(1.0)])  # into which no recording looks
    return lambda: hidden[0], lambda: hidden[0].mul_(0.3)


@pytest.mark.parametrize(
    "place", [of_a_class, of_a_subclass, of_arguments, of_a_set, of_a_module, of_a_list, of_a_hidden_tensor]
)
def test_numbers_wherever_they_are_are_followed(place, monkeypatch):
    monkeypatch.setattr(Base, "factor", 1.0)
    found = []
    for capture in (False, True):
        Base.factor = 1.0
        if "factor" in vars(Derived):
            del Derived.factor
        factor, change = place()

        def model(x, y=None, factor=factor):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
            with pyro.plate("data", 20):
                pyro.sample("y", dist.Normal(w * x * factor(), 0.5), obs=y)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found.append(losses_of(model, [(X, Y)], capture, epochs=70, change=change))
    assert found[0] == found[1]
    assert found[0][49] != found[0][50]


def test_a_prior_that_was_made_before_and_validates_is_no_obstacle():
    prior = dist.LogNormal(torch.tensor(0.0), torch.tensor(1.0), validate_args=True)

    def model(x, y=None):
        w = pyro.sample("w", prior)
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(w * x, 0.5), obs=y)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = [losses_of(model, [(X, Y)], capture, epochs=60) for capture in (False, True)]
    assert found[0] == found[1]


def test_latents_that_may_be_any_number_are_not_checked():
    """A NaN among them shows in the loss; looking for one takes as long as the rest of a step of a large network."""

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros(3, 2), 1.0).to_event(2))
        with pyro.plate("data", 20):
            pyro.sample("y", dist.Normal(w.sum() * x, 0.5), obs=y)

    guide, elbo = AutoDelta(model), Captured(dvi.SampledELBO())
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.05}), loss=elbo)
    for _ in range(20):
        svi.step(X, Y)
    (recording,) = elbo.recordings
    operators = [node.target for node in recording.operators.graph.nodes]
    assert operators.count(torch.ops.aten.eq.Tensor) == 1  # of the data


def test_replays_that_take_longer_than_ordinary_steps_are_dropped(monkeypatch):
    def slowly(*args):
        trials = own(*args)
        for trial in trials:
            trial.seconds += 10
        return trials

    own = RecordedStep.trials
    guide, elbo = AutoDelta(line), Captured(dvi.SampledELBO())
    svi = SVI(line, guide, dvi.optim.Adam({"lr": 0.05}), loss=elbo)
    monkeypatch.setattr(RecordedStep, "trials", slowly)
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            svi.step(X, Y)
            kept.append(len(elbo.recordings))
    assert max(kept) == 1 and kept[-50:] == [0] * 50
