# SPDX-License-Identifier: Apache-2.0
"""What every test starts from: a seeded generator, an empty parameter store, float32, and no display."""

import contextlib
import gc
import os
import random
import sys
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pyro
import pytest
import torch

from pyro_dvi.core.undisturbed import seeder
from tests import emulated

SEED = 20211

# Plots are drawn into memory: a test machine has no display. Set before anything imports matplotlib.
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device",
        choices=["emulated", "cuda", "cpu"],
        default="emulated",
        help="where the tests with the fixture `device` run (default: a device that tests/emulated pretends; "
        "the CPU where torch is too old for that)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Make the emulated device known, and share the cores between the workers of ``pytest -n``."""
    if config.getoption("--device") == "emulated":
        emulated.register()
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_finish() -> None:
    """Spare the garbage collector the modules of torch and Pyro, which takes a third of a second each time."""
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and leave most cases of an ``every(n)`` to the slow tests."""
    cases: Counter[str] = Counter()
    missing = {
        "cuda": None
        if items and items[0].config.getoption("--device") == "cuda"
        else "long; runs with --device cuda",
        "distributed": None if torch.distributed.is_available() else "torch was built without distributed",
    }
    for item in items:
        if every := item.get_closest_marker("every"):
            function = item.nodeid.partition("[")[0]
            if cases[function] % every.args[0]:
                item.add_marker("slow")
            cases[function] += 1
        if "device" in getattr(item, "fixturenames", ()):
            item.add_marker("device")
        for marker, reason in missing.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    """Give the device that ``--device`` names: a GPU, or the one that stands for it on any machine."""
    name = request.config.getoption("--device")
    if name == "emulated" and not emulated.AVAILABLE:
        name = "cpu"  # an older torch
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    with emulated.in_use() if name == "emulated" else contextlib.nullcontext():
        yield torch.empty(0, device=name).device


@pytest.fixture
def double() -> None:
    """Make float64 the default dtype of the test; the next one starts in float32."""
    torch.set_default_dtype(torch.float64)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Give every test the same start, whatever ran before it.

    Pyro keeps parameters and settings in module globals, so a guide of one test could otherwise train the
    parameters of another of the same name.
    """
    pyro.clear_param_store()
    random.seed(SEED)
    np.random.seed(SEED)
    seeder()(SEED)  # of torch: its own function takes a millisecond where there is no accelerator
    torch.set_default_dtype(torch.float32)
    pyro.enable_validation(True)  # Pyro's and torch's: contexts that switch one may leave the other behind
    with pyro.settings.context(module_local_params=False):
        yield
    pyro.clear_param_store()
    torch.set_default_dtype(torch.float32)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
