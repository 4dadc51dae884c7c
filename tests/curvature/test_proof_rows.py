# SPDX-License-Identifier: Apache-2.0
"""Whether rows are those of single examples: every single influence of one on another is seen, rounding is not."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dvi.curvature.per_example.proof import kept_apart, row_weights


def mixed_rows(places: list[Tensor], outputs: Tensor) -> set[int]:
    """Return which of ``places`` have rows that other examples than their own depend on."""
    weights = row_weights(len(outputs), outputs)
    seeds = (torch.ones_like(outputs), weights)
    found = [torch.autograd.grad(outputs, places, seed, retain_graph=True) for seed in seeds]
    pairs = enumerate(zip(*found, strict=True))
    return {n for n, (plain, weighted) in pairs if not kept_apart(plain, weighted, weights)}


def test_two_of_up_to_32_rows_have_weights_of_their_own():
    for count in (1, 2, 11, 32):
        assert len(row_weights(count, torch.zeros(())).unique()) == count
    weights = row_weights(1000, torch.zeros(()))
    equal = (weights == weights.unsqueeze(1)).float().mean()
    assert equal < 0.033  # one of 32, and each with itself
    assert not torch.equal(weights, row_weights(1000, torch.zeros(()), seed=1))


@pytest.mark.parametrize("reader", range(11))
def test_an_example_that_reads_a_single_other_is_found_out(reader):
    x = torch.randn(11, 3, dtype=torch.float64)
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    for other in range(11):
        h, reads = x @ w, torch.eye(11, dtype=torch.float64)
        reads[reader, other] += 1e-3
        found = mixed_rows([h], (reads @ h.tanh()).sum(1))
        assert found == (set() if reader == other else {0})


@pytest.mark.parametrize("share", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_mean_over_the_batch_is_found_out(share, dtype):
    h = torch.randn(500, 4, dtype=dtype, requires_grad=True)
    assert mixed_rows([h], (h - share * h.mean(0)).square().sum(1)) == {0}
    assert mixed_rows([h], h.square().sum(1)) == set()


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_rounding_is_no_influence(scale, autocast):
    """Saturated rows, whose gradients cancel or are too small for their type, and layers in half precision."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GELU(), nn.GroupNorm(2, 4), nn.MaxPool2d(2), nn.Flatten())
    places: list[Tensor] = []
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        places.append(net[:1](torch.randn(300, 1, 8, 8)))
        places.append(net[1:](places[0]))
        places.append(F.layer_norm(nn.Linear(36, 20)(places[1]), (20,)))
        logits = scale * nn.Linear(20, 5)(places[2])
    assert mixed_rows(places, F.log_softmax(logits.float(), -1) @ torch.randn(5)) == set()
