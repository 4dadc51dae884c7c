# SPDX-License-Identifier: Apache-2.0
"""A recorded block is replayed with other inputs, or refused by name."""

import pytest
import torch

from pyro_dvi.core.recorder import Recorder
from pyro_dvi.errors import UnsupportedError

HELD = torch.zeros(2)


def module_of(function, *inputs):
    with Recorder(inputs) as recorder:
        results = function(*inputs)
    return recorder.module(results)


def test_constants_of_the_block_may_be_written_to():
    def function(x):
        total = torch.tensor([1.0, 2.0])
        total += x
        return [total, x * torch.tensor([3.0, 4.0])]

    module, x = module_of(function, torch.zeros(2)), torch.ones(2)
    for _ in range(2):  # the constant is as it was
        torch.testing.assert_close(module(x), function(x))


def test_what_is_held_is_seen_as_it_is_later():
    module = module_of(lambda x: [x + HELD], torch.zeros(2))
    HELD.fill_(5.0)
    torch.testing.assert_close(module(torch.ones(2)), [torch.full((2,), 6.0)])


def by_value(x):
    return [x if x.sum() > 0 else -x]


def by_value_through_a_view(x):
    out = torch.zeros(3)
    out[:2].copy_(x)
    return [x if out.sum() > 0 else -x]


def by_draw(x):
    return [x if torch.rand(()) > 0.5 else -x]


def with_memory(x):
    return [HELD.copy_(x)]


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (by_value, r"Python reads a value in test_recorder.py, line \d+: return \[x if x.sum"),
        (
            by_value_through_a_view,
            r"Python reads a value in test_recorder.py, line \d+: return \[x if out.sum",
        ),
        (by_draw, r"Python reads a value in test_recorder.py, line \d+: return \[x if torch.rand"),
        (lambda x: [x[x > 0]], "a shape depends on values in test_recorder.py"),
        (with_memory, "writes to a tensor that belongs to no module"),
    ],
)
def test_refusals_name_the_line(function, match):
    with pytest.raises(UnsupportedError, match=match):
        module_of(function, torch.ones(2))


def test_owned_results_share_no_memory():
    x = torch.ones(3)
    with Recorder([x]) as recorder:
        one, again = 2 * x, 2 * x
    found = recorder.module([], [one, again, x])(x)
    assert len({result.data_ptr() for result in (*found, x)}) == 4
    assert [result.tolist() for result in found] == [[2.0] * 3, [2.0] * 3, [1.0] * 3]
