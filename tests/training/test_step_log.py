# SPDX-License-Identifier: Apache-2.0
"""Losses that are read later: training does not wait for them, and nothing else differs from ordinary training."""

import signal

import pytest
import torch
from pyro.infer import SVI
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.core.launch import LAUNCHING
from pyro_dvi.errors import DataError, NonFiniteError
from pyro_dvi.objectives.recordings import Recording
from pyro_dvi.training import History, fit, load, step_log
from pyro_dvi.training.routes import Route
from tests import emulated
from tests.training.problems import fresh_start, same, weights_of

EPOCHS, NUM_DATA = 16, 40
X = torch.randn(NUM_DATA, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


@pytest.fixture(autouse=True)
def _launching(monkeypatch):
    """Let all devices launch, and read losses later on the CPU, too."""
    monkeypatch.setattr(Route, "is_read_later", lambda self: self.captured is not None)
    LAUNCHING.update(["cpu", "emulated"])
    yield
    LAUNCHING.difference_update(["cpu", "emulated"])


def made(
    guide=dvi.MeanFieldGuide, elbo=dvi.TaylorELBO, optimizer=None, device="cpu", x=X, y=Y, prior_scale=1.0
):
    """Return a fresh SVI and a loader of four batches, the last of which is smaller."""
    fresh_start()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.SiLU(), nn.Linear(5, 2)).to(device)
    model = dvi.classifier(dvi.to_bayesian_(net, prior_scale), num_data=NUM_DATA)
    svi = SVI(model, guide(model), optimizer or dvi.optim.Adam(0.01), loss=elbo())
    return svi, DataLoader(TensorDataset(x, y), 11, shuffle=True)


def record(history):
    found = history.to_dict()
    return repr({**found, "epochs": {k: v for k, v in found["epochs"].items() if k != "seconds"}})


METHODS = {
    "VL": (dvi.MeanFieldGuide, dvi.TaylorELBO),
    "sampled": (dvi.MeanFieldGuide, dvi.SampledELBO),
    "MNVI": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO),
    "VOGN": (dvi.NaturalGradientGuide, dvi.NaturalGradientELBO),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", METHODS)
def test_numbers_are_those_of_ordinary_steps(name):
    results = []
    for capture in (False, True):
        optimizer = dvi.VOGN({}) if name == "VOGN" else None
        svi, loader = made(*METHODS[name], optimizer)
        svi.optim._launches.take = lambda *_: False  # launched updates round differently
        history = fit(svi, loader, EPOCHS, validate=[(X, Y)], progress=False, capture=capture)
        results.append((record(history), weights_of(svi), torch.rand(1).item()))
    (one, weights, after), (other, others, later) = results
    assert one == other and same(weights, others) and after == later


@pytest.mark.slow
def test_a_resumed_training_equals_one_of_ordinary_steps(tmp_path):
    svi, loader = made()
    ordinary, expected = fit(svi, loader, 2 * EPOCHS, progress=False, capture=False), weights_of(svi)
    svi, loader = made()
    fit(svi, loader, EPOCHS, checkpoint=tmp_path / "run.pt", progress=False)
    svi, loader = made()
    history = load(tmp_path / "run.pt", svi, loader=loader)
    history = fit(svi, loader, EPOCHS, history=history, progress=False)
    assert record(history) == record(ordinary) and same(weights_of(svi), expected)


@pytest.mark.slow
@pytest.mark.skipif(not emulated.AVAILABLE, reason="this torch cannot emulate a device")
@pytest.mark.parametrize("name", METHODS)
def test_an_epoch_reads_once(name, request, monkeypatch):
    monkeypatch.setattr(Route, "doubt", lambda self: None)  # the callback is harmless
    monkeypatch.setattr(Recording, "is_slower", lambda self: False)
    if request.config.getoption("--device") != "emulated":
        pytest.skip("only the emulated device counts reads")
    with emulated.in_use() as device:
        optimizer = dvi.VOGN({}) if name == "VOGN" else None
        svi, loader = made(*METHODS[name], optimizer, device)
        counts = []

        def count(_state):
            counts.append(reads.total())
            reads.clear()

        with emulated.counted_reads() as reads:
            fit(
                svi,
                loader,
                60,
                data_on_device=True,
                progress=False,
                callbacks=[count],
            )
    # The losses of the epoch, whether the parameters are finite, and their mean scale. Comparisons read more.
    assert sorted(counts)[:20] == [3] * 20, counts


def poisoned(what):
    """Return what a training reports whose data are bad in the seventh epoch, with and without captured steps."""
    reports = []
    for capture in (False, True):
        x, y = X.clone(), Y.clone()
        svi, loader = made(x=x, y=y)

        def spoil(state, x=x, y=y):
            if state.epoch == 12:
                what(state, x, y)

        history = History()
        with pytest.raises((NonFiniteError, DataError)) as caught:
            fit(
                svi,
                loader,
                EPOCHS,
                progress=False,
                capture=capture,
                callbacks=[spoil],
                history=history,
            )
        reports.append((type(caught.value), str(caught.value), record(history), weights_of(svi)))
    return reports


def explode(state, x, y):
    with torch.no_grad():
        next(iter(state.guide.parameters())).fill_(torch.inf)


def make_inputs_missing(state, x, y):
    x[23] = torch.nan


def make_a_label_wrong(state, x, y):
    y[23] = 7


@pytest.mark.every(3)
@pytest.mark.parametrize("what", [explode, make_inputs_missing, make_a_label_wrong])
def test_a_failed_step_is_reported_as_without(what):
    ordinary, captured = poisoned(what)
    assert captured[:3] == ordinary[:3]
    assert same(captured[3], ordinary[3])


@pytest.mark.slow
def test_an_epoch_is_repeated_if_a_condition_fails(monkeypatch):
    """Moments of SiLU take a shortcut while all variances are small; here, the inputs become larger."""
    rewound = []
    own = step_log.Rollback.rewind

    def rewind(self):
        rewound.append(own(self))
        return rewound[-1]

    monkeypatch.setattr(step_log.Rollback, "rewind", rewind)
    results = []
    for capture in (False, True):
        x = X / 100
        svi, loader = made(dvi.MeanFieldGuide, dvi.MomentPropagationELBO, x=x, prior_scale=0.1)
        svi.model.net[1] = nn.Identity()

        def enlarge(state, x=x):
            if state.epoch == 13:
                x[7] *= 10_000

        history = fit(svi, loader, 24, progress=False, capture=capture, callbacks=[enlarge])
        results.append((record(history), weights_of(svi)))
    assert rewound
    assert results[0][0] == results[1][0] and same(results[0][1], results[1][1])


@pytest.mark.slow
def test_an_interrupted_epoch_is_in_the_history(monkeypatch):
    svi, loader = made()
    taken, own = [], Route.step

    def step(self, *args):
        taken.append(own(self, *args))
        if len(taken) == 59:
            signal.raise_signal(signal.SIGINT)
        return taken[-1]

    monkeypatch.setattr(Route, "step", step)
    history = fit(svi, loader, EPOCHS, progress=False)
    assert not isinstance(taken[-1], float)  # it was not read at once
    assert history.stopped == "interrupted" and history.step == 59
    assert all(map(torch.isfinite, torch.tensor(history.steps["loss"])))
