# SPDX-License-Identifier: Apache-2.0
"""A recorded function gives what the function gives, for any number of rows."""

import pytest
import torch

from pyro_dvi.core.recorder import is_recording
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.predictive.predictor import recorded

WEIGHT = torch.tensor([[1.0, -2.0], [0.5, 3.0]])


def with_several_results(x):
    values, places = (x @ WEIGHT.exp().softmax(0)).max(-1)
    low, high = x.sort(0)[0].chunk(2, -1)
    return [values, places, low + high]


def filled_in_place(x):
    out = torch.zeros(len(x), 3)
    out[:, :2] = x
    out[:, 2].copy_(x.sum(-1)).mul_(2).clamp_(min=0)
    torch.add(out, 1.0, out=out)
    return [out, out.T.reshape(-1)]


def in_a_buffer_of_constants(x):
    noise = torch.full((2,), 2.0).add_(1.0)  # nothing of it depends on the inputs
    return [x * noise, noise.expand(len(x) + 1, 2).sum(0)]


def by_number_of_rows(x):
    return [x / len(x), torch.arange(2 * len(x) - 1), x[:-1].cumsum(0), x.reshape(-1, len(x))]


def inputs(rows):
    return [torch.randn(rows, 2, generator=torch.Generator().manual_seed(rows))]


FUNCTIONS = [with_several_results, filled_in_place, in_a_buffer_of_constants, by_number_of_rows]


@pytest.mark.parametrize("function", FUNCTIONS)
def test_results_are_those_of_the_function(function):
    module = recorded(function, *map(inputs, (4, 5, 7)))
    for rows in (1, 2, 9, 9):  # twice, since nothing is kept
        torch.testing.assert_close(list(module(*inputs(rows))), function(*inputs(rows)))


def test_what_only_constants_decide_is_computed_once():
    module = recorded(with_several_results, *map(inputs, (4, 5, 7)))
    assert not [node for node in module.graph.nodes if "softmax" in node.name]
    torch.testing.assert_close(list(module.buffers()), [WEIGHT.exp().softmax(0)])


def test_says_so_while_it_records():
    seen = []

    def function(x):
        seen.append(is_recording())
        return [x]

    recorded(function, *map(inputs, (4, 5, 7)))
    assert seen == [True] * 4 and not is_recording()


def test_a_changed_constant_is_refused_even_through_a_view():
    held = torch.zeros(4)

    def function(x):
        held[1:].copy_(x[0, 0].expand(3))
        return [x + held.sum()]

    with pytest.raises(UnsupportedError, match="changes a stored tensor"):
        recorded(function, *map(inputs, (4, 5, 7)))


def test_reads_are_refused_even_if_the_error_is_caught():
    def function(x):
        try:
            return [x * 2] if x.sum() > 0 else [x * 3]
        except Exception:
            return [x]

    with pytest.raises(UnsupportedError, match="Python reads a value"):
        recorded(function, *map(inputs, (4, 5, 7)))
