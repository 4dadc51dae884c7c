# SPDX-License-Identifier: Apache-2.0
"""The record of a training: its columns, and the plain values of which it can be rebuilt."""

import json
import math

from pyro_dvi.training import History, fit
from tests.training.problems import sequence, svi_of


def test_history_survives_as_plain_values():
    history = fit(
        svi_of("MeanFieldGuide + TaylorELBO"), sequence(), 2, validate=lambda: math.nan, progress=False
    )
    again = History.from_dict(json.loads(json.dumps(history.to_dict())))
    assert again["loss"] == history["loss"]
    assert math.isnan(again["validation_loss"][0])
    assert again.steps["kl"] == history.steps["kl"]
    assert (again.stopped, again.epoch, again.step) == ("epochs", 2, 6)
    assert "2 epochs, 6 steps" in repr(again)
