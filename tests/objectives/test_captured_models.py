# SPDX-License-Identifier: Apache-2.0
"""Odd models, each trained twice: what is captured is equal to the last bit, and what is not says why."""

import re

import pytest
import torch
from pyro.infer.autoguide import AutoDelta

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.objectives import Captured, SampledELBO
from tests.objectives import (  # noqa: F401 (they fill the table)
    odd_changes,
    odd_functions,
    odd_habits,
    odd_loops,
    odd_networks,
    odd_statements,
)
from tests.objectives.odd_training import CAPTURED, TABLE, train, verdict

EVERYWHERE = {"dropout"}
LONG = {"residual", "compiled_part"}


CAPTURED_ONES, OTHERS = (
    [name for name, case in TABLE.items() if (case.expected == CAPTURED) is own] for own in (True, False)
)
SOME = {*CAPTURED_ONES[::12], *OTHERS[::5]}


def _is_quick(case, objective):
    first = "map" if "map" in case.objectives else case.objectives[0]
    return case.name not in LONG and case.name in SOME and (objective == first or case.name in EVERYWHERE)


CASES = [
    pytest.param(
        case,
        objective,
        id=f"{case.name}-{objective}",
        marks=[] if _is_quick(case, objective) else [pytest.mark.slow],
    )
    for case in TABLE.values()
    for objective in case.objectives
]


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
    assert "WRONG" not in found
    assert re.search(expected, found), found


def test_second_derivatives_of_a_captured_loss_are_refused():
    odd = TABLE["functional_weights"].make()
    guide, elbo = AutoDelta(odd.model), Captured(SampledELBO())
    for k in range(12):
        loss = elbo.differentiable_loss(odd.model, guide, *odd.batches[k % 4])
    with pytest.raises(UnsupportedError, match="create_graph=True is not supported"):
        torch.autograd.grad(loss, list(guide.parameters()), create_graph=True)
