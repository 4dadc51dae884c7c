# SPDX-License-Identifier: Apache-2.0
"""The example of training by several processes runs in one; tests/distributed has several."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "examples" / "distributed.py"


@pytest.mark.distributed
def test_trains_in_one_process():
    options = ["--epochs", "1", "--num-data", "300"]
    done = subprocess.run([sys.executable, str(SCRIPT), *options], capture_output=True, text=True, check=True)
    assert "1 process(es): loss" in done.stdout and "accuracy" in done.stdout
