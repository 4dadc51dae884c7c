# SPDX-License-Identifier: Apache-2.0
"""What happens between captured steps is followed, or steps are ordinary from then on, with one warning."""

import random
from collections import UserList
from contextlib import nullcontext
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning
from pyro_dvi.objectives import SampledELBO
from tests.objectives.captured_steps import NUM_DATA, batches, both, replays, start, steps

ONE = batches()[:1]


def given_up(training):
    return training.elbo._given_up


def captures(training):
    return hasattr(training.elbo, "recordings")


# Between steps ------------------------------------------------------------------------------------------------------


def clear_store(training):
    pyro.clear_param_store()


def reload_store(training):
    store = pyro.get_param_store()
    store.set_state(store.get_state())


def save_and_load_store(training):
    store = pyro.get_param_store()
    state = {k: v.detach().clone() / 2 for k, v in store.named_parameters()}
    with torch.no_grad():
        for name, value in store.named_parameters():
            value.copy_(state[name])


def replace_parameter(training):
    first = training.model.net[0]
    first.weight = nn.Parameter(first.weight.detach() * 0.5)


def replace_buffer(training):
    training.model.net[1].running_mean = torch.ones(6)


def load_states(training):
    for part in (training.model, training.guide):
        state = {k: v / 2 if v.is_floating_point() else v for k, v in part.state_dict().items()}
        part.load_state_dict(state)


def assign_states(training):
    state = {k: v.clone() for k, v in training.model.state_dict().items()}
    training.model.load_state_dict(state, assign=True)


def evaluation_mode(training):
    training.model.eval()


def freeze(training):
    training.model.net[0].weight.requires_grad_(False)


def other_dropout(training):
    training.model.net[3].p = 0.5


def other_temperature(training):
    training.model.temperature = 2.0


def seed(training):
    pyro.set_rng_seed(5)


def move_data(training):
    for part in (training.model, training.guide):
        for p in part.parameters():
            p.data = p.data.clone()


def leave_gradients(training):
    for p in training.guide.parameters():
        p.grad = torch.ones_like(p)


CHANGES = [
    clear_store,
    reload_store,
    save_and_load_store,
    replace_parameter,
    replace_buffer,
    load_states,
    assign_states,
    evaluation_mode,
    freeze,
    other_dropout,
    other_temperature,
    seed,
    move_data,
    leave_gradients,
]


@pytest.mark.every(3)
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_between_steps_are_followed(change):
    def run(training):
        steps(training, 9, ONE)
        change(training)
        steps(training, 9, ONE)

    training = both(run, after=1)
    assert replays(training) >= 4
    assert not given_up(training)
    assert training.elbo._failures <= 1


def test_each_mode_has_a_recording():
    def run(training):
        for k in range(6):
            training.model.train(k % 2 == 0)
            steps(training, 4, ONE)

    training = both(run, after=1)
    assert len(training.elbo.recordings) == 2
    assert replays(training) > 8


def test_another_type():
    def run(training):
        steps(training, 8, ONE)
        for part in (training.model, training.guide):
            part.to(torch.float64)
        steps(training, 8, [(ONE[0][0].double(), ONE[0][1])])

    training = both(run, after=1)
    assert len(training.elbo.recordings) == 2


def test_another_data_set_size():
    def run(training):
        training.elbo.num_data = NUM_DATA
        steps(training, 8, ONE)
        training.elbo.num_data = NUM_DATA + 1
        with pytest.raises(dvi.errors.DataError):
            steps(training, 1, ONE)
        training.elbo.num_data = None
        steps(training, 8, ONE)

    both(run, after=1)


def test_two_guides_of_one_objective():
    def run(training):
        other = AutoNormal(training.model)
        svi = pyro.infer.SVI(training.model, other, training.svi.optim, loss=training.elbo)
        for _ in range(10):
            steps(training, 1, ONE)
            training.losses.append(svi.step(*ONE[0]))

    assert len(both(run, after=1).elbo.recordings) == 2


def test_one_tensor_as_two_arguments():
    """As of an autoencoder; the first minibatch after the recording is compared, the third is not."""
    x = torch.stack([y.float() for _, y in ONE] * 4, -1)
    z = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))

    def likelihood(model, mean):
        return dist.Normal(mean.unsqueeze(-1), 1.0).expand([8, 4]).to_event(1)

    def run(training):
        steps(training, 3, [(x, x)])
        steps(training, 3, [(z, z)])
        steps(training, 8, [(x, z)])

    both(run, model=lambda: Regression(likelihood), after=1)


def test_soft_labels_that_are_not_validated():
    def run(training):
        steps(training, 12, [(x, torch.full((len(x),), 0.3)) for x, _ in ONE])

    assert replays(both(run, model=lambda: Regression(soft), after=1)) >= 4


def test_labels_outside_the_support():
    """Of a likelihood that is finite there."""
    messages = []
    for capture in (False, True):
        training = start(capture, model=lambda: Regression(validated), after=1)
        steps(training, 12, [(x, y % 2.0) for x, y in batches()[:2]])
        runs = len(training.model.runs)
        with pytest.raises(dvi.errors.DataError) as caught:
            steps(training, 1, [(x, y % 2.0 + 1) for x, y in ONE])
        assert len(training.model.runs) == runs + 1
        messages.append(str(caught.value))
    assert messages[0] == messages[1]


# The number of steps ------------------------------------------------------------------------------------------------


class _Tempered(SampledELBO):
    """An objective that reads the number of steps."""

    def evaluate(self, call, kl_weight, training):
        terms = super().evaluate(call, kl_weight, training)
        return {**terms, "loss": terms["loss"] * (1 + self.step)}


def test_an_objective_that_reads_the_number_of_steps_takes_ordinary_ones():
    def run(training):
        with (
            pytest.warns(DviWarning, match="reads the number of steps")
            if captures(training)
            else nullcontext()
        ):
            steps(training, 12, ONE)

    assert given_up(both(run, elbo=_Tempered))


def test_a_schedule_of_weights_is_followed():
    def weighting():
        return dvi.moment_propagation.VarianceWeighted(lambda step: 0.5 if step < 20 else 0.0)

    data = [(x, y.float()) for x, y in ONE]
    training = both(
        lambda t: steps(t, 40, data),
        model=lambda: Regression(lambda model, mean: dist.Normal(mean, 1 + mean.square())),
        elbo=lambda: dvi.MomentPropagationELBO(weighting=weighting()),
    )
    assert len(training.elbo.recordings) == 2


# Models that cannot be replayed, or not always -----------------------------------------------------------------------


class Regression(nn.Module):
    """A model whose likelihood a function gives."""

    def __init__(self, likelihood):
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.likelihood, self.runs = likelihood, UserList[Any]()

    def forward(self, x, y=None):
        self.runs.append(len(x))
        pyro.module("layer", self.layer)
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            pyro.sample("y", self.likelihood(self, self.layer(x).squeeze(-1) * w), obs=y)


def soft(model, mean):
    return dist.Bernoulli(logits=mean, validate_args=False)


def validated(model, mean):
    return dist.Bernoulli(logits=mean)


def reads(model, mean):
    return dist.Normal(mean, 1.0 if mean.mean().item() > 0 else 2.0)


def branches(model, mean):
    return dist.Normal(mean if mean.sum() > 0 else -mean, 1.0)


def python_random(model, mean):
    return dist.Normal(mean, random.uniform(1.0, 2.0))


def numpy_random(model, mean):
    return dist.Normal(mean, float(np.random.rand()) + 1)


def own_generator(model, mean):
    if not hasattr(model, "generator"):
        model.generator = torch.Generator().manual_seed(0)
    return dist.Normal(mean + torch.randn((), generator=model.generator), 1.0)


def counts(model, mean):
    model.count = getattr(model, "count", 0) + 1
    return dist.Normal(mean, 1.0 + model.count / 10)


def assigns(model, mean):
    before = getattr(model, "before", torch.zeros(()))
    model.before = mean.detach().mean()
    return dist.Normal(mean + before, 1.0)


def keeps_in_a_list(model, mean):
    model.runs.append(mean.detach().mean())
    return dist.Normal(mean + (model.runs[-3] if len(model.runs) > 8 else 0.0), 1.0)


UNSUITABLE = {
    reads: "Python reads a value",
    branches: "Python reads a value",
    python_random: "outside torch",
    numpy_random: "outside torch",
    own_generator: "generator",
    counts: "count.* changes from",
    assigns: "assigns a tensor",
    keeps_in_a_list: "differs",
}


@pytest.mark.every(3)
@pytest.mark.parametrize("likelihood", UNSUITABLE, ids=lambda f: f.__name__)
def test_what_cannot_be_replayed_stays_ordinary_with_one_warning(likelihood):
    data = [(x, y.float()) for x, y in ONE]
    results = []
    for capture in (False, True):
        training = start(capture, model=lambda: Regression(likelihood), after=1, elbo=SampledELBO)
        random.seed(0)
        np.random.seed(0)
        expected = pytest.warns(DviWarning, match=UNSUITABLE[likelihood]) if capture else nullcontext()
        with expected as caught:
            steps(training, 30, data)
        if capture:
            assert len(caught) == 1
            assert given_up(training)
            assert training.elbo.recordings == []
        results.append((training.losses, training.state(), random.random(), np.random.rand()))
    assert results[0][0] == results[1][0]
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])
    assert results[0][2:] == results[1][2:]


def test_the_warning_names_the_line():
    training = start(True, model=lambda: Regression(reads), after=1)
    with pytest.warns(DviWarning, match=r"in test_captured_changes.py, line \d+: return dist.Normal.*item"):
        steps(training, 10, [(x, y.float()) for x, y in ONE])


def test_a_number_that_changes_in_every_step_leaves_ordinary_steps():
    def run(training):
        for k in range(30):
            training.model.temperature = 1 + k / 10
            steps(training, 1, ONE)

    with pytest.warns(DviWarning, match="not captured") as caught:
        both(run, after=1)
    assert len(caught) == 1


def late(model, mean):
    return dist.Normal(mean + pyro.param("late", torch.zeros(())) if model.on else mean, 1.0)


class Switched(Regression):
    def __init__(self):
        super().__init__(late)
        self.on = False


def test_a_parameter_that_appears_later():
    data = [(x, y.float()) for x, y in ONE]

    def run(training):
        steps(training, 10, data)
        training.model.on = True
        steps(training, 20, data)

    training = both(run, model=Switched, after=1)
    assert pyro.param("late") != 0
    assert len(training.elbo.recordings) == 2
    assert not given_up(training)
