# SPDX-License-Identifier: Apache-2.0
"""Launches have fixed arguments and results; only the capture itself needs CUDA, and the rest is tested everywhere."""

import pytest
import torch
from torch import nn

from pyro_dvi.core import launch
from pyro_dvi.core.launch import FixedCall, Launch
from pyro_dvi.core.recorder import Recorder
from pyro_dvi.errors import UnsupportedError


def launch_of(function, *inputs, fed=()):
    """Record a function of tensors, and prepare its launch."""
    with Recorder(inputs) as recorder:
        results = function(*inputs)
    written = {k for k, value in enumerate(inputs) if recorder.writes(value)}
    return Launch(recorder.module(results), inputs, fed, written, results[0].device)


def test_results_are_the_same_tensors_each_time(device):
    w, x = torch.ones(3, device=device), torch.arange(3.0, device=device)
    made = launch_of(lambda w, x: [w * x, (w + x).sum()], w, x, fed=[1])
    first = made([w, x])
    kept = [result.clone() for result in first]
    again = made([w, x + 1])
    assert all(map(lambda a, b: a is b, first, again))
    torch.testing.assert_close(kept, [x, (1 + x).sum()])
    torch.testing.assert_close(list(first), [x + 1, (2 + x).sum()])


def test_what_is_not_fed_is_read_where_it_is(device):
    w, x = torch.ones(3, device=device), torch.arange(3.0, device=device)
    made = launch_of(lambda w, x: [w * x], w, x, fed=[1])
    w.fill_(5.0)
    torch.testing.assert_close(made([w, x])[0], 5 * x)
    assert made.fits([w, x + 1])
    assert not made.fits([w.clone(), x])


def test_writes_take_place_once(device):
    count, x = torch.zeros(2, device=device), torch.ones(2, device=device)
    made = launch_of(lambda count, x: [count.add_(x) * 2], count, x, fed=[1])
    count.zero_()  # the recording has counted, too
    for k in range(1, 4):
        torch.testing.assert_close(made([count, x])[0], torch.full((2,), 2.0 * k, device=device))
    assert count.tolist() == [3.0, 3.0]


def test_random_numbers_are_those_of_ordinary_calls(device):
    x = torch.ones(50, device=device)

    def draw(x):
        return [nn.functional.dropout(x + torch.randn_like(x))]

    made = launch_of(draw, x)
    for seed in (3, 4):
        torch.manual_seed(seed)
        expected = [draw(x)[0] for _ in range(3)]
        after = torch.rand(2, device=device)
        torch.manual_seed(seed)
        found = [made([x])[0].clone() for _ in range(3)]
        assert all(map(torch.equal, found, expected))
        assert torch.equal(torch.rand(2, device=device), after)


def test_the_host_works_before_the_launch(device):
    if device.type == "cpu":
        pytest.skip("nothing to separate")
    x, scale, table = torch.ones(3, device=device), torch.tensor(2.0), torch.arange(5.0)
    index = torch.tensor([2, 0])

    def function(x, scale, table):
        shift = torch.randint(0, 100, (3,)).to(x.device)  # drawn on the CPU
        constant = torch.linspace(0, 1, 3).to(x.device)
        return [x * scale + shift + constant, table.to(x.device)[index.to(x.device)]]

    torch.manual_seed(1)
    made = launch_of(function, x, scale, table, fed=[2])
    torch.manual_seed(2)
    expected = [[r.clone() for r in function(x * 1, scale * 3, table + k)] for k in range(3)]
    torch.manual_seed(2)
    scale.mul_(3)
    for k in range(3):
        found = made([x, scale, table + k])
        torch.testing.assert_close(list(found), expected[k], rtol=0, atol=0)


def test_the_host_must_not_read_the_device(device):
    if device.type == "cpu":
        pytest.skip("nothing to separate")
    x = torch.ones(3, device=device)
    with pytest.raises(UnsupportedError, match="an operator on the CPU reads values of the device"):
        launch_of(lambda x: [x * x.sum().cpu().exp().to(x.device)], x)
    with pytest.raises(UnsupportedError, match="a result is on the CPU"):
        launch_of(lambda x, y: [x * 2, y * 2], x, torch.ones(2))


@pytest.mark.cuda
def test_a_capture_that_fails_leaves_everything_working():
    device = torch.device("cuda", 0)
    draw = FixedCall(lambda: [torch.randn(4, device=device)], lambda: [torch.randn(4, device=device)], device)
    torch.manual_seed(3)
    expected = draw()[0].clone()
    before = launch._captures["failed"]
    for function in (
        lambda: [torch.ones(3, device=device).nonzero()],
        lambda: [torch.randn(2, device=device).cpu()],
    ):
        with pytest.raises(UnsupportedError, match="waits for the device"):
            FixedCall(function, function, device)
    assert draw.is_valid and launch._captures["failed"] == before
    rehearsed: list[torch.Tensor] = []
    with pytest.raises(UnsupportedError, match="cannot be captured"):
        FixedCall(lambda: [torch.randn(2, device=device).cpu()], lambda: rehearsed, device)
    assert not draw.is_valid
    torch.manual_seed(3)
    torch.testing.assert_close(torch.randn(4, device=device), expected)
    again = FixedCall(
        lambda: [torch.randn(4, device=device)], lambda: [torch.randn(4, device=device)], device
    )
    torch.manual_seed(3)
    torch.testing.assert_close(again()[0], expected)
