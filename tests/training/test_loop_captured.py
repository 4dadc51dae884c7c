# SPDX-License-Identifier: Apache-2.0
"""``fit`` replays recorded steps by itself; the user sees the same numbers and the same objects."""

import gc
import weakref
from collections import UserList
from typing import Any

import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

import pyro_dvi as dvi
from pyro_dvi.errors import NonFiniteError
from pyro_dvi.objectives import Captured, SampledELBO
from pyro_dvi.training import EarlyStopping, fit, load, routes, train_ensemble
from pyro_dvi.training.loop import _CAPTURED_STEPS
from tests.training.problems import (
    FunctionalProblem,
    Net,
    fresh_start,
    module_of,
    same,
    sequence,
    shuffled,
    svi_of,
    weights_of,
)

OURS = "MeanFieldGuide + TaylorELBO"
EPOCHS = 24  # of three steps


class Counting(Net):
    """Counts its runs in training mode where no recording can see it."""

    def __init__(self):
        super().__init__()
        self.runs: Any = UserList()

    def forward(self, x, y=None):
        self.runs.append(self.training)
        return super().forward(x, y)


def counting_svi(elbo=None):
    fresh_start()
    torch.manual_seed(0)
    model = Counting()
    return SVI(model, dvi.MeanFieldGuide(model), Adam({"lr": 0.01}), loss=elbo or dvi.TaylorELBO())


def record(history):
    """Everything but times."""
    found = history.to_dict()
    return repr({**found, "epochs": {k: v for k, v in found["epochs"].items() if k != "seconds"}})


@pytest.mark.every(2)
@pytest.mark.parametrize("kind", ["SVI", "ELBOModule"])
def test_numbers_are_those_of_ordinary_steps(kind):
    results = []
    for capture in (False, True):
        fresh_start()
        if kind == "SVI":
            target, options = svi_of(OURS), {}
        else:
            target, optimizer = module_of(OURS)
            options = {"optimizer": optimizer, "lr_schedule": CosineAnnealingLR(optimizer, EPOCHS)}
        history = fit(
            target,
            shuffled(),
            EPOCHS,
            validate=sequence(),
            early_stopping=EarlyStopping(patience=50),
            progress=False,
            capture=capture,
            **options,
        )
        results.append((record(history), weights_of(target), torch.rand(1).item()))
    (one, weights, after), (other, others, later) = results
    assert one == other
    assert same(weights, others)
    assert after == later


@pytest.mark.slow
def test_the_model_runs_seldom():
    svi = counting_svi()
    fit(svi, sequence(), EPOCHS, progress=False, capture=True)
    assert sum(svi.model.runs) < 20
    svi = counting_svi()
    fit(svi, sequence(), EPOCHS, progress=False)  # a model of one's own
    assert sum(svi.model.runs) > 3 * EPOCHS


@pytest.mark.slow
def test_short_trainings_take_ordinary_steps():
    epochs = (_CAPTURED_STEPS - 1) // 3
    svi = counting_svi()
    history = fit(svi, sequence(), epochs, progress=False, capture=True)
    for _ in range(2):
        history = fit(svi, sequence(), epochs, progress=False, history=history, capture=True)
    assert sum(svi.model.runs) > 9 * epochs


@pytest.mark.slow
def test_the_user_sees_his_objective(monkeypatch):
    made = []

    class Noted(Captured):
        def __init__(self, elbo):
            super().__init__(elbo)
            made.append((weakref.ref(self), elbo))

    monkeypatch.setattr(routes, "Captured", Noted)
    elbo = dvi.TaylorELBO()
    svi, seen = counting_svi(elbo), []
    fit(
        svi,
        sequence(),
        EPOCHS,
        capture=True,
        progress=False,
        callbacks=[lambda state: seen.append(state.elbo)],
    )
    module = dvi.TaylorELBO()(svi.model, svi.guide)
    inner, optimizer = module.elbo, torch.optim.Adam(module.parameters(), lr=0.01)
    fit(module, sequence(), EPOCHS, optimizer=optimizer, progress=False, capture=True)
    assert seen == [elbo] * EPOCHS
    assert svi.loss == elbo.loss and svi.loss_and_grads == elbo.loss_and_grads
    assert elbo.step == inner.step == 3 * EPOCHS
    assert module.elbo is inner
    assert [known for _, known in made] == [elbo, inner]
    gc.collect()
    assert [reference() for reference, _ in made] == [None, None]


@pytest.mark.slow
@pytest.mark.parametrize("resumed", [False, True])
def test_a_resumed_training_equals_one_of_ordinary_steps(tmp_path, resumed):
    """Recorded steps may stand on either side of a checkpoint."""
    fresh_start()
    whole = svi_of(OURS)
    ordinary = fit(whole, shuffled(), 2 * EPOCHS, progress=False, capture=False)
    expected = weights_of(whole)
    fresh_start()
    path = tmp_path / "run.pt"
    fit(svi_of(OURS), shuffled(), EPOCHS, checkpoint=path, progress=False, capture=not resumed)
    fresh_start()
    svi, loader = svi_of(OURS, seed=3), shuffled(seed=5)
    history = load(path, svi, loader=loader)
    history = fit(svi, loader, EPOCHS, history=history, progress=False, capture=True)
    assert record(history) == record(ordinary)
    assert same(weights_of(svi), expected)


def test_checkpoints_of_a_captured_objective_are_those_of_the_objective(tmp_path):
    svi = svi_of(OURS, elbo=Captured(dvi.TaylorELBO()))
    history = fit(svi, sequence(), 4, checkpoint=tmp_path / "run.pt", progress=False)
    assert type(svi.loss.__self__) is Captured and svi.loss.__self__.num_data is None
    weights = weights_of(svi)
    fresh_start()
    plain = svi_of(OURS, seed=1)
    assert record(load(tmp_path / "run.pt", plain, loader=sequence())) == record(history)
    assert same(weights_of(plain), weights)
    assert plain.loss.__self__.step == 12


@pytest.mark.slow
def test_functions_as_model_and_guide():
    results = []
    for capture in (False, True):
        fresh_start()
        problem = FunctionalProblem()
        problem.svi = SVI(problem.svi.model, problem.svi.guide, problem.svi.optim, loss=SampledELBO())
        history = fit(problem.svi, sequence(), EPOCHS, progress=False, capture=capture)
        results.append((history.steps["loss"], problem.weights()))
    assert results[0][0] == results[1][0]
    assert same(results[0][1], results[1][1])


@pytest.mark.slow
def test_divergence_is_reported_as_without():
    """Where a recorded step meets it, in epoch 21."""
    reports = []
    for capture in (False, True):
        fresh_start()
        svi = svi_of(OURS)

        def explode(state):
            if state.epoch == 20:
                with torch.no_grad():
                    next(iter(state.guide.parameters())).fill_(torch.inf)

        with pytest.raises(NonFiniteError) as caught:
            fit(svi, sequence(), EPOCHS, progress=False, capture=capture, callbacks=[explode])
        assert caught.value.epoch == 21
        reports.append((str(caught.value), record(caught.value.history), weights_of(svi)))
    assert reports[0][:2] == reports[1][:2]
    assert same(reports[0][2], reports[1][2])


@pytest.mark.slow
def test_what_takes_steps_of_its_own_is_left_alone():
    class OwnELBO(dvi.TaylorELBO):
        def loss_and_grads(self, model, guide, *args, **kwargs):
            calls.append("elbo")
            return super().loss_and_grads(model, guide, *args, **kwargs)

    class OwnSVI(SVI):
        def step(self, *args, **kwargs):
            calls.append("svi")
            return super().step(*args, **kwargs)

    calls: list[str] = []
    fit(counting_svi(OwnELBO()), sequence(), EPOCHS, progress=False, capture=True)
    assert calls == ["elbo"] * 3 * EPOCHS
    calls.clear()
    svi = counting_svi()
    own_svi = OwnSVI(svi.model, svi.guide, svi.optim, loss=dvi.TaylorELBO())
    fit(own_svi, sequence(), EPOCHS, progress=False, capture=True)
    assert calls == ["svi"] * 3 * EPOCHS
    calls.clear()
    svi, elbo = counting_svi(), dvi.TaylorELBO()

    def own(*args):
        calls.append("function")
        return elbo.loss_and_grads(*args)

    svi = SVI(svi.model, svi.guide, svi.optim, loss=elbo.loss, loss_and_grads=own)
    fit(svi, sequence(), EPOCHS, progress=False, capture=True)
    assert calls == ["function"] * 3 * EPOCHS


@pytest.mark.slow
def test_members_of_an_ensemble():
    results = []
    for capture in (False, True):
        fresh_start()

        def member(capture=capture):
            model = Net()
            guide = dvi.MeanFieldGuide(model)
            svi = SVI(model, guide, Adam({"lr": 0.01}), loss=dvi.TaylorELBO())
            fit(svi, sequence(), EPOCHS, progress=False, capture=capture)
            return model, guide

        ensemble = train_ensemble(member, 2)
        x, _ = sequence()[0]
        results.append(dvi.predict(*ensemble, x, seed=0).mean)
    assert torch.equal(*results)
