# SPDX-License-Identifier: Apache-2.0
"""Progress bars show on a terminal or in a notebook."""

import io

import pytest

from pyro_dvi.core.progress import progress_bar
from pyro_dvi.training import fit
from tests.training.problems import sequence, svi_of


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
    monkeypatch.setattr("pyro_dvi.core.progress.DELAY", 0.0)
    monkeypatch.setattr("sys.stderr", stream)
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 2)
    assert ("6/6" in stream.getvalue()) is terminal


def test_short_work_has_no_bar(monkeypatch):
    stream = Stream(terminal=True)
    monkeypatch.setattr("sys.stderr", stream)
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 2)
    assert stream.getvalue() == ""


def test_a_bar_may_be_hidden():
    assert list(progress_bar(False, of=range(3))) == [0, 1, 2]
