# SPDX-License-Identifier: Apache-2.0
"""Linearised predictions of models with plates, uncertain noise, parameters, masks and several sites."""

from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor

from pyro_dvi import AtMean, Linearised, Samples, predict
from pyro_dvi.errors import DviWarning, ModelError, UnsupportedError
from pyro_dvi.laplace import ByValidation, Dense, Hessian, LaplaceGuide
from tests.laplace.heads import DRAWS, HEADS, Head
from tests.laplace.problems import guide_at


def _plated(x: Tensor, y: Tensor | None = None) -> Any:
    """A plate of three measurements in each example, with a noise scale for each."""
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0).expand([x.shape[1], 6]).to_event(2))
    f = (x @ w).T
    with pyro.plate("data", 30, subsample_size=len(x), dim=-1), pyro.plate("measurements", 3, dim=-2):
        return pyro.sample("y", dist.Normal(f[:3], (0.3 * f[3:]).exp()), obs=y)


def test_densities_of_an_inner_plate_are_integrated_one_by_one():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 2, dtype=torch.float64, generator=generator)
    y = torch.randn(3, 30, dtype=torch.float64, generator=generator)
    guide = guide_at(_plated, (x, y), {"w": 0.5 * torch.ones(2, 6, dtype=torch.float64)})
    guide.fit([(x, y)], Dense(), unconverged="accept")
    prediction = predict(_plated, guide, x[:4])
    assert prediction.variance.shape == (4, 3)
    f = x[:4] @ guide.sample(50_000)["w"]
    scores = dist.Normal(f[..., :3], (0.3 * f[..., 3:]).exp()).log_prob(y[:, :4].T)
    expected = scores.logsumexp(0) - torch.tensor(50_000.0).log()
    torch.testing.assert_close(prediction.log_likelihood(y[:, :4].T), expected, rtol=0, atol=0.02)


def _uncertain_noise(x: Tensor, y: Tensor | None = None) -> Any:
    w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0))
    f = pyro.deterministic("f", x @ w, event_dim=0)
    with pyro.plate("data", 12, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(f, scale), obs=y)


def test_latent_noise_scale_correlates_with_the_mean():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, dtype=torch.float64, generator=generator)
    y = x.sum(-1) + 0.5 * torch.randn(12, dtype=torch.float64, generator=generator)
    locs = {
        "w": torch.tensor([0.8, 1.1], dtype=torch.float64),
        "scale": torch.tensor(-0.4, dtype=torch.float64),
    }
    guide = guide_at(_uncertain_noise, (x, y), locs)
    guide.fit([(x, y)], Dense(precision=Hessian()), unconverged="accept")
    assert guide.posterior.precision[0, 2].abs() > 0.1
    draws = guide.sample(DRAWS)
    scores = dist.Normal(draws["w"] @ x.T, draws["scale"].unsqueeze(-1)).log_prob(y)
    expected = scores.logsumexp(0) - torch.tensor(float(DRAWS)).log()
    found = predict(_uncertain_noise, guide, (x, y))
    torch.testing.assert_close(found.log_likelihood(), expected, rtol=0, atol=0.02)
    # A deterministic site has no noise.
    named = guide.predictive(x, site="f")
    weights = torch.linalg.inv(guide.posterior.precision)[:2, :2]
    torch.testing.assert_close(named.variance, (x @ weights * x).sum(-1))
    torch.testing.assert_close(named.mean, x @ locs["w"])


def test_a_learned_parameter_is_certain():
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        scale = pyro.param("noise", torch.tensor(0.5), constraint=dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x * w, scale), obs=y)

    x = torch.ones(4)
    guide = LaplaceGuide(model)
    guide.initialize(x, x)
    guide.fit([(x, x)], Dense(), unconverged="accept")
    found = predict(model, guide, (x, x))
    torch.testing.assert_close(found.variance, torch.full((4,), 0.25 + 1 / (1 + 4 / 0.25)))
    assert isinstance(found._parts[0].distribution, torch.distributions.Normal)


@pytest.mark.parametrize("loc", [5.0, torch.full((4,), 5.0)], ids=["number", "tensor"])
def test_a_certain_mean_stays_the_prediction(loc):
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(loc, scale), obs=y)

    x = torch.tensor([3.0, 4.0, 6.0, 8.0])
    guide = guide_at(model, (x, x), {"scale": torch.tensor(0.5)})
    guide.fit([(x, x)], Dense(), unconverged="accept")
    found = guide.predictive(x)
    torch.testing.assert_close(found.mean, torch.full((4,), 5.0))
    torch.testing.assert_close(found.variance, torch.zeros(4))
    torch.testing.assert_close(found.full_covariance[:, 1, 1], guide.posterior.marginal_variance().expand(4))
    scale = guide.sample(50_000)["scale"].unsqueeze(-1)
    expected = dist.Normal(5.0, scale).log_prob(x).logsumexp(0) - torch.tensor(50_000.0).log()
    torch.testing.assert_close(predict(model, guide, (x, x)).log_likelihood(), expected, rtol=0, atol=0.02)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "rule", [Linearised(), AtMean(), Samples(2000)], ids=lambda rule: type(rule).__name__
)
@pytest.mark.filterwarnings("ignore:weights are drawn")
def test_a_tuned_noise_counts_for_every_rule(rule):
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x * w, 0.5), obs=y)

    x = torch.ones(4)
    guide = guide_at(model, (x, x), {"w": torch.tensor(0.9)})
    guide.scale_factors = {"y": 4.0}
    guide.fit([(x, x)], Dense(), unconverged="accept")
    weights = 0.0 if isinstance(rule, AtMean) else 1 / (1 + 4 / 2.0**2)
    found = predict(model, guide, x, rule, seed=0).variance
    torch.testing.assert_close(found, torch.full((4,), 2.0**2 + weights), rtol=0, atol=0.06)


def test_one_of_several_observed_sites():
    def model(x: Tensor, y: Tensor | None = None, z: Tensor | None = None) -> None:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(x * w, 0.5), obs=y)
            pyro.sample("z", dist.Normal(x * w, 0.1), obs=z)  # of the same mean

    x = torch.ones(4)
    guide = LaplaceGuide(model)
    guide.initialize(x, x, x)
    guide.fit([(x, x, x)], Dense(), unconverged="accept")
    spread = 1 / (1 + 4 / 0.25 + 4 / 0.01)
    for site, noise in (("y", 0.25), ("z", 0.01)):
        found = predict(model, guide, x, site=site)
        torch.testing.assert_close(found.variance, torch.full((4,), noise + spread))
    with pytest.raises(ModelError, match="site="):
        guide.predictive(x)


def test_masked_rows_are_predicted_and_do_not_count_in_the_fit():
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)), pyro.poutine.mask(mask=x < 2):
            return pyro.sample("y", dist.Normal(x * w, 0.5).mask(x < 3), obs=y)

    x = torch.tensor([1.0, 1.0, 2.5, 4.0])
    guide = LaplaceGuide(model)
    guide.initialize(x, x)
    guide.fit([(x, x)], Dense(), unconverged="accept")
    spread = 1 / (1 + 2 / 0.25)
    torch.testing.assert_close(guide.predictive(x).variance, spread * x**2)
    torch.testing.assert_close(predict(model, guide, x).variance, 0.25 + spread * x**2)


def test_missing_outputs_are_left_out_of_the_fit_the_score_and_the_validation():
    """Two outputs of one slope: the density of those that count, with their covariance."""
    mask = torch.tensor([[True, True], [True, False], [False, True], [False, False]])
    slopes, noise = torch.tensor([1.0, 2.0]).double(), 0.5

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x[:, None] * w * slopes, noise).mask(mask).to_event(1), obs=y)

    x = torch.tensor([1.0, -1.0, 2.0, 4.0]).double()
    y = torch.where(mask, x[:, None] * slopes, torch.tensor(-999.0).double())
    guide = LaplaceGuide(model)
    guide.initialize(x, y)
    guide.polish([(x, y)], progress=False)
    guide.fit([(x, y)], Dense())
    rows = x[:, None] * slopes
    spread = 1 / (1 + (rows.square() * mask).sum() / noise**2)
    centre = spread * (rows * y * mask).sum() / noise**2
    expected = torch.full((4,), torch.nan).double()
    for i in range(3):
        own = rows[i, mask[i]]
        covariance = spread * torch.outer(own, own) + noise**2 * torch.eye(len(own)).double()
        expected[i] = dist.MultivariateNormal(centre * own, covariance).log_prob(y[i, mask[i]])
    found = predict(model, guide, (x, y))
    torch.testing.assert_close(found.log_likelihood(), expected, equal_nan=True)
    torch.testing.assert_close(found.variance, spread * rows.square() + noise**2)
    with pytest.warns(DviWarning, match="the largest value tried"):
        tuned = guide.tune([(x, y)], criterion=ByValidation([(x, y)]), values=[1.0], progress=False)
    assert tuned.scores[0] == pytest.approx(float(expected[:3].sum()) / 3)


@pytest.mark.parametrize(
    "distribution",
    [
        lambda f: dist.MixtureSameFamily(
            dist.Categorical(logits=f), dist.Normal(torch.tensor([-1.0, 1.0]).double(), 0.5)
        ),
        lambda f: dist.Delta(f[..., 0]),
    ],
    ids=["mixture", "delta"],
)
def test_distributions_that_cannot_be_linearised(distribution):
    head = Head(distribution, 2)
    x = torch.zeros(3, 2, dtype=torch.float64)
    guide = guide_at(head.model, (x, torch.zeros(3).double()), {"w": head.true()})
    normal = HEADS["normal, two heads"].guide()
    guide._fitted = replace(normal.fitted, point=guide._point_mass(), model=None)
    with pytest.raises(UnsupportedError, match=r"pyro.deterministic"):
        guide.predictive(x)


def test_prediction_without_latents():
    def model(x: Tensor, y: Tensor | None = None) -> Any:
        pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        pyro.deterministic("twice", 2 * x)
        with pyro.plate("data", 4, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x, 1.0), obs=y)

    x = torch.ones(4)
    guide = LaplaceGuide(model)
    guide.initialize(x, x)
    guide.fit([(x, x)], Dense(), unconverged="accept")
    for site in ("y", "twice"):
        with pytest.raises(ModelError, match="no uncertainty"):
            guide.predictive(x, site=site)
