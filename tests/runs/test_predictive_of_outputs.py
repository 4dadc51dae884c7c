# SPDX-License-Identifier: Apache-2.0
"""Full covariances of a model's outputs and independent moments go through one engine."""

from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, distributions as td

from pyro_dvi.links import GaussHermite, MomentMatched, Probit, SobolSoftmax
from pyro_dvi.links.families import predictive_distribution
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.runs.outputs import Outputs, run_outputs
from pyro_dvi.runs.predictive_of_outputs import integrated

B = 4
MASK = torch.tensor([[True, False], [False, True], [True, True], [False, False]])
HEADS = {
    "normal": (1, lambda f: dist.Normal(f[..., 0], 0.5)),
    "noise": (2, lambda f: dist.Normal(f[..., 0], (0.5 * f[..., 1]).exp())),
    "log-normal": (2, lambda f: dist.LogNormal(f[..., 0], (0.3 * f[..., 1]).exp())),
    "vectors": (2, lambda f: dist.Normal(f, 0.5).to_event(1)),
    "matrices": (4, lambda f: dist.Normal(f.unflatten(-1, (2, 2)), 0.5).to_event(2)),
    "vectors and noise": (4, lambda f: dist.Normal(f[..., :2], (0.3 * f[..., 2:]).exp()).to_event(1)),
    "masked": (
        2,
        lambda f: dist.Normal(f[..., 0], (0.5 * f[..., 1]).exp()).mask(torch.ones(B, dtype=torch.bool)),
    ),
    "masked vectors": (2, lambda f: dist.Normal(f, 0.5).mask(MASK).to_event(1)),
    "masked matrices": (
        4,
        lambda f: dist.Normal(f.unflatten(-1, (2, 2)), 0.5).mask(MASK.unsqueeze(-1)).to_event(2),
    ),
    "masked vectors and noise": (
        4,
        lambda f: dist.Normal(f[..., :2], (0.3 * f[..., 2:]).exp()).mask(MASK).to_event(1),
    ),
    "masked rates": (2, lambda f: dist.Poisson(f.exp()).mask(MASK).to_event(1)),
    "multivariate": (2, lambda f: dist.MultivariateNormal(f, scale_tril=0.5 * torch.eye(2, dtype=f.dtype))),
    "bernoulli": (1, lambda f: dist.Bernoulli(logits=f[..., 0])),
    "categorical": (3, lambda f: dist.Categorical(logits=f)),
    "two labels": (6, lambda f: dist.Categorical(logits=f.unflatten(-1, (2, 3))).to_event(1)),
    "one-hot, probs": (3, lambda f: dist.OneHotCategorical(probs=torch.softmax(f, -1))),
    "poisson": (1, lambda f: dist.Poisson(f[..., 0].exp())),
    "gamma": (2, lambda f: dist.Gamma(f[..., 0].exp(), f[..., 1].exp())),
}
NOISY = [name for name in HEADS if "noise" in name or name in ("log-normal", "masked")]


def problem(name: str) -> tuple[Outputs, Tensor, Tensor]:
    """Outputs of B examples, an observation each, and deviations of the real numbers ``[K]``."""
    size, head = HEADS[name]
    torch.manual_seed(5)
    f = 0.6 * torch.randn(B, size, dtype=torch.float64)

    def model(y: Tensor | None = None) -> None:
        outputs = pyro.sample("f", dist.Normal(0.0, 1.0).expand([B, size]).to_event(2))
        with pyro.plate("data", B):
            pyro.sample("y", head(outputs), obs=y)

    outputs = run_outputs(model, (head(f).sample(),), {"f": f.requires_grad_()}, B)
    return outputs, head(f.detach()).sample(), 0.3 + torch.rand(size, dtype=torch.float64)


def correlated(deviations: Tensor) -> Tensor:
    size = len(deviations)
    correlation = 0.6 * torch.ones(size, size).double() + 0.4 * torch.eye(size).double()
    return (correlation * deviations * deviations.unsqueeze(-1)).expand(B, size, size)


@pytest.mark.parametrize("name", HEADS)
def test_full_covariance_against_draws(name):
    """The average density over 2^15 draws of the outputs."""
    outputs, y, deviations = problem(name)
    covariance = correlated(deviations)
    found = integrated(outputs, covariance, SobolSoftmax(4096), GaussHermite(20), 4096)
    noise = torch.randn(2**15, B, len(deviations), dtype=torch.float64)
    values = outputs.values.detach() + noise @ torch.linalg.cholesky(covariance[0]).T
    at_draws = outputs.detached().with_values(values)
    if name == "two labels":  # are right each by itself
        logits, at_draws = found.base_dist.logits, at_draws.base_dist
        torch.testing.assert_close(logits.softmax(-1), at_draws.probs.mean(0), rtol=0, atol=0.01)
        return
    expected = at_draws.log_prob(y).logsumexp(0) - torch.tensor(2.0**15).log()
    torch.testing.assert_close(found.log_prob(y), expected, rtol=0, atol=0.05)


@pytest.mark.parametrize("name", sorted(set(HEADS) - {"poisson", "gamma", "masked rates"}))
@pytest.mark.parametrize("noise", [GaussHermite(20), MomentMatched()], ids=lambda n: type(n).__name__)
def test_a_diagonal_covariance_is_that_of_independent_moments(name, noise):
    outputs, y, deviations = problem(name)
    covariance = torch.diag(deviations.square()).expand(B, -1, -1)
    found = integrated(outputs, covariance, Probit(), noise, 4096)
    variances = outputs.split(torch.diagonal(covariance, dim1=-2, dim2=-1))
    given = dict(outputs.given)
    for parameter, real, variance in zip(
        outputs.parameters, outputs.split(outputs.values.detach()), variances, strict=True
    ):
        moments: Any = GaussianMoments(real, variance)
        if parameter.transform is not None:
            moments = moments.exp() if parameter.name == "scale" else torch.softmax(moments, -1)
        given[parameter.name] = moments
    given = {k: v.detach() if isinstance(v, Tensor) else v for k, v in given.items()}
    inner = outputs.distribution
    while isinstance(inner, (td.Independent, dist.MaskedDistribution)):
        inner = inner.base_dist
    independent = predictive_distribution(type(inner), given, link=Probit(), noise=noise)
    density = independent.log_prob(y)
    if "masked " in name:
        density = density * MASK.reshape(B, 2, *[1] * (density.dim() - 2))
    if isinstance(outputs.distribution, td.Independent):
        density = density.flatten(1).sum(-1)
    torch.testing.assert_close(found.log_prob(y), density, rtol=0, atol=2e-3 if "noise" in name else 1e-10)


@pytest.mark.parametrize("name", NOISY)
def test_one_normal_has_the_moments_of_the_mixture(name):
    outputs, _, deviations = problem(name)
    covariance = correlated(0.5 * deviations)
    one, mixture = (
        integrated(outputs, covariance, Probit(), noise, 4096)
        for noise in (MomentMatched(), GaussHermite(64))
    )
    if name != "log-normal":  # of the logarithm alone
        torch.testing.assert_close(one.mean, mixture.mean, rtol=0, atol=1e-3)
        torch.testing.assert_close(one.variance, mixture.variance, rtol=2e-3, atol=0)


def test_what_is_around_a_distribution_stays_around_its_predictive():
    outputs, y, deviations = problem("masked")
    found = integrated(outputs, correlated(deviations), Probit(), MomentMatched(), 64)
    assert isinstance(found, dist.MaskedDistribution) and isinstance(found.base_dist, td.Normal)
    assert found.log_prob(y).shape == (B,)


def test_masked_numbers_may_be_anything():
    outputs, y, deviations = problem("masked vectors")
    found = integrated(outputs, correlated(deviations), Probit(), MomentMatched(), 64)
    score = found.log_prob(y)
    assert torch.equal(found.log_prob(torch.where(MASK, y, torch.nan)), score)
    assert (
        found.mean.shape == (B, 2) and abs(score[3]) < 1e-12
    )  # all of them are predicted, none of the last count


def test_a_mixture_is_called_by_a_public_name_where_it_is_shown():
    outputs, _, deviations = problem("poisson")
    mixture = integrated(outputs, correlated(deviations), Probit(), MomentMatched(), 16)
    assert isinstance(mixture, dist.Distribution) and type(mixture).__name__ == "PointMixture"


@pytest.mark.parametrize("name", ["bernoulli", "categorical", "normal", "poisson"])
def test_predictives_do_not_check_values_a_second_time(name):
    outputs, _, deviations = problem(name)
    assert integrated(outputs, correlated(deviations), Probit(), MomentMatched(), 16)._validate_args is False
