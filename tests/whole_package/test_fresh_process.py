# SPDX-License-Identifier: Apache-2.0
"""A step does not depend on earlier steps of the process: every objective, in every precision, on six networks."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.whole_package.fresh_process import METHODS, NETWORKS, REGIMES, Cell, moved

NAMES = [name for name in METHODS if name != "Taylor, Hessian"]  # minutes on the wide network

# Three of the networks with each objective, and every regime with every network.
SOME = [
    (method, list(NETWORKS)[(i + 2 * k) % 6], REGIMES[(i // 2 - k) % 6])
    for i, method in enumerate(NAMES)
    for k in range(3)
]
ALL = [(method, network, regime) for method in NAMES for network in NETWORKS for regime in REGIMES]


@pytest.mark.parametrize(
    "cells",
    [pytest.param(SOME, marks=pytest.mark.slow), pytest.param(ALL, marks=pytest.mark.soak)],
    ids=["some", "all"],
)
def test_steps_are_those_of_a_fresh_process(cells: list[Cell], tmp_path: Path) -> None:
    """Loss, gradients and predictions are equal to the last bit."""
    here, states = zip(*map(moved, cells), strict=True)
    torch.save(list(zip(cells, states, strict=True)), file := tmp_path / "cells")
    subprocess.run(
        [sys.executable, "-m", "tests.whole_package.fresh_process", file, str(torch.get_num_threads())],
        check=True,
    )
    wrong = {
        cell: [name for name in one.keys() | other.keys() if not torch.equal(one[name], other[name])]
        for cell, one, other in zip(cells, here, torch.load(file), strict=True)
        if one.keys() != other.keys() or not all(map(torch.equal, one.values(), other.values()))
    }
    assert not wrong
