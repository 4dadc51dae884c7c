# SPDX-License-Identifier: Apache-2.0
"""The example of training by several processes runs in one; tests/distributed has several."""

import runpy

import pytest

from tests.examples.scripts import EXAMPLES


@pytest.mark.distributed
def test_trains_in_one_process(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["distributed.py", "--epochs", "1", "--num-data", "300"])
    runpy.run_path(str(EXAMPLES / "distributed.py"), run_name="__main__")
    shown = capsys.readouterr().out
    assert "1 process(es): loss" in shown and "accuracy" in shown
