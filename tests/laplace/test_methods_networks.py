# SPDX-License-Identifier: Apache-2.0
"""Methods on a network with convolutions, normalisation and dense layers."""

import math
from dataclasses import dataclass
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn

from pyro_dvi import to_bayesian_
from pyro_dvi.laplace import GGN, Dense, Diagonal, Hessian, LaplaceGuide, Method
from pyro_dvi.laplace.energy.precision import PrecisionMatrix
from pyro_dvi.laplace.energy.query import Query
from tests.laplace.cases import CASES, assert_within, fit, query_of


@dataclass
class Network:
    """A classifier with convolutions, normalisation and dense layers, and some data for it."""

    dtype: torch.dtype = torch.float64
    device: torch.device | str = "cpu"
    num_data: int = 14

    def __post_init__(self) -> None:
        torch.manual_seed(6)
        layers = [
            nn.Conv2d(1, 3, 3),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(12, 4),
        ]
        self.net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(4, 3)).to(self.device, self.dtype)
        to_bayesian_(self.net)
        self.x = torch.randn(self.num_data, 1, 6, 6).to(self.device, self.dtype)
        self.y = torch.randint(3, (self.num_data,), device=self.device)

    def model(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.net(x)
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    @property
    def batches(self) -> list:
        return list(zip(self.x.split(5), self.y.split(5), strict=True))

    def guide(self) -> LaplaceGuide:
        guide = LaplaceGuide(self.model)
        guide.initialize(self.x, self.y)
        return guide


def rows_by_products(query: Query) -> Tensor:
    """Rows of the Jacobian as products with unit vectors."""
    units = torch.eye(query.mean.numel(), dtype=query.mean.dtype)
    return query.transposed(units.unflatten(1, query.mean.shape))


def every_third(*shape: int) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape) % 3 == 1


MASKS = {
    "0.weight": every_third(3, 1, 3, 3),
    "0.bias": every_third(3),
    "5.weight": every_third(4, 12),
    "7.*": True,
}


@pytest.mark.every(3)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("subset", [None, "7.*", "*.bias", MASKS], ids=["all", "last", "biases", "masks"])
def test_matrix_and_rows_from_single_examples_are_those_of_products(dtype: torch.dtype, subset: Any) -> None:
    network = Network(dtype)
    guide = network.guide()
    energy = guide.energy(network.batches, subset=subset)
    local = energy.at(energy.start)
    expected = PrecisionMatrix.matrix(GGN(), local)
    tolerance = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 1e-9, "atol": 1e-10}
    found = GGN().matrix(local)
    assert found.dtype is torch.float64
    torch.testing.assert_close(found.to(expected), expected, **tolerance)
    posterior = fit(guide, network.batches, Diagonal(), subset=subset)
    torch.testing.assert_close(posterior.precision, expected.diagonal().to(posterior.precision), **tolerance)
    query = Query(network.model, (network.x,), guide.unconstrained_mode(), energy.layout)
    assert query.examples.cheap
    rows = torch.cat(list(query.rows(8)))
    torch.testing.assert_close(rows, rows_by_products(query), **tolerance)


def test_the_matrix_of_masks_has_rows_and_columns_of_the_whole() -> None:
    network = Network()
    guide = network.guide()
    whole, part = (guide.energy(network.batches, subset=subset) for subset in (None, MASKS))
    numbers = whole.layout.named(torch.arange(whole.layout.size))
    places = part.layout.flatten(part.layout.pieces(numbers))
    assert places.numel() == 9 + 1 + 16 + 15
    for curvature in (GGN(), Hessian()):
        expected = curvature.matrix(whole.at(whole.start))[places][:, places]
        torch.testing.assert_close(curvature.matrix(part.at(part.start)), expected)


@pytest.mark.every(4)
@pytest.mark.parametrize("name", [n for n, case in CASES.items() if n != "kronecker"])
def test_predictions_with_masks_are_those_of_the_rows(name: str) -> None:
    network, case = Network(), CASES[name]
    guide = network.guide()
    posterior = fit(guide, network.batches, case.method, subset=MASKS, seed=5)
    query = guide.query(network.x[:4], subset=MASKS)
    rows = rows_by_products(query).reshape(4, 3, -1)
    local = guide.energy(network.batches, subset=MASKS)
    precision = PrecisionMatrix.matrix(GGN(), local.at(local.start))
    precision = precision.diagonal().diag() if name == "diagonal" else precision
    assert_within(posterior.covariance(query), rows @ torch.linalg.solve(precision, rows.mT), case)
    flat = rows.flatten(0, 1)
    assert_within(posterior.joint_covariance(query), flat @ torch.linalg.solve(precision, flat.T), case)


@pytest.mark.filterwarnings("ignore:.*disagree with the gradient:pyro_dvi.errors.DviWarning")
def test_examples_that_see_the_next_but_one_are_not_taken_apart() -> None:
    """Pairs (0, 2), (1, 3), (4, 6), ..."""
    torch.manual_seed(4)
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1)).double()
    to_bayesian_(net)
    x, y = torch.randn(8, 2, dtype=torch.float64), torch.randn(8, dtype=torch.float64)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        h = net[0](x).tanh().reshape(-1, 2, 2, 4)
        f = net[1]((h + 0.5 * h.flip(1)).reshape(-1, 4))[:, 0]
        with pyro.plate("data", 8, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = LaplaceGuide(model)
    guide.initialize(x, y)
    energy = guide.energy([(x, y)])
    local = energy.at(energy.start)
    torch.testing.assert_close(GGN().matrix(local), PrecisionMatrix.matrix(GGN(), local))
    diagonal = fit(guide, [(x, y)], Diagonal()).precision
    torch.testing.assert_close(diagonal, PrecisionMatrix.matrix(GGN(), local).diagonal())
    query = query_of(guide, model, x)
    torch.testing.assert_close(torch.cat(list(query.rows(8))), rows_by_products(query))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_last_layer_of_a_classifier(name: str, dtype: torch.dtype, device: torch.device) -> None:
    network, case = Network(dtype, device), CASES[name]
    guide = network.guide()
    expected = guide_covariance(guide, network, Dense())
    found = guide_covariance(guide, network, case.method)
    assert found.dtype == dtype and found.shape == (network.num_data, 3, 3)
    assert bool((torch.linalg.eigvalsh(found) > 0).all())
    if case.exact:
        bound = 5 * case.relative_error if case.relative_error else {torch.float32: 1e-3}.get(dtype, 1e-6)
        spread = torch.diagonal(expected, dim1=1, dim2=2).sqrt()
        error = (found - expected) / (spread.unsqueeze(-1) * spread.unsqueeze(-2))
        assert float(error.abs().max()) < bound


def guide_covariance(guide: LaplaceGuide, network: Network, method: Method) -> Tensor:
    fit(guide, network.batches, method, subset="7.*", seed=5)
    return guide.predictive(network.x).covariance


def test_the_backward_pass_of_a_subset_stops_at_it() -> None:
    network = Network()
    energy = network.guide().energy(network.batches, subset="7.*")
    _, run = next(iter(energy.runs(energy.start)))
    names, stack = set(), [run.sites[0].fn.logits.grad_fn]
    while stack:
        node = stack.pop()
        if node is not None:
            names.add(node.name())
            stack.extend(parent for parent, _ in node.next_functions)
    assert "AddmmBackward0" in names and "ConvolutionBackward0" not in names and "TanhBackward0" not in names
