# SPDX-License-Identifier: Apache-2.0
"""Progress bars show on a terminal only."""

import io

import pytest

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
    monkeypatch.setattr("sys.stderr", stream)
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 2)
    assert ("6/6" in stream.getvalue()) is terminal
