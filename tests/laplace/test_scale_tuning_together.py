# SPDX-License-Identifier: Apache-2.0
"""Several scales that are tuned together, against brute force over all of their values."""

import itertools
import math
from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, DviWarning
from pyro_dvi.laplace import ByValidation, LaplaceGuide, NoiseScale, PriorPrecision

GROUPS = [PriorPrecision("a"), PriorPrecision("b")]
SIZES, NOISE, PRIOR = (3, 2), 0.4, 0.7


class TwoGroups:
    """y = x (a, b) + noise, with features of b that are correlated with those of a, and little data."""

    def __init__(self, seed: int = 5) -> None:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(66, 5, generator=generator).double()
        x[:, 3:] += x[:, :2]
        weight = torch.tensor([1.0, -0.7, 1.3, 0.05, -0.06]).double()
        y = x @ weight + NOISE * torch.randn(66, generator=generator)
        self.x, self.y, self.held_out = x[:6], y[:6], (x[6:], y[6:])
        self.batches = [(self.x, self.y)]
        self.guide = LaplaceGuide(self.model)
        self.guide.polish(self.batches, progress=False)
        self.mode = torch.cat([self.guide.median()["a"], self.guide.median()["b"]])

    def model(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        priors = [dist.Normal(x.new_zeros(n), PRIOR).to_event(1) for n in SIZES]
        weight = torch.cat([pyro.sample(name, prior) for name, prior in zip("ab", priors, strict=True)])
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ weight, NOISE), obs=y)

    def gaussian(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Prior scales of all weights, noise and precision for values [n, 3] of two precisions and a noise."""
        scales = (PRIOR * values[:, :2].rsqrt()).repeat_interleave(torch.tensor(SIZES), 1)
        noise = NOISE * values[:, 2:]
        precision = self.x.T @ self.x / noise.square().unsqueeze(-1) + torch.diag_embed(scales**-2)
        return scales, noise, precision

    def evidence(self, values: Tensor) -> Tensor:
        """The log evidence [n] at the fixed mode, but for a constant."""
        scales, noise, precision = self.gaussian(values)
        fit = dist.Normal(self.x @ self.mode, noise).log_prob(self.y).sum(1)
        return fit + dist.Normal(0.0, scales).log_prob(self.mode).sum(1) - 0.5 * torch.logdet(precision)

    def validation(self, values: Tensor) -> Tensor:
        """The mean log predictive density [n] of the held-out data."""
        _, noise, precision = self.gaussian(values)
        x, y = self.held_out
        variance = noise**2 + torch.einsum("jk,nkl,jl->nj", x, torch.linalg.inv(precision), x)
        return dist.Normal(x @ self.mode, variance.sqrt()).log_prob(y).mean(1)


def brute_force(score: Callable[[Tensor], Tensor], ranges: list[tuple[float, float]]) -> Tensor:
    """The best values [3] within ranges of their logarithms, by grids that close in on the best point."""
    for _ in range(20):
        axes = [torch.linspace(low, high, 9 if high > low else 1).double() for low, high in ranges]
        grid = torch.tensor(list(itertools.product(*(axis.tolist() for axis in axes)))).double()
        centre = grid[score(grid.exp()).argmax()]
        ranges = [
            (max(low, c - 0.35 * (high - low)), min(high, c + 0.35 * (high - low)))
            for c, (low, high) in zip(centre.tolist(), ranges, strict=True)
        ]
    return centre.exp()


WIDE, FIXED = (-6.9, 6.9), (0.0, 0.0)


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("scales", "criterion"),
    [(GROUPS, "evidence"), ((*GROUPS, NoiseScale()), "evidence"), (GROUPS, "validation")],
)
def test_scales_that_are_tuned_together_are_the_best_of_all_values(scales, criterion):
    problem = TwoGroups()
    guide, score = problem.guide, getattr(problem, criterion)
    ranges = [WIDE, WIDE, (-2.3, 2.3) if len(scales) == 3 else FIXED]
    best = brute_force(score, ranges)
    by = ByValidation([problem.held_out]) if criterion == "validation" else None
    curve = guide.tune(problem.batches, scales, by, progress=False)
    found = torch.tensor([c.best for c in (curve, *curve.others)] + [1.0] * (3 - len(scales))).double()
    assert not any(c.at_edge for c in (curve, *curve.others))
    alone = [brute_force(score, [r if i == k else FIXED for i, r in enumerate(ranges)])[k] for k in (0, 1)]
    assert all(
        abs(math.log(x / y)) > 0.03 for x, y in zip(alone, best, strict=False)
    )  # they depend on each other
    found_score, best_score = score(torch.stack([found, best]))
    assert best_score - found_score < 1e-4  # nats
    torch.testing.assert_close(found, best, rtol=0.02, atol=0)
    factors = {"a": found[0] ** -0.5, "b": found[1] ** -0.5, "y": found[2]}
    assert guide.scale_factors == pytest.approx({name: float(factors[name]) for name in guide.scale_factors})
    torch.testing.assert_close(guide.posterior.precision, problem.gaussian(found.unsqueeze(0))[2][0])


def test_mistakes_and_edges_of_several_scales():
    problem = TwoGroups()
    for scales in ([], [PriorPrecision(), GROUPS[1]], [GROUPS[0], PriorPrecision]):
        with pytest.raises(ArgumentError, match="scale"):
            problem.guide.tune(problem.batches, scales, progress=False)
    assert problem.guide.scale_factors == {}
    with pytest.warns(DviWarning) as caught:
        curve = problem.guide.tune(
            problem.batches, GROUPS, values=[0.5, 1.0, 2.0], refinements=0, progress=False
        )
    assert [c.values.tolist() for c in (curve, *curve.others)] == [[0.5, 1.0, 2.0]] * 2
    assert ["largest" in str(w.message) for w in caught] == [False, True]
