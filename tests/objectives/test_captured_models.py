# SPDX-License-Identifier: Apache-2.0
"""Odd models, each trained twice: what is captured is equal to the last bit, and what is not says why."""

import pytest
import torch

from tests.objectives import odd_habits, odd_networks, odd_statements  # noqa: F401 (they fill the table)
from tests.objectives.odd_training import CAPTURED, TABLE, train, verdict

CASES = [pytest.param(case, objective, id=f"{case.name}-{objective}") for case in TABLE.values() for objective in case.objectives]


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize(("case", "objective"), CASES)
def test_captured_training_is_the_ordinary_one(case, objective):
    found = verdict(train(case, objective, capture=False), train(case, objective, capture=True))
    expected = case.otherwise.get(objective, case.expected)
    assert found == CAPTURED if expected == CAPTURED else expected in found and "WRONG" not in found, found
