# SPDX-License-Identifier: Apache-2.0
"""Subnetworks by the largest variance, beside the whole network."""

import pytest
import torch

from pyro_dvi.errors import ArgumentError, GuideError
from pyro_dvi.laplace import ConjugateGradient, Dense, Diagonal, LaplaceGuide, largest_variance
from tests.laplace.problems import SineRegression

GRID = torch.linspace(-6, 6, 9, dtype=torch.float64).unsqueeze(-1)


@pytest.fixture(scope="module")
def sine() -> tuple[SineRegression, LaplaceGuide]:
    problem = SineRegression(hidden=10)
    return problem, problem.trained(300)


def fit(problem: SineRegression, guide: LaplaceGuide, method: object, subset: object = None):
    return guide.fit(problem.batches, method, subset=subset, unconverged="accept")


@pytest.mark.parametrize("size", [1, 12, 31])
def test_no_latent_outside_has_a_larger_variance(sine, size):
    problem, guide = sine
    posterior = fit(problem, guide, Diagonal())
    variances = guide.fitted.layout.named(posterior.marginal_variance())
    masks = largest_variance(guide, size)
    inside = torch.cat([variances[name][mask] for name, mask in masks.items()])
    outside = torch.cat([variances[name][~mask] for name, mask in masks.items()])
    assert len(inside) == size and len(inside) + len(outside) == 31
    assert not len(outside) or inside.min() >= outside.max()


def test_a_larger_subnetwork_is_nearer_to_the_whole_network(sine):
    """Fixing latents conditions the Gaussian, which never widens it; with all of them it is the whole network's."""
    problem, guide = sine
    fit(problem, guide, Dense())
    whole = guide.predictive(GRID).variance
    fit(problem, guide, Diagonal())
    masks = {size: largest_variance(guide, size) for size in (5, 15, 31)}
    shares = {}
    for size, subset in masks.items():
        fit(problem, guide, Dense(), subset)
        variance = guide.predictive(GRID).variance
        assert bool((variance <= whole * (1 + 1e-9)).all())
        shares[size] = float((variance / whole).mean())
    assert shares[5] < shares[15] < shares[31] == pytest.approx(1.0, abs=1e-9)


def test_a_subnetwork_of_a_subset_stays_within_it(sine):
    problem, guide = sine
    subset = {"w1": torch.arange(10).reshape(1, 10) < 4, "w2": True}
    fit(problem, guide, Diagonal(), subset)
    masks = largest_variance(guide, 9)
    assert list(masks) == ["w1", "w2"] and not bool(masks["w1"][0, 4:].any())
    assert sum(int(mask.sum()) for mask in masks.values()) == 9


@pytest.mark.parametrize("size", [0, 1.5])
def test_sizes_that_do_not_fit_are_refused(sine, size):
    problem, guide = sine
    fit(problem, guide, Diagonal())
    with pytest.raises(ArgumentError, match="positive whole number"):
        largest_variance(guide, size)


def test_it_takes_a_fit_with_variances(sine):
    problem, guide = sine
    fit(problem, guide, ConjugateGradient())
    with pytest.raises(NotImplementedError, match="Diagonal"):
        largest_variance(guide, 3)
    with pytest.raises(GuideError, match="no Gaussian"):
        largest_variance(SineRegression(hidden=10).trained(1), 3)
