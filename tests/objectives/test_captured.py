# SPDX-License-Identifier: Apache-2.0
"""Captured steps: equal to ordinary ones to the last bit, with few runs of the model."""

import copy
import pickle
from collections import UserList
from functools import partial
from typing import Any, ClassVar

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.bayesian import LearnedScale, OptimalScale, init_to_module
from pyro_dvi.curvature import EmpiricalFisher, Fisher, GGNDiagonal
from pyro_dvi.errors import ArgumentError, CaptureError, DataError, NonFiniteError, UnsupportedError
from pyro_dvi.natural_gradients import IVON, OGN, VOGN, NoisyKFAC
from pyro_dvi.objectives import Captured, SampledELBO
from pyro_dvi.objectives.schedules import LinearWarmup
from tests.objectives.captured_steps import (
    NUM_DATA,
    Net,
    batches,
    both,
    replays,
    start,
    steps,
)

map_guide = partial(AutoDelta, init_loc_fn=init_to_module)
natural = partial(dvi.NaturalGradientELBO, kl_weight=LinearWarmup(20, start=0.1))

CASES = {
    "Fisher": (dvi.MeanFieldGuide, partial(dvi.TaylorELBO, kl_weight=LinearWarmup(20)), None),
    "GGNDiagonal": (dvi.MeanFieldGuide, partial(dvi.TaylorELBO, curvature=GGNDiagonal()), None),
    "EmpiricalFisher": (dvi.MeanFieldGuide, partial(dvi.TaylorELBO, curvature=EmpiricalFisher()), None),
    "every third": (dvi.MeanFieldGuide, partial(dvi.TaylorELBO, curvature=Fisher(every=3)), None),
    "Pyro's guide": (partial(AutoNormal, init_scale=0.01), dvi.TaylorELBO, None),
    "two draws": (
        dvi.MeanFieldGuide,
        partial(SampledELBO, num_particles=2, kl_weight=LinearWarmup(20)),
        None,
    ),
    "one draw": (AutoDiagonalNormal, SampledELBO, None),
    "MAP": (map_guide, SampledELBO, None),
    "VOGN": (dvi.NaturalGradientGuide, natural, VOGN),
    "OGN": (dvi.NaturalGradientGuide, natural, OGN),
    "IVON": (dvi.NaturalGradientGuide, natural, IVON),
    "NoisyKFAC": (
        dvi.KroneckerGuide,
        natural,
        lambda options: NoisyKFAC({**options, "factor_interval": 1, "inverse_interval": 1}),
    ),
    "NoisyKFAC, intervals": (
        dvi.KroneckerGuide,
        natural,
        lambda options: NoisyKFAC({**options, "factor_interval": 2, "inverse_interval": 3}),
    ),
}


@pytest.mark.every(5)
@pytest.mark.parametrize("name", CASES)
def test_steps_equal_ordinary_ones(name):
    training = both(
        lambda t: steps(t, 40), **dict(zip(("guide", "elbo", "optimizer"), CASES[name], strict=True))
    )
    assert replays(training) >= 10 or name == "two draws"
    assert len(training.elbo.recordings) >= 2  # the last minibatch is shorter


def test_what_a_step_leaves_with_the_guide():
    """Natural gradients read the prior there, whose scale is learned."""
    training = both(
        lambda t: steps(t, 30, batches()[:1]),
        guide=dvi.NaturalGradientGuide,
        elbo=natural,
        optimizer=VOGN,
        model=lambda: Net(prior_scale=LearnedScale()),
    )
    assert replays(training) > 10


class Incomplete(Net):
    """A regression with missing values, of which each minibatch has another number."""

    way: ClassVar[str]

    def forward(self, x, y=None):
        self.runs.append(len(x))
        f, given = self.net(x)[:, 0], x[:, 0] > 0
        fn = dist.Normal(f, 0.5)
        if y is not None and self.way == "NaN":
            fn, y = dist.NanMaskedNormal(f, 0.5), torch.where(given, 1.0 * y, torch.nan)
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            with pyro.poutine.mask(mask=given if self.way == "poutine.mask" else True):
                return pyro.sample("y", fn.mask(given) if self.way == "mask" else fn, obs=y)


@pytest.mark.every(3)
@pytest.mark.parametrize("way", ["poutine.mask", "mask", "NaN"])
@pytest.mark.parametrize("optimizer", [VOGN, IVON, NoisyKFAC])
def test_masked_rows_are_not_counted_in_a_natural_gradient_step(optimizer, way):
    """Damping and initial curvature are multiples of the number of rows in the plate."""
    layers = optimizer is NoisyKFAC
    added = {"factor_interval": 1, "inverse_interval": 1} if layers else {"initial_curvature": 0.3}
    training = both(
        lambda t: steps(t, 40),
        guide=dvi.KroneckerGuide if layers else dvi.NaturalGradientGuide,
        elbo=natural,
        optimizer=lambda options: optimizer({**options, "damping": 0.2, **added}),
        model=type("Incomplete", (Incomplete,), {"way": way}),
    )
    assert replays(training) >= 10
    assert training.guide.natural_step.num_data == NUM_DATA


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["Fisher", "two draws", "MAP"])
def test_a_prior_that_depends_on_the_posterior(name):
    options = dict(zip(("guide", "elbo", "optimizer"), CASES[name], strict=True))
    training = both(lambda t: steps(t, 30), model=lambda: Net(prior_scale=OptimalScale()), **options)
    assert replays(training) >= 10 or name == "two draws"


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["Fisher", "two draws", "IVON", "NoisyKFAC"])
def test_float64(name, double):
    options = dict(zip(("guide", "elbo", "optimizer"), CASES[name], strict=True))
    training = both(lambda t: steps(t, 30, batches(torch.float64)), dtype=torch.float64, **options)
    assert len(training.elbo.recordings) == 2


def test_the_model_runs_seldom():
    training = start(True)
    one = batches()[:1]
    steps(training, 100, one)
    # Two to make the guide and to know the model; an ordinary step, one that looks around, one that is recorded, and
    # those after which 1, 2, 4, ..., 64 others have replayed it.
    assert len(training.model.runs) == 2 + 3 + 7


def torch_steps(training, number, *, factor=1, accumulate=1, autocast=False, retain=False):
    """Take steps with a torch optimizer."""
    data = batches()
    training.guide(*data[0])
    module = training.elbo(training.model, training.guide)
    optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
    for k in range(number):
        optimizer.zero_grad()
        for part in range(accumulate):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = module(*data[(k + part) % len(data)])
            loss *= factor
            loss.backward(retain_graph=retain)
            if retain:
                loss.backward()
        optimizer.step()
        training.losses.append(loss.item())


def test_gradients_are_not_differentiated_again():
    training = start(True)
    steps(training, 12)
    loss = training.elbo.differentiable_loss(training.model, training.guide, *batches()[0])
    weight = training.model.net[0].weight
    with pytest.raises(UnsupportedError, match="create_graph=True is not supported"):
        torch.autograd.grad(loss, weight, create_graph=True)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"factor": 0.25}, {"accumulate": 2}, {"autocast": True}, {"retain": True}],
    ids=lambda options: next(iter(options), "plain"),
)
def test_torch_optimizers(options):
    training = both(lambda t: torch_steps(t, 30, **options))
    assert len(training.elbo.recordings) == 2


@pytest.mark.every(2)
@pytest.mark.parametrize("elbo", [dvi.TaylorELBO, SampledELBO])
def test_parameters_of_modules(elbo):
    with pyro.settings.context(module_local_params=True):
        training = both(lambda t: torch_steps(t, 30), elbo=elbo)
    assert len(training.elbo.recordings) == 2


@pytest.mark.distributed
def test_distributed_data_parallel(tmp_path):
    """Hooks of torch on the accumulation of gradients see those of a replay."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:

        def run(training):
            data = batches()
            training.guide(*data[0])
            module = nn.parallel.DistributedDataParallel(training.elbo(training.model, training.guide))
            seen: list[int] = []
            module.register_comm_hook(None, lambda _, bucket: _halved(bucket, seen))
            optimizer = torch.optim.SGD(module.parameters(), lr=1e-3)
            for k in range(20):
                optimizer.zero_grad()
                loss = module(*data[k % 3])
                loss.backward()
                optimizer.step()
                training.losses.append(loss.item())
            assert len(seen) >= 20

        with pyro.settings.context(module_local_params=True):
            assert len(both(run).elbo.recordings) == 1
    finally:
        torch.distributed.destroy_process_group()


def _halved(bucket, seen):
    seen.append(bucket.index())
    future: torch.futures.Future = torch.futures.Future()
    future.set_result(bucket.buffer() / 2)
    return future


def test_hooks_of_parameters_act_once():
    def run(training):
        training.guide(*batches()[0])
        first = training.model.net[0]
        first.weight.register_hook(lambda gradient: gradient / 2)
        first.bias.register_post_accumulate_grad_hook(_zeroed)
        before = first.bias.clone()
        steps(training, 20)
        assert torch.equal(first.bias, before)

    assert replays(both(run)) > 5


def _zeroed(parameter):
    parameter.grad.zero_()


class Sums(nn.Module):
    """A model whose parameters share one gradient, which is laid out as none of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(3))
        self.runs: Any = UserList()

    def forward(self, x, y=None):
        pyro.module("sums", self)
        self.runs.append(len(x))
        w = pyro.sample("w", pyro.distributions.Normal(0.0, 1.0))
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            pyro.sample("y", pyro.distributions.Normal((self.a + self.b).sum() * w, 1.0), obs=y)


def test_gradients_have_memory_of_their_own():
    """Clipping writes to gradients in place."""
    data = [(x, y.float() + 5) for x, y in batches()]
    training = both(
        lambda t: steps(t, 20, data),
        model=Sums,
        optimizer=lambda o: dvi.optim.SGD({"lr": 0.1}, {"clip_norm": 0.1}),
    )
    assert training.elbo.recordings


# What training meets -------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_noticed_before_the_update():
    training = start(True)
    steps(training, 20)
    assert training.elbo.recordings
    loc = next(p for name, p in training.guide.named_parameters() if "loc" in name)
    with torch.no_grad():
        loc.fill_(1e30)
    before = [p.clone() for p in training.guide.parameters()]
    with pytest.raises(NonFiniteError, match="the loss is inf in step 21 .*kl=inf"):
        training.svi.step(*batches()[0])
    assert all(map(torch.equal, before, training.guide.parameters()))
    assert all(p.grad is None for p in training.guide.parameters())


def test_errors_are_those_of_ordinary_steps():
    """Same class, same words."""
    messages = []
    x, y = batches()[0]
    off = y.clone()
    off[2] = -1
    for capture in (False, True):
        training = start(capture)
        steps(training, 20)
        found = []
        for inputs, labels in [
            (x * torch.nan, y),
            (x, y + 3),
            (x, off),
            (x[:, :3], y),
            (x.int(), y),
            (x, y[:3]),
        ]:
            with pytest.raises(Exception) as caught:
                training.svi.step(inputs, labels)
            found.append((type(caught.value), str(caught.value)))
        messages.append(found)
    assert messages[0] == messages[1]
    assert [kind for kind, _ in found[:3]] == [DataError] * 3


# An objective like the one inside -----------------------------------------------------------------------------------


def test_attributes_are_the_objectives():
    inner = dvi.TaylorELBO(kl_weight=0.5, num_data=NUM_DATA)
    elbo = Captured(inner)
    assert (elbo.num_data, elbo.kl_weight, elbo.step, elbo.terms) == (NUM_DATA, 0.5, 0, {})
    elbo.kl_weight, elbo.num_data = 0.1, None
    assert (inner.kl_weight, inner.num_data) == (0.1, None)
    assert "kl_weight" not in vars(elbo)
    elbo.load_state_dict({"step": 7})
    assert inner.step == elbo.step == 7
    with pytest.raises(AttributeError, match="nothing"):
        elbo.nothing  # noqa: B018
    with pytest.raises(ArgumentError, match="elbo"):
        Captured(elbo)


def test_a_kl_weight_that_is_set_counts():
    def run(training):
        steps(training, 15)
        training.elbo.kl_weight = 0.25
        steps(training, 10)
        assert training.elbo.terms["kl_weight"] == 0.25

    assert len(both(run).elbo.recordings) == 2


@pytest.mark.every(3)
@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_copies_hold_no_recordings(copied):
    training = start(True)
    steps(training, 12)
    other = copied(training.elbo)
    assert other.recordings == [] and len(training.elbo.recordings) == 2
    assert (other.step, other.after) == (12, 2)
    training.svi = pyro.infer.SVI(training.model, training.guide, training.svi.optim, loss=other)
    steps(training, 12)
    assert len(other.recordings) == 2


def test_evaluation_takes_no_step():
    def run(training):
        steps(training, 12)
        for _ in range(5):
            training.losses.append(training.svi.evaluate_loss(*batches()[0]))
        with torch.no_grad():
            training.losses.append(
                training.elbo.differentiable_loss(training.model, training.guide, *batches()[0])
            )
        assert training.elbo.step == 12
        steps(training, 4)

    both(run)


# Looks -------------------------------------------------------------------------------------------------------------


def test_looks_come_after_1_2_4_and_so_on_steps():
    training = start(True)
    data = batches()[:1]
    ran = []
    for k in range(40):
        before = len(training.model.runs)
        steps(training, 1, data)
        if len(training.model.runs) > before:
            ran.append(k)
    recorded = ran[2]
    assert ran[3:] == [recorded + use for use in (1, 2, 4, 8, 16, 32) if recorded + use < 40]


def test_a_wrong_replay_is_an_error_at_the_next_look():
    training = start(True, elbo=dvi.TaylorELBO)
    data = batches()[:1]
    steps(training, 12, data)  # the next of the looks comes after 16 steps that replay it
    (step,) = training.elbo.recordings
    run = step._run
    step._run = lambda *inputs: [r + 1 if r.is_floating_point() else r for r in run(*inputs)]
    steps(training, 1, data)
    assert training.elbo.recordings == [step]
    with pytest.raises(CaptureError, match="since step 12 are void"):
        steps(training, 20, data)
    assert training.elbo.recordings == []
    steps(training, 10, data)
    assert len(training.elbo.recordings) == 1  # the kind was recorded anew


def test_a_look_comes_after_a_tensor_was_replaced():
    training = start(True, after=1)
    data = batches()[:1]
    steps(training, 10, data)
    before = len(training.model.runs)
    steps(training, 1, data)
    assert len(training.model.runs) == before
    training.model.net[1].running_mean = torch.ones(6)
    steps(training, 1, data)
    assert len(training.model.runs) == before + 1
    assert len(training.elbo.recordings) == 1


def test_no_more_kinds_than_asked_for():
    training = start(True)
    training.elbo.max_recordings = 1
    steps(training, 24)
    assert len(training.elbo.recordings) == 1
