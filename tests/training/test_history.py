# SPDX-License-Identifier: Apache-2.0
"""The record of a training: its columns, and that it survives as JSON."""

import json
import math

import pytest

from pyro_dvi.training import History, fit
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
