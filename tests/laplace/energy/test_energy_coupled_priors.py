# SPDX-License-Identifier: Apache-2.0
"""Priors that couple latents: never taken for independent ones, wherever they stand in the flat vector."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_dvi.errors import DviWarning, UnsupportedError
from pyro_dvi.laplace import (
    GGN,
    Dense,
    Diagonal,
    LaplaceGuide,
    Method,
    PosteriorSamples,
    PriorPrecision,
    TopEigen,
)
from tests.laplace.problems import guide_at

COVARIANCE = torch.tensor([[1.0, 0.8], [0.8, 1.0]], dtype=torch.float64)


def dependent_slopes(before: int) -> tuple[LaplaceGuide, tuple[Tensor, Tensor], Tensor]:
    """Linear regression with ``before`` independent latents ahead of two dependent ones, and its precision."""
    torch.manual_seed(before)
    x, y = torch.randn(3, before + 2, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        names = [f"a{k}" for k in range(before)]
        free = [pyro.sample(name, dist.Normal(x.new_zeros(()), 1.0)) for name in names]
        slopes = pyro.sample("slopes", dist.MultivariateNormal(x.new_zeros(2), COVARIANCE))
        with pyro.plate("data", len(x)):
            return pyro.sample(
                "y", dist.Normal(x @ torch.cat([*map(torch.atleast_1d, free), slopes]), 1.0), obs=y
            )

    prior = torch.block_diag(torch.eye(before, dtype=torch.float64), COVARIANCE.inverse())
    locs = {f"a{k}": torch.zeros((), dtype=torch.float64) for k in range(before)}
    locs["slopes"] = torch.zeros(2, dtype=torch.float64)
    return guide_at(model, (x, y), locs), (x, y), x.T @ x + prior


def chain() -> tuple[LaplaceGuide, tuple[Tensor, Tensor], Tensor]:
    """Two sites, c ~ N(b / 2, 1), behind an independent one."""
    torch.manual_seed(0)
    x, y = torch.randn(3, 3, dtype=torch.float64), torch.randn(3, dtype=torch.float64)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        a, b = (pyro.sample(name, dist.Normal(x.new_zeros(()), 1.0)) for name in "ab")
        c = pyro.sample("c", dist.Normal(0.5 * b, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x @ torch.stack([a, b, c]), 1.0), obs=y)

    prior = torch.tensor([[1.0, 0, 0], [0, 1.25, -0.5], [0, -0.5, 1.0]], dtype=torch.float64)
    locs = {name: torch.zeros((), dtype=torch.float64) for name in "abc"}
    return guide_at(model, (x, y), locs), (x, y), x.T @ x + prior


@pytest.mark.parametrize("before", range(5))
def test_dependent_elements_of_a_site_are_seen_at_any_place(before: int) -> None:
    guide, batch, precision = dependent_slopes(before)
    found = guide.fit([batch], Dense(), unconverged="accept")
    torch.testing.assert_close(found.marginal_variance(), precision.inverse().diagonal())
    for method in (Diagonal(), PosteriorSamples(4), TopEigen(1)):
        with pytest.raises(UnsupportedError, match="slopes"):
            guide.fit([batch], method, unconverged="accept")


def test_dependent_sites_are_seen() -> None:
    guide, batch, precision = chain()
    torch.testing.assert_close(
        guide.fit([batch], Dense(), unconverged="accept").marginal_variance(), precision.inverse().diagonal()
    )
    found = guide.fit([batch], Diagonal(), unconverged="accept")
    torch.testing.assert_close(found.marginal_variance(), 1 / precision.diagonal())
    method: Method
    for method in (PosteriorSamples(4), TopEigen(1)):
        with pytest.raises(UnsupportedError, match="'b' and 'c'|'c' and 'b'"):
            guide.fit([batch], method, unconverged="accept")


def test_gradients_of_single_examples_meet_the_whole_prior() -> None:
    """A dense layer has rules for single examples: the matrix then takes another way than products."""
    torch.manual_seed(0)
    x, y = torch.randn(5, 2, dtype=torch.float64), torch.randn(5, dtype=torch.float64)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        bias = pyro.sample("bias", dist.Normal(x.new_zeros(1), 1.0).to_event(1))
        weight = pyro.sample("weight", dist.MultivariateNormal(x.new_zeros(1, 2), COVARIANCE).to_event(1))
        with pyro.plate("data", len(x)):
            mean = torch.nn.functional.linear(x, weight, bias).squeeze(-1)
            return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)

    locs = {"bias": torch.zeros(1, dtype=torch.float64), "weight": torch.zeros(1, 2, dtype=torch.float64)}
    local = (energy := guide_at(model, (x, y), locs).energy([(x, y)])).at(energy.start)
    inputs = torch.cat([torch.ones(5, 1, dtype=torch.float64), x], 1)
    expected = inputs.T @ inputs + torch.block_diag(torch.eye(1, dtype=torch.float64), COVARIANCE.inverse())
    torch.testing.assert_close(GGN().matrix(local), expected)


def test_evidence_of_prior_scales_keeps_the_dependence() -> None:
    guide, (x, y), _ = dependent_slopes(1)
    guide.polish([(x, y)], progress=False)
    guide.fit([(x, y)], Dense())
    mode = guide.energy([(x, y)]).start
    prior = torch.block_diag(torch.eye(1, dtype=torch.float64), COVARIANCE.inverse())
    values = [0.5, 1.0, 4.0]
    expected = []
    for c in values:
        log_prior = dist.MultivariateNormal(torch.zeros_like(mode), precision_matrix=c * prior).log_prob(mode)
        log_likelihood = dist.Normal(x @ mode, 1.0).log_prob(y).sum()
        volume = 1.5 * torch.tensor(2 * torch.pi, dtype=torch.float64).log()
        expected.append(log_likelihood + log_prior + volume - 0.5 * torch.logdet(x.T @ x + c * prior))
    with pytest.warns(DviWarning, match="largest value"):
        curve = guide.tune([(x, y)], PriorPrecision(), values=values, refinements=0, progress=False)
    torch.testing.assert_close(curve.scores, torch.stack(expected))
