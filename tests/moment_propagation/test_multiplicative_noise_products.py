# SPDX-License-Identifier: Apache-2.0
"""The axis of the inputs of a weight, found from the products of a model that no torch layer describes."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer.autoguide import init_to_mean, init_to_sample
from pyro.nn import PyroModule, PyroSample
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning
from tests.guides.noise import noise_shapes, started

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
SEVERAL = torch.randn(7, 6, 3, generator=torch.Generator().manual_seed(1))
IMAGE = torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(2))
ROWS = torch.tensor([0, 2, 1, 1])


def use(function: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> Callable[[], None]:
    """A functional model whose only weight meets its input in a function."""

    def model() -> None:
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))
        pyro.sample("y", dist.Normal(function(w).sum(), 1.0), obs=torch.tensor(0.0))

    return model


# Function of the weight, its shape, shape of alpha.
USES: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda w: F.linear(X, w), (4, 3), (1, 3)),
    "linear by keyword": (lambda w: F.linear(X, weight=w), (4, 3), (1, 3)),
    "linear of one input": (lambda w: F.linear(X[:, :1], w), (4, 1), (1, 1)),
    "x @ w": (lambda w: X @ w, (3, 4), (3, 1)),
    "x @ w, square": (lambda w: X @ w, (3, 3), (3, 1)),
    "x @ w, one output": (lambda w: X @ w, (3, 1), (3, 1)),
    "x @ w of one input": (lambda w: X[:, :1] @ w, (1, 4), (1, 1)),
    "matmul": (lambda w: torch.matmul(X, w), (3, 4), (3, 1)),
    "mm": (lambda w: X.mm(w), (3, 4), (3, 1)),
    "addmm": (lambda w: torch.addmm(torch.zeros(4), X, w), (3, 4), (3, 1)),
    "w @ x": (lambda w: w @ X.T, (4, 3), (1, 3)),
    "w @ vector": (lambda w: w @ X[0], (4, 3), (1, 3)),
    "x @ w.T": (lambda w: X @ w.T, (3, 3), (1, 3)),
    "linear of w.t()": (lambda w: F.linear(X, w.t()), (3, 3), (3, 1)),
    "contiguous transpose": (lambda w: X @ w.T.contiguous(), (4, 3), (1, 3)),
    "matrix of heads": (lambda w: X @ w.reshape(3, 10), (3, 2, 5), (3, 1, 1)),
    "heads, joined": (lambda w: X[:, :1].expand(6, 10) @ w.flatten(0, 1), (2, 5, 3), (2, 5, 1)),
    "one of a stack": (lambda w: X @ w[1], (7, 3, 4), (1, 3, 1)),
    "scaled": (lambda w: X @ (0.1 * w), (3, 3), (3, 1)),
    "masked and scaled": (lambda w: X @ (w.masked_fill(w < 0, 0.0) * w.new_ones(3, 1)), (3, 4), (3, 1)),
    "einsum": (lambda w: torch.einsum("bi,io->bo", X, w), (3, 4), (3, 1)),
    "einsum, output first": (lambda w: torch.einsum("oi, bi -> bo", w, X), (3, 3), (1, 3)),
    "einsum of heads": (lambda w: torch.einsum("bi,hoi->bho", X, w), (2, 5, 3), (1, 1, 3)),
    "einsum of two inputs": (lambda w: torch.einsum("bi,bj,ijo->bo", X, X, w), (3, 3, 4), (3, 3, 1)),
    "nets with their own inputs": (lambda w: SEVERAL @ w, (7, 3, 4), (7, 3, 1)),
    "nets with one input": (lambda w: X @ w, (7, 3, 4), (1, 3, 1)),
    "baddbmm": (lambda w: torch.baddbmm(torch.zeros(7, 6, 4), SEVERAL, w), (7, 3, 4), (7, 3, 1)),
    "convolution": (lambda w: F.conv2d(IMAGE, w), (5, 4, 3, 3), (1, 4, 1, 1)),
    "grouped convolution": (lambda w: F.conv2d(IMAGE, w, groups=2), (6, 2, 3, 3), (6, 2, 1, 1)),
    "transposed convolution": (lambda w: F.conv_transpose2d(IMAGE, w), (4, 5, 3, 3), (4, 1, 1, 1)),
    "embedding": (lambda w: F.embedding(ROWS, w), (4, 3), (4, 1)),
    "rows of a table": (lambda w: w[ROWS], (4, 3), (4, 1)),
    "bilinear": (lambda w: F.bilinear(X, X, w), (4, 3, 3), (1, 3, 3)),
}  # fmt: skip


@pytest.mark.parametrize(
    "start", [init_to_sample, init_to_mean]
)  # a mean of expanded priors has steps of 0 in memory
@pytest.mark.parametrize("name", USES)
def test_noise_is_per_input_unit(name, start):
    function, shape, expected = USES[name]
    assert noise_shapes(started(use(function, shape), init_loc_fn=start)) == {"w": expected}


UNCLEAR = {
    "no product": (lambda w: (X[:, :, None] * w).sum(1), "suggest no axis"),
    "two layers": (lambda w: (X @ w) @ w.T, r"suggest the axes \[\((0|1),\), \((0|1),\)\]"),
    "dots in the equation": (lambda w: torch.einsum("bi,i...->b...", X, w), "suggest no axis"),
}


@pytest.mark.parametrize("name", UNCLEAR)
def test_where_the_model_does_not_say_it_the_user_is_asked(name):
    function, message = UNCLEAR[name]
    model = use(function, (3, 4))
    with pytest.warns(
        DviWarning, match=f"axis of site 'w', of shape \\(3, 4\\).*{message}.*input_axis={{'w': 0}}"
    ):
        guide = started(model)
    assert noise_shapes(guide) == {"w": (1, 4)}
    pyro.clear_param_store()
    assert noise_shapes(started(model, input_axis={"w": 0})) == {
        "w": (3, 1)
    }  # a warning would be an error here
    pyro.clear_param_store()
    assert noise_shapes(started(model, input_axis={"w": None})) == {}


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.w)


class ByHandInPyro(PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([3, 4]).to_event(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.w)


class Transposed(nn.Linear):
    """A layer of torch by name, whose weight is used the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("first", [ByHand, ByHandInPyro, lambda: Transposed(4, 3, bias=False)])
def test_modules_written_by_hand(first):
    net = nn.Sequential(first(), nn.Linear(4, 2))
    dvi.to_bayesian_(net, include=[nn.Linear, *({ByHand} & {type(net[0])})])
    model = dvi.classifier(net, num_data=6)
    (name,) = {"net.0.w", "net.0.weight"} & noise_shapes(guide := started(model, X, ROWS.new_zeros(6))).keys()
    assert noise_shapes(guide) == {name: (3, 1), "net.1.weight": (1, 4)}
    assert guide._start.products is None, "a guide keeps no values of the run"


def test_noise_of_the_inputs_of_a_product_by_hand():
    """Against noise that multiplies each product of the input: the variance of x @ w is x² @ (alpha w²)."""
    guide = started(use(lambda w: X @ w, (3, 4)))
    with torch.no_grad():
        guide.alphas.w_unconstrained.normal_()
    q = guide.get_posterior()["w"].base_dist
    alpha = guide.alphas.w.detach()[:, 0]
    moments = (X**2 * alpha) @ q.loc.detach() ** 2
    torch.testing.assert_close(X**2 @ (q.variance - q.eps), moments)
