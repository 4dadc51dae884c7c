# SPDX-License-Identifier: Apache-2.0
"""Squared gradients of layers as users write them, against a loop over examples."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dvi.bayesian import classifier, to_bayesian_
from tests.objectives.loops import M, N, assert_equal, squares_at_mean

pytestmark = pytest.mark.usefixtures("double")


class Written(nn.Module):
    """Parameters by shape, and a function of them."""

    def __init__(self, call: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.call = call
        self.weights = nn.ParameterList([torch.randn(shape) for shape in shapes])
        self.head = nn.Linear(shapes[0][0], 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.call(x, *self.weights))


class Around(nn.Module):
    """A layer, and a function of it."""

    def __init__(self, layer: nn.Module, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def recurrent(cell: Any, x: Tensor) -> Tensor:
    h = None
    for t in range(x.shape[1]):
        h = cell(x[:, t], h)
    return h


def frozen(net: nn.Sequential) -> nn.Sequential:
    net[0].requires_grad_(False)
    return net


def tied(net: nn.Sequential) -> nn.Sequential:
    net[2].weight = net[0].weight
    return net


ROWS, SEQUENCES, TOKENS = (
    torch.randn(M, 3).double(),
    torch.randn(M, 4, 3).double(),
    torch.arange(M * 4).reshape(M, 4) % 7,
)
PICTURES = torch.randn(M, 1, 4, 4).double()
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "padding": (
        lambda: nn.Sequential(nn.Embedding(7, 3, padding_idx=0), nn.Flatten(), nn.Linear(12, 2)),
        TOKENS,
    ),
    "embedding bag": (lambda: nn.Sequential(nn.EmbeddingBag(7, 3), nn.Linear(3, 2)), TOKENS),
    "weight norm": (
        lambda: Written(lambda x, v, g: F.linear(x, g * v / v.norm(dim=1, keepdim=True)), (4, 3), (4, 1)),
        ROWS,
    ),
    "transposed": (lambda: Written(lambda x, w: x @ w.T, (4, 3)), ROWS),
    "class token": (
        lambda: Written(
            lambda x, c, p: (torch.cat([c.expand(len(x), -1, -1), x], 1) + p).mean(1)[:, :1],
            (1, 1, 3),
            (1, 5, 3),
        ),
        SEQUENCES,
    ),
    "GRU cell": (lambda: Around(nn.GRUCell(3, 2), recurrent), SEQUENCES),
    "rows in chunks": (
        lambda: Around(nn.Linear(3, 2), lambda layer, x: torch.cat([layer(x[:2]), layer(x[2:])])),
        ROWS,
    ),
    "rows twice": (
        lambda: Around(nn.Linear(3, 2), lambda layer, x: layer(torch.cat([x, x**2])).reshape(2, M, 2).sum(0)),
        ROWS,
    ),
    "rows by vmap": (lambda: Around(nn.Linear(3, 2), lambda layer, x: torch.vmap(layer)(x)), ROWS),
    "rows in another order": (
        lambda: Around(nn.Linear(3, 2), lambda layer, x: layer(x.flip(0)).flip(0)),
        ROWS,
    ),
    "circular padding": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 2, 3, padding=1, padding_mode="circular"), nn.Flatten(), nn.Linear(32, 2)
        ),
        PICTURES,
    ),
    "frozen layer": (lambda: frozen(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), ROWS),
    "tied layers": (
        lambda: tied(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))),
        ROWS,
    ),
}


@pytest.mark.filterwarnings("ignore:.*padding row:pyro_dvi.errors.DviWarning")
@pytest.mark.parametrize("name", CASES)
def test_squares_of_a_module_are_those_of_a_loop(name):
    make, x = CASES[name]
    net = to_bayesian_(make(), prior_scale=1.0, include=nn.Module)
    found, exact = squares_at_mean(classifier(net, num_data=N), x, torch.arange(M) % 2)
    assert_equal(found, exact)
    assert any(value.abs().max() > 0 for value in exact.values())
