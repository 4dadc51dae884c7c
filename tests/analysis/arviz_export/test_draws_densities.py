# SPDX-License-Identifier: Apache-2.0
"""Log densities of draws, against closed forms."""

import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoGuideList, AutoNormal
from pyro.poutine import block

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning
from tests.analysis.arviz_export.reading import ARVIZ_1, az, groups, values

pytestmark = pytest.mark.filterwarnings("ignore:.* scores '.*point estimate")

X = torch.linspace(-1, 1, 6, dtype=torch.float64)
Y = 2 * X + 0.1
SD = 0.5


def line(x, y=None):
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, SD), obs=y)


PRECISION = 1 + (X**2).sum() / SD**2
MEAN = (X * Y).sum() / SD**2 / PRECISION


def exact(x, y=None):
    pyro.sample("slope", dist.Normal(MEAN, PRECISION**-0.5))


def narrow(x, y=None):
    pyro.sample("slope", dist.Normal(MEAN, 0.2 * PRECISION**-0.5))


def with_noise(x, y=None):
    weights = pyro.sample("weights", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(x.new_zeros(()), 1.0))
    shares = pyro.sample("shares", dist.Dirichlet(x.new_ones(3)))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(weights[0] * x + shares[0] * weights[1], noise), obs=y)


def exported(model, guide, count=40, **options):
    if isinstance(guide, torch.nn.Module):
        guide(X, Y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DviWarning)  # drawn weights of a posterior that is not made for that
        return dvi.to_arviz(
            model, guide, (X, Y), method=dvi.Samples(count), log_prior=True, seed=0, **options
        )


def test_of_the_exact_posterior_the_ratio_is_the_evidence():
    stats = exported(line, exact)["sample_stats"]
    evidence = dist.MultivariateNormal(
        torch.zeros(6).double(), SD**2 * torch.eye(6) + torch.outer(X, X)
    ).log_prob(Y)
    assert (stats["lp"] - stats["log_q"]).values == pytest.approx(
        np.full((1, 40), float(evidence)), rel=1e-12
    )


def test_the_prior_is_that_of_each_site_and_the_posterior_that_of_all():
    torch.set_default_dtype(torch.float64)
    try:
        guide = dvi.MeanFieldGuide(with_noise)
        found = exported(with_noise, guide)
    finally:
        torch.set_default_dtype(torch.float32)
    drawn = {
        name: torch.as_tensor(values(found, "posterior", name)) for name in ("weights", "noise", "shares")
    }
    prior = {
        "weights": dist.Normal(0.0, 1.0).log_prob(drawn["weights"]).sum(-1),
        "noise": dist.LogNormal(0.0, 1.0).log_prob(drawn["noise"]),
        "shares": dist.Dirichlet(torch.ones(3).double()).log_prob(drawn["shares"]),
    }
    for name, expected in prior.items():
        assert values(found, "log_prior", name) == pytest.approx(expected.numpy(), rel=1e-10)
    # Of several values that are no event, as of Normals that are independent, the sum.
    log_q = sum(
        fn.log_prob(drawn[name]).reshape(1, 40, -1).sum(-1) for name, fn in guide.get_posterior().items()
    )
    assert values(found, "sample_stats", "log_q") == pytest.approx(log_q.detach().numpy(), rel=1e-10)
    total = sum(prior.values()).numpy() + values(found, "log_likelihood", "obs").sum(-1)
    assert values(found, "sample_stats", "lp") == pytest.approx(total, rel=1e-10)


@pytest.mark.parametrize("make", [AutoNormal, AutoDiagonalNormal], ids=lambda make: make.__name__)
def test_guides_of_pyro_have_the_density_of_their_draws(make):
    guide = make(line)
    found = exported(line, guide)
    low, high = guide.quantiles([0.158655254, 0.841344746])["slope"]  # one standard deviation from the mean
    normal = dist.Normal((low + high) / 2, (high - low) / 2)
    expected = normal.log_prob(torch.as_tensor(values(found, "posterior", "slope"))).detach().numpy()
    assert values(found, "sample_stats", "log_q") == pytest.approx(expected, rel=1e-4)


def partly_a_point():
    guide = AutoGuideList(with_noise)
    guide.append(AutoDelta(block(with_noise, expose=["noise"])))
    guide.append(AutoNormal(block(with_noise, hide=["noise"])))
    return guide


@pytest.mark.parametrize(
    "model, make", [(line, lambda: AutoDelta(line)), (with_noise, partly_a_point)], ids=["point", "partly"]
)
def test_a_point_mass_has_no_density(model, make):
    assert list(exported(model, make())["sample_stats"].data_vars) == ["lp"]


def test_latents_in_a_plate_have_its_dimension():
    def heights(x, y=None):
        with pyro.plate("data", len(x)):
            height = pyro.sample("height", dist.Normal(torch.zeros(2), 1.0).to_event(1))
            return pyro.sample("obs", dist.Normal(height[:, 0], 1.0), obs=y)

    found = exported(heights, AutoNormal(heights))
    assert found["log_prior"]["height"].dims == ("chain", "draw", "data")
    assert values(found, "sample_stats", "log_q").dtype == np.float64  # a sum of many numbers of float32


def test_a_laplace_approximation_knows_draws_alone():
    guide = dvi.LaplaceGuide(line)
    guide.polish([(X, Y)], progress=False)
    guide.fit([(X, Y)])
    assert list(exported(line, guide)["sample_stats"].data_vars) == ["lp"]


def test_values_on_a_sphere_have_the_density_of_the_prior_alone():
    def on_circle(x, y=None):
        direction = pyro.sample("direction", dist.ProjectedNormal(x.new_ones(2)))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(direction[0] * x, SD), obs=y)

    found = exported(
        on_circle, lambda x, y=None: {"direction": pyro.sample("direction", dist.ProjectedNormal(x[:2]))}
    )
    assert list(found["sample_stats"].data_vars) == ["lp"]


def test_masked_observations_and_the_scale_of_a_plate_do_not_count():
    counts = torch.arange(6) < 4

    def masked(x, y=None):
        slope = pyro.sample("slope", dist.LogNormal(x.new_zeros(()), 1.0))
        with (
            pyro.plate("data", 60, subsample_size=6, subsample=torch.arange(6)),
            pyro.poutine.mask(mask=counts),
        ):
            return pyro.sample("obs", dist.Normal(slope * x, SD), obs=y)

    found = exported(masked, AutoNormal(masked))
    slope = torch.as_tensor(values(found, "posterior", "slope"))[..., None]
    expected = dist.LogNormal(0.0, 1.0).log_prob(slope)[..., 0]
    expected = expected + dist.Normal(slope * X[counts], SD).log_prob(Y[counts]).sum(-1)
    assert values(found, "sample_stats", "lp") == pytest.approx(expected.numpy(), rel=1e-6)


def pareto_k(stats):
    """As the page on posterior analysis computes it."""
    ratio = stats["lp"] - stats["log_q"]
    if not ARVIZ_1:
        return float(az.psislw(ratio.values.flatten())[1])
    import arviz_stats  # noqa: F401 (which gives arrays their accessor)

    return float((-ratio).azstats.psislw(dim=["chain", "draw"])[1])


@pytest.mark.slow
def test_pareto_k_tells_a_posterior_that_is_too_narrow():
    def wide(x, y=None):
        pyro.sample("slope", dist.Normal(MEAN, 1.5 * PRECISION**-0.5))

    good, bad = (pareto_k(exported(line, guide, 2000)["sample_stats"]) for guide in (wide, narrow))
    assert good < 0.5 and bad > 0.7


def test_which_member_of_an_ensemble_it_is_counts_as_a_latent():
    model, ensemble = dvi.train_ensemble(lambda: (line, exact), 2, progress=False)
    found = exported(model, ensemble, 5)  # of each
    assert values(found, "log_prior", "member") == pytest.approx(np.full((1, 10), -np.log(2)))
    drawn = torch.as_tensor(values(found, "posterior", "slope"))
    assert values(found, "log_prior", "slope") == pytest.approx(dist.Normal(0.0, 1.0).log_prob(drawn).numpy())
    assert list(found["sample_stats"].data_vars) == ["lp"]  # the draws go through the members in turn


def test_likelihoods_at_the_means_of_members_are_not_those_of_the_draws():
    def member():
        guide = AutoNormal(line, init_scale=0.1 + torch.rand(()).item())
        guide(X, Y)
        return line, guide

    model, ensemble = dvi.train_ensemble(member, 2, progress=False)
    found = dvi.to_arviz(model, ensemble, (X, Y), 10, method=dvi.AtMean(), log_prior=True, seed=0)
    assert "log_likelihood" in groups(found) and "sample_stats" not in groups(found)
