# SPDX-License-Identifier: Apache-2.0
"""Class probabilities of Gaussian logits against many samples."""

import math

import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError
from pyro_dvi.expectations.points import shifted_sobol
from pyro_dvi.links import Probit, SobolSoftmax

LINKS = [SobolSoftmax(), Probit()]
every_link = pytest.mark.parametrize("link", LINKS, ids=repr)


def problem(num_classes: int, variance: float) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    loc = 1.5 * torch.randn(24, num_classes, generator=generator, dtype=torch.float64)
    return loc, variance * (torch.rand(loc.shape, generator=generator, dtype=torch.float64) + 0.5)


def average(loc: Tensor, root: Tensor, num_points: int = 2**15) -> Tensor:
    """The mean of softmax(loc + root z), by 2^15 points."""
    total = torch.zeros_like(loc)
    for chunk in shifted_sobol(num_points, loc.shape[-1], loc).split(2048):
        total = total + torch.softmax(loc + torch.einsum("bij,sj->sbi", root, chunk), -1).sum(0)
    return total / num_points


def total_variation(p: Tensor, q: Tensor) -> float:
    return 0.5 * (p - q).abs().sum(-1).mean().item()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("link", "num_classes", "variance", "worst"),
    [
        (SobolSoftmax(), 2, 4.0, 2e-3),
        (SobolSoftmax(), 10, 1.0, 3e-3),
        (SobolSoftmax(), 10, 4.0, 1e-2),
        (SobolSoftmax(2048), 10, 4.0, 3e-3),
        (Probit(), 2, 0.1, 1e-4),  # of the reference
        (Probit(), 2, 16.0, 1e-3),
        (Probit(), 10, 0.1, 1e-2),
        (Probit(), 10, 1.0, 0.06),
    ],
    ids=str,
)
def test_against_many_points(link, num_classes, variance, worst):
    loc, spread = problem(num_classes, variance)
    exact = average(loc, torch.diag_embed(spread.sqrt()))
    assert total_variation(link.probabilities(loc, spread), exact) < worst


def test_two_classes_are_averaged_exactly_by_probit():
    p = Probit().probabilities(
        torch.tensor([[0.3, -1.0]], dtype=torch.float64), torch.tensor([[0.5, 1.2]], dtype=torch.float64)
    )
    z = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    w = torch.softmax(-0.5 * z**2, 0)
    torch.testing.assert_close(p[0, 0], w @ torch.sigmoid(1.3 + math.sqrt(1.7) * z), atol=1e-9, rtol=0)


@every_link
def test_probabilities(link):
    for num_classes in (2, 3, 50):
        loc, spread = problem(num_classes, 2.0)
        p = link.probabilities(loc.float(), spread.float())
        assert p.dtype is torch.float32 and (p >= 0).all()
        torch.testing.assert_close(p.sum(-1), torch.ones(24))
        torch.testing.assert_close(link.probabilities(loc.float(), spread.float()), p)  # repeatable


@every_link
def test_diagonal_covariances_are_variances(link):
    for num_classes in (2, 5):
        loc, spread = problem(num_classes, 1.0)
        by_matrix = link.probabilities(loc, torch.diag_embed(spread))
        tolerance = 5e-3 if isinstance(link, SobolSoftmax) else 1e-9  # its root is another one
        torch.testing.assert_close(by_matrix, link.probabilities(loc, spread), atol=tolerance, rtol=0)


def test_covariances():
    loc, _ = problem(4, 1.0)
    root = torch.randn(24, 4, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    root[..., -1] = 0.0  # singular
    ours = SobolSoftmax(2**12).probabilities(loc, root @ root.mT)
    torch.testing.assert_close(ours, average(loc, root), atol=5e-3, rtol=0)
    pair = Probit().probabilities(loc[:, :2], (root @ root.mT)[:, :2, :2])
    root_of_pair = torch.linalg.cholesky((root @ root.mT)[:, :2, :2])
    torch.testing.assert_close(pair, average(loc[:, :2], root_of_pair), atol=1e-3, rtol=0)


@pytest.mark.parametrize("link", [SobolSoftmax(), Probit()], ids=repr)
def test_certain_logits_give_their_softmax(link):
    for num_classes in (2, 5):
        loc, spread = problem(num_classes, 0.0)
        torch.testing.assert_close(link.probabilities(loc, spread), torch.softmax(loc, -1))


@every_link
@pytest.mark.parametrize("num_classes", [2, 5])
def test_log_probabilities_of_rare_classes_keep_their_digits(link, num_classes):
    loc = torch.zeros(num_classes)
    loc[0] = 120.0
    found = link.log_probabilities(loc, torch.full_like(loc, 1e-3))
    assert found.dtype is torch.float32
    exact = link.log_probabilities(loc.double(), torch.full_like(loc, 1e-3).double())
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(exact, torch.log_softmax(loc.double(), -1), rtol=1e-3, atol=1e-3)


def test_points_in_parts(monkeypatch):
    loc, spread = problem(5, 1.0)
    whole = SobolSoftmax().probabilities(loc, spread)
    monkeypatch.setattr("pyro_dvi.links.class_links._CHUNK", 1000)
    torch.testing.assert_close(SobolSoftmax().probabilities(loc, spread), whole)


def test_any_number_of_batch_dimensions():
    for link in LINKS:
        assert link.probabilities(torch.zeros(3), torch.ones(3)).shape == (3,)
        assert link.probabilities(torch.zeros(2, 4, 3), torch.ones(2, 4, 3)).shape == (2, 4, 3)
        assert link.probabilities(torch.zeros(2, 4, 3), torch.eye(3).expand(2, 4, 3, 3)).shape == (2, 4, 3)


def test_mistakes_are_refused():
    with pytest.raises(ArgumentError, match="must be a positive whole number, not 0"):
        SobolSoftmax(0)
