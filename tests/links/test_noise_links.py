# SPDX-License-Identifier: Apache-2.0
"""Mixtures over points, wherever the points are among the dimensions, against torch's own."""

import pytest
import torch
from torch import distributions as td

from pyro_dvi.links.noise_links import PointMixture

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)


def components(*shape: int) -> td.Normal:
    generator = torch.Generator().manual_seed(3)
    loc, scale = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    return td.Normal(loc, scale.exp())


def torchs(ours: PointMixture) -> td.MixtureSameFamily:
    """The same mixture, whose components have the last dimension of the batch."""
    normals = ours.components
    parameters = (p.movedim(-1 - ours.rank, -1) for p in (normals.loc, normals.scale))
    return td.MixtureSameFamily(
        td.Categorical(ours.weights.expand(*ours.batch_shape, 3)), td.Normal(*parameters)
    )


MIXTURES = {
    "one number": PointMixture(components(3), WEIGHTS),
    "two batch dimensions": PointMixture(components(3, 4, 2), WEIGHTS),
    "points in the middle": PointMixture(components(5, 3, 2), WEIGHTS, rank=1),
    "expanded": PointMixture(components(3, 2), WEIGHTS).expand((5, 2)),
    "expanded from one number": PointMixture(components(3), WEIGHTS).expand((4,)),
}
every_mixture = pytest.mark.parametrize("ours", MIXTURES.values(), ids=MIXTURES)


@every_mixture
def test_it_is_the_mixture_of_torch(ours):
    plain = torchs(ours)
    assert ours.batch_shape == plain.batch_shape and ours.event_shape == plain.event_shape
    torch.testing.assert_close(ours.mean, plain.mean)
    torch.testing.assert_close(ours.variance, plain.variance)
    y = torch.randn(7, *ours.batch_shape, dtype=torch.float64)
    for value in (y, y[0], torch.tensor(0.3, dtype=torch.float64)):
        torch.testing.assert_close(ours.log_prob(value), plain.log_prob(value))
        torch.testing.assert_close(ours.cdf(value), plain.cdf(value))


@every_mixture
@pytest.mark.parametrize("at_once", [1, 2**22])
def test_draws_have_its_moments(ours, at_once, monkeypatch):
    monkeypatch.setattr("pyro_dvi.links.noise_links._CHUNK", at_once * 10_000)
    torch.manual_seed(0)
    draws = ours.sample((20_000, 2))
    assert draws.shape == (20_000, 2, *ours.batch_shape)
    draws = draws.flatten(0, 1)
    error = 5 * (ours.variance / len(draws)).sqrt()
    assert ((draws.mean(0) - ours.mean).abs() < error).all()  # a false alarm in 1e5 runs
    torch.testing.assert_close(draws.var(0), ours.variance, rtol=0.1, atol=0)
    if ours.batch_shape.numel() > 1:  # each draws a component by itself
        flat = draws.flatten(1).T
        assert (torch.corrcoef(flat) - torch.eye(len(flat))).abs().max() < 0.05


def test_draws_of_many_points_cost_little_more_than_draws_of_one():
    drawn = []

    class Counted(td.Normal):
        def sample(self, sample_shape=()):
            drawn.append(super().sample(sample_shape))
            return drawn[-1]

    torch.manual_seed(0)
    mixture = PointMixture(Counted(torch.zeros(64, 5).double(), 1.0), torch.full((64,), 1 / 64))
    found = mixture.sample((6400,))
    assert sum(part.numel() for part in drawn) < 1.6 * found.numel()
    assert len(found.unique()) == found.numel()  # no draw is used twice


def test_events_keep_the_points_together():
    vectors = PointMixture(td.Independent(components(3, 4, 2), 1), WEIGHTS)
    y = torch.randn(4, 2, dtype=torch.float64)
    density = (WEIGHTS[:, None] * components(3, 4, 2).log_prob(y).sum(-1).exp()).sum(0)
    torch.testing.assert_close(vectors.log_prob(y), density.log())
    assert vectors.sample((6,)).shape == (6, 4, 2)


def test_a_value_is_possible_if_any_component_gives_it():
    mixture = PointMixture(td.Uniform(torch.zeros(2), torch.tensor([1.0, 3.0])), torch.tensor([0.5, 0.5]))
    assert mixture.support.check(torch.tensor([0.5, 2.0, 4.0])[:, None].squeeze(-1)).tolist() == [
        True,
        True,
        False,
    ]
    assert mixture.cdf(torch.tensor(2.0)).item() == pytest.approx(0.5 + 0.5 * 2 / 3)
