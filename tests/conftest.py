# SPDX-License-Identifier: Apache-2.0
"""What every test starts from: a seeded generator, an empty parameter store, float32, and no display."""

import os
import sys
from collections.abc import Iterator

import pyro
import pytest
import torch

# Plots are drawn into memory: a test machine has no display. Set before anything imports matplotlib.
os.environ.setdefault("MPLBACKEND", "Agg")


def pytest_configure(config: pytest.Config) -> None:
    """Share the cores between the workers of ``pytest -n``: each would otherwise take all of them."""
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run."""
    missing = {
        "cuda": None if torch.cuda.is_available() else "needs a CUDA device",
        "distributed": None if torch.distributed.is_available() else "torch was built without distributed",
    }
    for item in items:
        for marker, reason in missing.items():
            if reason is not None and item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Give every test the same start, whatever ran before it.

    Pyro keeps parameters and settings in module globals, so a guide of one test could otherwise train the
    parameters of another of the same name.
    """
    pyro.clear_param_store()
    pyro.set_rng_seed(20211)
    torch.set_default_dtype(torch.float32)
    pyro.enable_validation(True)  # Pyro's and torch's: contexts that switch one may leave the other behind
    with pyro.settings.context(module_local_params=False):
        yield
    pyro.clear_param_store()
    torch.set_default_dtype(torch.float32)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")
