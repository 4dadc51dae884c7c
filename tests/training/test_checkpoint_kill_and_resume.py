# SPDX-License-Identifier: Apache-2.0
"""A run that is killed at any moment, and taken up in a new process, gives the numbers of one that was left alone."""

import multiprocessing
import random
import time

import pytest
import torch

from tests.training.problems import same
from tests.training.resumable import METHODS, train

pytestmark = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="kills processes that a server forks"
)
KILLS = [pytest.param(1, id="once"), pytest.param(20, id="20 times", marks=pytest.mark.soak)]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """New processes of one that has imported everything: each would otherwise take seconds for that."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.training.resumable", "torch._dynamo"])
    train("VOGN", tmp_path_factory.mktemp("imports"))  # before times are measured
    return context


@pytest.mark.slow
@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("method", METHODS)
def test_a_killed_run_ends_bit_for_bit_as_one_that_was_left_alone(processes, method, kills, tmp_path):
    started = time.perf_counter()
    train(method, alone := _folder(tmp_path / "alone"))
    seconds = time.perf_counter() - started
    expected = torch.load(alone / "result.pt", weights_only=True)
    draw, killed, runs = random.Random(f"{method} {kills}"), 0, 0
    while killed < kills or runs == 0:
        folder = _folder(tmp_path / f"killed {runs}")
        while not (folder / "result.pt").exists():
            begun = processes.Event()
            process = processes.Process(target=train, args=(method, folder, begun))
            process.start()
            assert begun.wait(300)
            if killed < kills:
                time.sleep(draw.uniform(0, seconds))
                killed += process.is_alive()
                process.kill()
            process.join()
            assert process.exitcode in (0, -9)
        result = torch.load(folder / "result.pt", weights_only=True)
        assert result["history"] == expected["history"]
        assert same(result["weights"], expected["weights"])
        assert torch.equal(result["variance"], expected["variance"])
        runs += 1


def _folder(path):
    path.mkdir()
    return path
