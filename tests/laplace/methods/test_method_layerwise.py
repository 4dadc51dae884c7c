# SPDX-License-Identifier: Apache-2.0
"""Covariances of outputs by layers against those from the rows of the Jacobian."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pyro_dvi
from pyro_dvi.bayesian import classifier, regressor, to_bayesian_
from pyro_dvi.laplace import Dense, Diagonal, KroneckerFactored, LaplaceGuide, Method
from pyro_dvi.laplace.methods.full_and_low_rank import DensePosterior
from pyro_dvi.laplace.methods.method import LaplacePosterior
from tests.laplace.cases import fit, query_of
from tests.laplace.problems import SineRegression
from tests.laplace.test_methods_networks import Network, rows_by_products

METHODS = [Dense(), Diagonal(), KroneckerFactored()]


def convolutions() -> tuple[LaplaceGuide, Callable, list, Tensor]:
    """Convolutions with positions, normalisation without factors, dense layers; more rows than latents."""
    network = Network()
    return network.guide(), network.model, network.batches, torch.randn(40, 1, 6, 6, dtype=torch.float64)


def inputs_first() -> tuple[LaplaceGuide, Callable, list, Tensor]:
    """Weights that are laid out with inputs first; one is a vector."""
    problem = SineRegression(hidden=5)
    x = torch.linspace(-5, 5, 24, dtype=torch.float64).unsqueeze(-1)
    return problem.trained(60), problem.model, problem.batches, x


class Shared(nn.Module):
    """A layer that is used twice, before one that is used once."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.once = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.once(self.twice(self.twice(x).tanh()).tanh())


def shared() -> tuple[LaplaceGuide, Callable, list, Tensor]:
    torch.manual_seed(1)
    x, y = torch.randn(9, 3, dtype=torch.float64), torch.randint(2, (9,))
    model = classifier(to_bayesian_(Shared().double()), num_data=9)
    guide = LaplaceGuide(model)
    guide.initialize(x, y)
    return guide, model, [(x, y)], torch.randn(12, 3, dtype=torch.float64)


def from_rows(posterior: LaplacePosterior, rows: Tensor, size: int) -> Tensor:
    """The covariance of each example from dense solves with all of the precision, or its factors."""
    if isinstance(posterior, DensePosterior):
        solved = torch.linalg.solve(posterior.precision, rows.mT).mT
    else:
        solved = posterior.solve(rows)
    whole = (rows @ solved.mT).unflatten(0, (-1, size)).unflatten(2, (-1, size))
    return torch.diagonal(whole, dim1=0, dim2=2).movedim(-1, 0)


@pytest.mark.filterwarnings("ignore:.*uses a diagonal precision")
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("problem", [convolutions, inputs_first, shared], ids=lambda f: f.__name__)
def test_covariances_by_layers_are_those_of_rows(problem: Callable[[], Any], method: Method) -> None:
    guide, model, batches, x = problem()
    posterior = fit(guide, batches, method)
    query = query_of(guide, model, x)
    assert query.examples.cheap and query.mean.numel() >= len(posterior.mode)
    expected = from_rows(posterior, rows_by_products(query), query.size)
    torch.testing.assert_close(posterior.covariance(query), expected, rtol=1e-9, atol=1e-12)


def test_the_inverse_serves_after_as_many_rows_as_latents_and_says_the_same() -> None:
    guide, model, batches, x = convolutions()
    posterior = fit(guide, batches, Dense())
    by_solves = posterior.covariance(query_of(guide, model, x[:20]))
    assert "_half_inverse" not in vars(posterior)
    by_inverse = posterior.covariance(query_of(guide, model, x[:20]))
    assert "_half_inverse" in vars(posterior)
    torch.testing.assert_close(by_inverse, by_solves, rtol=1e-9, atol=1e-12)


def test_small_variances_among_large_ones_keep_their_digits_in_float32() -> None:
    """Variances of the data are 1e-4 of the prior's, or less: what an inverse in float32 leaves of them is rounding."""
    torch.manual_seed(0)
    net = to_bayesian_(nn.Linear(40, 2, bias=False), prior_scale=1.0)
    model = regressor(net, num_data=200, noise_scale=0.3)
    x = torch.randn(200, 10) @ torch.randn(10, 40)  # of rank 10
    guide = pyro_dvi.LaplaceGuide(model)
    guide.initialize(x[:5], torch.zeros(5, 2))
    posterior = fit(guide, [(x, torch.zeros(200, 2))], Dense())
    found = posterior.covariance(query_of(guide, model, x[:50]))
    inverse = torch.linalg.inv(posterior.precision.double())
    expected = from_inverse(inverse, x[:50].double())
    of_prior = x[:50].square().sum(1).double()
    assert float((expected[:, 0, 0] / of_prior).max()) < 1e-4
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.max()))
    in_single = from_inverse(inverse.float(), x[:50])[:, 0, 0] / expected[:, 0, 0] - 1
    assert float(in_single.abs().max()) > 1e-3


def from_inverse(inverse: Tensor, x: Tensor) -> Tensor:
    """The covariance of two outputs of a linear layer without bias."""
    blocks = inverse.reshape(2, x.shape[1], 2, x.shape[1])
    return torch.einsum("bq,pqrs,bs->bpr", x, blocks, x)
