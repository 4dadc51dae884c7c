# SPDX-License-Identifier: Apache-2.0
"""An epoch that was interrupted begins anew, and its history goes on."""

import pytest

from pyro_dvi.training import History, fit, load
from tests.training.problems import Interrupting, fresh_start, sequence, svi_of


def test_an_interrupted_epoch_begins_anew(tmp_path):
    svi = svi_of("AutoNormal + Trace_ELBO")
    history = fit(svi, Interrupting(sequence(), 6), 3, checkpoint=tmp_path / "x.pt", progress=False)
    assert (history.stopped, history.epoch, history.step) == ("interrupted", 1, 5)
    fresh_start()
    again = svi_of("AutoNormal + Trace_ELBO", seed=5)
    history = load(tmp_path / "x.pt", again)
    fit(again, sequence(), 2, history=history, progress=False)
    assert (history.stopped, history.epoch, history.step) == ("epochs", 3, 11)
    assert history.epochs["step"] == [3, 8, 11]


def test_an_error_of_the_loader_leaves_a_history_that_goes_on():
    def failing():
        yield from sequence()[:2]
        raise OSError("the disk is away")

    svi, history = svi_of("AutoNormal + Trace_ELBO"), History()
    with pytest.raises(OSError, match="the disk is away"):
        fit(svi, failing(), 1, history=history, progress=False)
    fit(svi, sequence(), 1, history=history, progress=False)
    assert (history.epoch, history.step) == (1, 5)
