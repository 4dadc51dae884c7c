# SPDX-License-Identifier: Apache-2.0
"""Replays fail where ordinary steps do."""

import threading
import time
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta

import pyro_dvi as dvi
from pyro_dvi.core.in_turn import in_turn
from pyro_dvi.core.recorder import is_recording
from pyro_dvi.errors import NonFiniteError, ParameterError
from pyro_dvi.objectives import Captured
from pyro_dvi.objectives.comparison import Trial

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


# Families whose positive parameter belongs to a part of them, or is a property, and for comparison some others.
FAMILIES = {
    "Beta": lambda c: dist.Beta(c, 1.0),
    "BetaBinomial": lambda c: dist.BetaBinomial(c, 1.0, total_count=5),
    "Chi2": dist.Chi2,
    "Dirichlet": lambda c: dist.Dirichlet(torch.stack([c, ONES], -1)),
    "Gamma": lambda c: dist.Gamma(c, 1.0),
    "GammaPoisson": lambda c: dist.GammaPoisson(c, 1.0),
    "InverseGamma": lambda c: dist.InverseGamma(c, 1.0),
    "LogNormal": lambda c: dist.LogNormal(0.0, c),
    "MaskedMixture": lambda c: dist.MaskedMixture(Y > 0, dist.Gamma(c, 1.0), dist.Gamma(ONES, 1.0)),
    "MixtureSameFamily": lambda c: dist.MixtureSameFamily(
        dist.Categorical(torch.ones(20, 2)), dist.Gamma(torch.stack([c, c], -1), 1.0)
    ),
    "Multinomial": lambda c: dist.Multinomial(2, torch.stack([c, ONES], -1)),
    "NegativeBinomial": lambda c: dist.NegativeBinomial(c, logits=0.0),
    "RelaxedBernoulli": lambda c: dist.RelaxedBernoulli(ONES, c / 2),
    "ZeroInflatedPoisson": lambda c: dist.ZeroInflatedPoisson(c, gate=0.5 * ONES),
}


@pytest.mark.every(7)
@pytest.mark.parametrize("family", FAMILIES)
def test_replays_refuse_the_parameters_that_ordinary_steps_refuse(family):
    make = FAMILIES[family]
    y = make(ONES).sample()
    if family in ("Beta", "RelaxedBernoulli"):
        y = y.clamp(0.1, 0.9)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20):
            pyro.sample("y", make(x * torch.exp(0.01 * w)), obs=y)

    good = [(ONES + 0.001 * k, y) for k in range(7)] * 8
    assert len(losses_of(model, good, capture=True)) == 3
    for capture in (False, True):
        with pytest.raises(ParameterError, match="to satisfy the constraint"):
            losses_of(model, [*good, (-0.5 * ONES, y), (ONES, y)], capture)


def in_a_factor(c, y):
    pyro.factor("y", dist.Gamma(c, 1.0).log_prob(y))


def in_a_mixture_by_hand(c, y):
    densities = [dist.Gamma(rate, 1.0).log_prob(y) for rate in (c, c + 1)]
    pyro.factor("y", torch.logaddexp(*densities))


def in_a_mean(c, y):
    pyro.sample("y", dist.Normal(dist.InverseGamma(c + 3, 2.0).mean + dist.Beta(c, 2.0).mean, 1.0), obs=y)


@pytest.mark.every(4)
@pytest.mark.parametrize("place", [in_a_factor, in_a_mixture_by_hand, in_a_mean])
@pytest.mark.parametrize("capture", [False, True])
def test_distributions_that_belong_to_no_site_are_checked_as_well(place, capture):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.5, 10.0))
        with pyro.plate("data", 20):
            place(torch.sigmoid(w) - x, y)

    good = [(ZEROS + 0.001 * k, ONES) for k in range(7)] * 8
    with pytest.raises(ParameterError, match="Expected parameter concentration"):
        losses_of(model, [*good, (ZEROS + 1.5, ONES), (ZEROS, ONES)], capture, epochs=1)


@pytest.mark.parametrize("capture", [False, True])
def test_a_factorisation_that_fails_is_an_error(capture):
    good = [(X + 0.1 * k, Y) for k in range(-2, 3)] * 11
    with pytest.raises(torch.linalg.LinAlgError):
        losses_of(with_factorisation, [*good, (X - 2.0, Y), (X, Y)], capture)


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


class OwnMissing(dist.Normal):
    """A density that accepts NaN, although it inherits the support of a Normal."""

    def log_prob(self, value):
        return torch.where(value.isnan(), 0.0, super().log_prob(value.nan_to_num()))


def test_a_check_that_ordinary_steps_do_not_make_ends_capture_with_a_warning():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20):
            pyro.sample("y", OwnMissing(w * x, 0.5), obs=y)

    y = torch.where(X > 0, Y, torch.nan)
    with pytest.warns(dvi.errors.DviWarning, match="not captured.*value or parameter is invalid"):
        captured = losses_of(model, [(X, y)], capture=True, epochs=60)
    assert captured == losses_of(model, [(X, y)], capture=False, epochs=60)


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
        trial = own(*args)
        trial.seconds += 10
        return trial

    own = Trial.of
    guide, elbo = AutoDelta(line), Captured(dvi.SampledELBO())
    svi = SVI(line, guide, dvi.optim.Adam({"lr": 0.05}), loss=elbo)
    monkeypatch.setattr(Trial, "of", slowly)
    kept = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(100):
            svi.step(X, Y)
            kept.append(len(elbo.recordings))
    assert max(kept) == 1 and kept[-50:] == [0] * 50


def test_other_threads_wait_while_a_step_is_recorded():
    """Meanwhile, a class of torch builds distributions differently."""
    done, entered = threading.Event(), []

    def take_a_turn():
        with in_turn:
            entered.append(torch.distributions.Distribution.__init__)
        done.set()

    def model(x, y=None):
        if is_recording():
            threading.Thread(target=take_a_turn, daemon=True).start()
            while not (done.is_set() or in_turn._queue.locked()):  # until it waits
                time.sleep(0.001)
        line(x, y)

    usual = torch.distributions.Distribution.__init__
    svi = SVI(
        model, AutoDelta(model), dvi.optim.Adam({"lr": 0.05}), loss=Captured(dvi.SampledELBO(), after=2)
    )
    for _ in range(6):
        svi.step(X, Y)
    assert done.wait(10) and entered == [usual]
