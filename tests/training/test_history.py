# SPDX-License-Identifier: Apache-2.0
import io
import json
import math
import random

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi.training import EarlyStopping, History, fit
from pyro_dvi.training.random_state import preserve_random_state, random_state, restore_random_state
from tests.training.problems import sequence, svi_of


def test_history_survives_json(tmp_path):
    history = fit(
        svi_of("MeanFieldGuide + TaylorELBO"), sequence(), 2, validate=lambda: math.nan, progress=False
    )
    text = history.to_json(tmp_path / "history.json")
    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    again = History.from_json(tmp_path / "history.json")
    assert again["loss"] == history["loss"]
    assert math.isnan(again["validation_loss"][0])
    assert again.steps["kl"] == history.steps["kl"]
    assert (again.stopped, again.epoch, again.step) == ("epochs", 2, 6)
    assert "2 epochs, 6 steps" in repr(again)


def test_unknown_columns_are_named():
    with pytest.raises(KeyError, match="no column 'los'"):
        History()["los"]


def test_early_stopping_counts():
    stopping = EarlyStopping(patience=2, min_delta=0.5, maximise=True)
    assert stopping.best_epoch([1.0, 1.4, 1.6, 2.0]) == 3
    assert not stopping.exhausted([1.0, 1.4])
    assert stopping.exhausted([1.0, 1.4, 1.1])
    assert stopping.best_epoch([math.nan]) is None
    assert stopping.exhausted([math.nan, math.nan])


def test_every_generator_is_restored():
    generator = torch.Generator()
    loader = DataLoader(TensorDataset(torch.arange(50)), batch_size=50, shuffle=True, generator=generator)

    def draw():
        return [
            random.random(),
            float(np.random.rand()),
            float(torch.rand(())),
            *next(iter(loader))[0].tolist(),
        ]

    np.random.randn()  # leaves a second Gaussian waiting
    state = random_state(loader)
    first = draw()
    second = draw()
    assert first != second
    restore_random_state(state, loader)
    assert draw() == first
    with preserve_random_state(loader):
        draw()
    assert draw() == second


class Stream(io.StringIO):
    """Takes the place of the standard error stream."""

    def __init__(self, terminal):
        super().__init__()
        self.terminal = terminal

    def isatty(self):
        return self.terminal


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_bar_shows_on_a_terminal_only(monkeypatch, terminal):
    stream = Stream(terminal)
    monkeypatch.setattr("sys.stderr", stream)
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 2)
    assert ("6/6" in stream.getvalue()) is terminal
