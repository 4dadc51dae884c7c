# SPDX-License-Identifier: Apache-2.0
"""Means, scales and priors are read the same way from every guide."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import autoguide
from torch import nn
from torch.testing import assert_close

from pyro_dvi import (
    LaplaceGuide,
    MeanFieldGuide,
    MultiplicativeNoiseGuide,
    NaturalGradientGuide,
    laplace,
    to_bayesian_,
)
from pyro_dvi.analysis.diagnostics.posterior_scales import posterior_spread, scale_snapshot
from pyro_dvi.errors import GuideError
from pyro_dvi.guides.factors import PerSite, SGDStepSize

X = torch.linspace(-1, 1, 8)
PRIORS = {"slope": torch.tensor([0.5, 2.0]), "offset": torch.tensor(3.0), "noise": torch.tensor(0.7)}


def model(x, y=None):
    slope = pyro.sample("slope", dist.Normal(torch.zeros(2), PRIORS["slope"]).to_event(1))
    offset = pyro.sample("offset", dist.Normal(0.0, 3.0))
    noise = pyro.sample("noise", dist.LogNormal(0.0, 0.7))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(slope.sum() * x + offset, noise), obs=y)


GUIDES = {
    "mean field": (lambda: MeanFieldGuide(model), torch.tensor(-3.0).exp()),
    "one scale per site": (lambda: MeanFieldGuide(model, scale=PerSite()), torch.tensor(-3.0).exp()),
    "natural gradients": (lambda: NaturalGradientGuide(model, initial_scale=0.1), torch.tensor(0.1)),
}
PYRO_GUIDES = {
    "AutoNormal": lambda: autoguide.AutoNormal(model, init_scale=0.2),
    "AutoDiagonalNormal": lambda: autoguide.AutoDiagonalNormal(model, init_scale=0.2),
    "AutoMultivariateNormal": lambda: autoguide.AutoMultivariateNormal(model, init_scale=0.2),
}


def read(guide):
    return {spread.site: spread for spread in posterior_spread(guide)}


@pytest.mark.parametrize("kind", GUIDES)
def test_scales_start_at_a_fraction_of_the_prior(kind):
    make, fraction = GUIDES[kind]
    guide = make()
    guide.initialize(X, X)
    spreads = read(guide)
    assert list(spreads) == list(PRIORS)
    for site, prior in PRIORS.items():
        spread = spreads[site]
        assert_close(spread.prior_scale.expand_as(spread.loc), prior.expand_as(spread.loc))
        expected = prior.mean().expand_as(prior) if kind == "one scale per site" else prior
        assert_close(spread.scale, (fraction * expected).expand_as(spread.loc))
        assert_close(spread.initial_scale.expand_as(spread.loc), spread.scale)
        assert spread.is_learned and spread.is_real == (site != "noise")


@pytest.mark.parametrize("kind", PYRO_GUIDES)
def test_guides_of_pyro(kind):
    guide = PYRO_GUIDES[kind]()
    guide(X, X)
    for site, spread in read(guide).items():
        assert_close(spread.scale, torch.full_like(spread.loc, 0.2))
        assert_close(spread.initial_scale, torch.tensor(0.2))
        assert_close(spread.prior_scale.expand_as(spread.loc), PRIORS[site].expand_as(spread.loc))


def test_a_list_of_guides_is_read_part_by_part():
    guide = autoguide.AutoGuideList(model)
    guide.append(autoguide.AutoNormal(poutine.block(model, expose=["slope"])))
    guide.append(autoguide.AutoDelta(poutine.block(model, expose=["offset"])))
    guide.append(autoguide.AutoDiagonalNormal(poutine.block(model, expose=["noise"])))
    guide(X, X)
    assert list(read(guide)) == ["slope", "noise"]  # a point mass has no scale


def test_a_joint_posterior_gives_its_marginals():
    guide = autoguide.AutoMultivariateNormal(model)
    guide(X, X)
    with torch.no_grad():
        guide.scale_tril_unconstrained += 0.3 * torch.randn(4, 4)
    expected = guide.get_posterior().variance.sqrt()
    found = torch.cat([spread.scale.flatten() for spread in posterior_spread(guide)])
    assert_close(found, expected.detach())


def test_a_low_rank_posterior_gives_its_marginals_but_no_start():
    guide = autoguide.AutoLowRankMultivariateNormal(model, rank=2)
    guide(X, X)
    spreads = list(posterior_spread(guide))
    found = torch.cat([spread.scale.flatten() for spread in spreads])
    assert_close(found, guide.get_posterior().variance.sqrt().detach())
    assert all(spread.initial_scale is None for spread in spreads)


def test_multiplicative_noise_starts_relative_to_its_means():
    guide = MultiplicativeNoiseGuide(to_bayesian_(nn.Linear(3, 2, dtype=torch.float64)), initial_rho=-1.0)
    guide.initialize(torch.ones(1, 3, dtype=torch.float64))
    (spread,) = posterior_spread(guide)  # biases are point masses
    alpha = torch.nn.functional.softplus(torch.tensor(-1.0, dtype=torch.float64))
    assert_close(spread.scale, (alpha * spread.loc.square() + 1e-8).sqrt())
    assert_close(spread.initial_scale, spread.scale)
    with torch.no_grad():
        guide.locs.weight_unconstrained *= 2
        guide.alphas.weight_unconstrained += 1
    (moved,) = posterior_spread(guide)
    assert (moved.scale > moved.initial_scale).all()


def test_scales_of_a_fixed_family_are_not_learned():
    guide = MeanFieldGuide(model, scale=SGDStepSize(0.1, 5))
    guide.initialize(X, X)
    for spread in posterior_spread(guide):
        assert not spread.is_learned and spread.initial_scale is None
        assert_close(spread.scale, torch.full_like(spread.loc, 0.1))


def test_the_gaussian_of_a_laplace_guide():
    def line(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)

    guide = LaplaceGuide(line)
    guide.initialize(X, X)
    with pytest.raises(GuideError, match=r"guide.fit\(batches, method\)"):
        list(posterior_spread(guide))
    guide.polish([(X, X)], progress=False)
    guide.fit([(X, X)], laplace.Diagonal())
    (spread,) = posterior_spread(guide)
    precision = X.square().sum() / 0.5**2 + 1 / 2.0**2  # closed form of the linear model
    assert_close(spread.scale, precision.rsqrt())
    assert_close(spread.prior_scale, torch.tensor(2.0))
    assert not spread.is_learned


def test_the_prior_of_a_hierarchy_is_the_one_at_the_posterior_median():
    def hierarchy():
        scale = pyro.sample("scale", dist.HalfCauchy(1.0))
        pyro.sample("w", dist.Normal(torch.zeros(3), scale).to_event(1))

    guide = autoguide.AutoNormal(hierarchy)
    guide()
    with torch.no_grad():
        guide.locs.scale_unconstrained.fill_(2.0)
    spreads = read(guide)
    assert_close(spreads["w"].prior_scale.expand(3), torch.tensor(2.0).exp().expand(3))
    assert spreads["scale"].prior_scale is None  # no Normal before the transform


def test_a_learned_prior_scale_is_the_present_one():
    def learned():
        scale = pyro.param("prior", torch.tensor(1.0), constraint=dist.constraints.positive)
        pyro.sample("w", dist.Normal(torch.zeros(3), scale).to_event(1))

    guide = MeanFieldGuide(learned)
    guide.initialize()
    pyro.get_param_store()["prior"] = torch.tensor(4.0)
    (spread,) = posterior_spread(guide)
    assert_close(spread.prior_scale.expand(3), torch.full((3,), 4.0))


@pytest.mark.parametrize(
    ("prior", "scale"),
    [(dist.Laplace(0.0, 2.0), 8**0.5), (dist.StudentT(4.0), 2**0.5), (dist.Cauchy(0.0, 1.0), None)],
)
def test_other_priors_on_the_real_line_have_their_standard_deviation(prior, scale):
    guide = autoguide.AutoNormal(lambda: pyro.sample("w", prior))
    guide()
    (spread,) = posterior_spread(guide)
    if scale is None:
        assert spread.prior_scale is None
    else:
        assert_close(spread.prior_scale, torch.tensor(scale))


def test_latents_of_a_subsampled_plate():
    def local(x, y=None):
        with pyro.plate("data", 20, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 2.0))
            pyro.sample("y", dist.Normal(z, 1.0), obs=x)

    guide = MeanFieldGuide(local)
    guide.initialize(X)
    (spread,) = posterior_spread(guide)
    assert spread.scale.shape == (20,)
    assert_close(spread.prior_scale.expand(20), torch.full((20,), 2.0))


def test_looking_changes_nothing():
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Dropout())
    guide = MeanFieldGuide(to_bayesian_(net))
    x = torch.randn(5, 2)
    guide.initialize(x)
    before = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    scale_snapshot(guide)
    assert all(torch.equal(a, b) for a, b in zip(before[0].values(), net.state_dict().values(), strict=True))
    assert torch.equal(before[1], torch.get_rng_state())
    assert all(module.training for module in net.modules())


def test_a_copy_without_its_model_has_the_priors_of_the_first_look():
    guide = MeanFieldGuide(model)
    guide.initialize(X, X)
    setattr(guide, "_model", None)  # noqa: B010 (as in what pickle loads; Pyro types it as a tuple)
    assert_close(read(guide)["offset"].prior_scale, torch.tensor(3.0))


def flow():
    guide = autoguide.AutoIAFNormal(model)
    guide(X, X)
    return guide


def point_mass():
    guide = autoguide.AutoDelta(model)
    guide(X, X)
    return guide


def structured():
    guide = autoguide.AutoStructured(
        model, conditionals={name: "normal" for name in PRIORS}, dependencies={"offset": {"slope": "linear"}}
    )
    guide(X, X)
    return guide


def before_its_fit():
    guide = autoguide.AutoLaplaceApproximation(model)
    guide(X, X)
    return guide


MISTAKES = {
    "a guide function": (lambda: model, "model is not known to be Gaussian"),
    "never run": (lambda: MeanFieldGuide(model), "is not initialised"),
    "a flow": (flow, "AutoIAFNormal is not known to be Gaussian"),
    "a point mass": (point_mass, "point mass at every site"),
    "before its fit": (before_its_fit, r"laplace_approximation\(\*args\)"),
    "dependent": (structured, "AutoStructured is not known to be Gaussian"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_guides_without_scales_are_refused(mistake):
    make, message = MISTAKES[mistake]
    with pytest.raises(GuideError, match=message):
        list(posterior_spread(make()))
