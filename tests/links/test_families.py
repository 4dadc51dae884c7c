# SPDX-License-Identifier: Apache-2.0
"""Predictive distributions against quadrature of the plain density, and against its moments."""

import pyro.distributions as dist
import pytest
import torch
from torch import distributions as td

from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.links import GaussHermite, MomentMatched, Probit, SobolSoftmax, predictive_rule
from pyro_dvi.links.families import _RULES, Joint, predictive_distribution
from pyro_dvi.links.noise_links import PointMixture
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.value import Link
from tests.expectations.cases import CLASSES, NUMERICAL, RULES, Case, Uncertain

# One distribution that has the exact mean and variance, but only nearly the density.
MATCHED = [
    c for c in RULES if c.family in (td.Normal, td.LogNormal) and isinstance(c.parameters["scale"], Uncertain)
]
# A kink, or a density narrower than the Gaussian of its location
TOLERANCE = {td.Laplace: 5e-2, td.StudentT: 5e-3, td.MultivariateNormal: 1e-6, td.Beta: 1e-3}
# The variance of the Gaussian is no moment of these, or the density at the points is very narrow.
NO_VARIANCE = (td.Cauchy, td.VonMises)


def density(case: Case) -> torch.Tensor:
    """Log of the average density, by fine quadrature."""
    weights, log_prob = case.nodes()
    return torch.logsumexp(weights.log().reshape(-1, *(1,) * (log_prob.dim() - 1)) + log_prob, 0)


def ours(case: Case, **options: object) -> td.Distribution:
    return predictive_distribution(case.family, case.build(*case.gaussians()), **options)


@pytest.mark.parametrize("case", [c for c in RULES + NUMERICAL if c not in MATCHED], ids=str)
def test_density_against_quadrature(case):
    tolerance = TOLERANCE.get(case.family, 1e-4)
    torch.testing.assert_close(ours(case).log_prob(case.observed()), density(case), atol=tolerance, rtol=1e-4)


@pytest.mark.parametrize("case", MATCHED, ids=str)
def test_a_mixture_over_the_scale_has_the_density(case):
    fine = ours(case, noise=GaussHermite(32)).log_prob(case.observed())
    torch.testing.assert_close(fine, density(case), atol=1e-3, rtol=0)


@pytest.mark.parametrize("case", [c for c in MATCHED if c.family is td.Normal], ids=str)
def test_one_normal_has_the_moments_of_the_mixture(case):
    """The linked moments of these cases are no true ones but for exp, whose rule needs none."""
    if case.parameters["scale"].name != "exp":
        pytest.skip("moment matching takes the moments of the scale as they are")
    one, mixture = ours(case, noise=MomentMatched()), ours(case, noise=GaussHermite(64))
    assert isinstance(one, td.Normal) and isinstance(mixture, PointMixture)
    torch.testing.assert_close(one.mean, mixture.mean)
    torch.testing.assert_close(one.variance, mixture.variance)


@pytest.mark.parametrize("case", RULES + CLASSES + NUMERICAL, ids=str)
def test_shapes_are_those_of_the_family(case):
    plain = case.plain(case.gaussians()[::2])
    predictive = ours(case)
    assert predictive.batch_shape == plain.batch_shape
    assert predictive.event_shape == plain.event_shape
    assert predictive.sample((2,)).shape == (2, *plain.batch_shape, *plain.event_shape)
    assert predictive.log_prob(predictive.sample()).shape == plain.batch_shape
    if not isinstance(plain, (*NO_VARIANCE, td.Categorical)):
        assert predictive.mean.shape == predictive.variance.shape == plain.mean.shape
        assert (predictive.variance >= 0).all()


@pytest.mark.parametrize("case", CLASSES[:4], ids=str)
def test_probabilities_are_average_ones(case):
    """Two-dimensional quadrature over three logits, whose probabilities are those at the nodes."""
    predictive = ours(case)
    torch.testing.assert_close(predictive.log_prob(case.observed()), density(case), atol=1e-2, rtol=0)
    assert type(predictive) is case.family


def test_average_counts_of_classes():
    case = CLASSES[-1]
    torch.testing.assert_close(ours(case).log_prob(case.observed()), density(case), atol=0.1, rtol=0)


def test_links_of_classes_are_passed_on():
    case = CLASSES[0]
    parameters = case.build(*case.gaussians())
    for link in (Probit(), SobolSoftmax(64)):
        p = predictive_distribution(case.family, parameters, link=link).probs
        torch.testing.assert_close(
            p, link.probabilities(parameters["logits"].loc, parameters["logits"].variance)
        )


def test_every_rule_has_a_case():
    assert {c.family for c in RULES + CLASSES} >= {f for f in _RULES if f.__module__.startswith("torch.")}


def test_probabilities_without_a_link_are_their_mean():
    loc = torch.tensor([[0.2, 0.3, 0.5]])
    probs = GaussianMoments(loc, torch.full((1, 3), 0.01))
    for family in (td.Categorical, td.OneHotCategorical, td.Bernoulli):
        torch.testing.assert_close(predictive_distribution(family, {"probs": probs}).probs, loc)


@pytest.mark.parametrize("linked", [False, True], ids=["Gaussian logits", "a function of Gaussian logits"])
@pytest.mark.parametrize("family", [td.Bernoulli, td.Categorical, td.OneHotCategorical])
def test_float32_keeps_the_tails_of_probabilities(family, linked):
    """Of the answer that is not expected: -40, where the rounding of one minus a probability ends at -16."""
    loc = torch.tensor([40.0]) if family is td.Bernoulli else torch.tensor([40.0, 0.0, 0.0])
    logits = GaussianMoments(loc, torch.full_like(loc, 1e-4))
    if linked:
        logits = logits.linked(Link(logits, lambda f: f + 0.0, "shifted"))
    rare = {td.Bernoulli: torch.zeros(1), td.Categorical: torch.tensor(1)}
    y = rare.get(family, torch.tensor([0.0, 1.0, 0.0]))
    found = predictive_distribution(family, {"logits": logits}).log_prob(y)
    torch.testing.assert_close(found, family(logits=loc).log_prob(y), rtol=1e-4, atol=0)


def test_ordered_classes_have_average_probabilities():
    f, cutpoints = (
        GaussianMoments(torch.tensor([0.3, -2.0]), torch.tensor([1.0, 0.2])),
        torch.tensor([-1.0, 0.0, 1.0]),
    )
    found = predictive_distribution(dist.OrderedLogistic, {"predictor": f, "cutpoints": cutpoints})
    z = torch.linspace(-8, 8, 2001)
    at_nodes = dist.OrderedLogistic(f.loc + f.variance.sqrt() * z[:, None], cutpoints).probs
    average = torch.tensordot(torch.softmax(-0.5 * z**2, 0), at_nodes, 1)
    torch.testing.assert_close(found.probs, average, atol=1e-5, rtol=0)


def test_logits_that_are_a_function_of_gaussians():
    inner = GaussianMoments(torch.tensor([[0.2, -1.0]]).double(), torch.tensor([[0.5, 2.0]]).double())
    bent = GaussianMoments(inner.loc.tanh(), inner.variance, Link(inner, torch.tanh, "tanh"))
    samples = (inner.loc + inner.variance.sqrt() * torch.randn(200_000, 1, 2).double()).tanh()
    for family in (td.Categorical, td.Bernoulli):
        p = predictive_distribution(family, {"logits": bent}).probs
        torch.testing.assert_close(p, family(logits=samples).probs.mean(0), atol=4e-3, rtol=0)


def test_classes_of_pyro():
    f = GaussianMoments(torch.zeros(3), torch.ones(3))
    normal = predictive_distribution(dist.Normal, {"loc": f, "scale": 1.0})
    torch.testing.assert_close(normal.scale, torch.full((3,), 2.0).sqrt())
    assert type(predictive_distribution(dist.Categorical, {"logits": f})) is dist.Categorical
    heavy = predictive_distribution(dist.StudentT, {"df": 4.0, "loc": f, "scale": 1.0})
    assert isinstance(heavy.components, dist.StudentT)


def test_parameters_broadcast():
    rate = GaussianMoments(torch.full((4, 1, 3), 5.0), torch.full((4, 1, 3), 0.01))
    concentration = torch.ones(2, 3)
    gamma = predictive_distribution(td.Gamma, {"concentration": concentration, "rate": rate})
    assert gamma.batch_shape == (4, 2, 3)
    torch.testing.assert_close(gamma.mean, torch.full((4, 2, 3), 0.2), atol=1e-4, rtol=0)
    scale = GaussianMoments(
        torch.zeros(3).exp(),
        torch.ones(3),
        Link(GaussianMoments(torch.zeros(3), torch.ones(3)), torch.exp, "exp"),
    )
    loc = GaussianMoments(torch.zeros(4, 1, 3), torch.ones(4, 1, 3))
    for noise in (MomentMatched(), GaussHermite()):
        for mean in (loc, loc.loc, 0.0):
            made = predictive_distribution(td.Normal, {"loc": mean, "scale": scale}, noise=noise)
            assert made.batch_shape == ((3,) if isinstance(mean, float) else (4, 1, 3))


def test_float32_keeps_the_tails_of_a_mixture():
    rate = GaussianMoments(
        torch.tensor([1.0]),
        torch.tensor([0.1]),
        Link(GaussianMoments(torch.zeros(1), torch.full((1,), 0.1)), torch.exp, "exp"),
    )
    double = GaussianMoments(*(part.double() for part in (rate.loc, rate.variance)))
    inner = GaussianMoments(torch.zeros(1).double(), torch.full((1,), 0.1).double())
    y = torch.tensor([12.0])
    low = predictive_distribution(td.Poisson, {"rate": rate}).log_prob(y)
    high = predictive_distribution(
        td.Poisson, {"rate": double.linked(Link(inner, torch.exp, "exp"))}
    ).log_prob(y.double())
    torch.testing.assert_close(low.double(), high, atol=1e-4, rtol=0)


def test_certain_parameters_give_the_family():
    assert isinstance(predictive_distribution(td.Poisson, {"rate": torch.ones(2)}), td.Poisson)


def test_mistakes_are_refused():
    f = GaussianMoments(torch.zeros(3), torch.ones(3))
    with pytest.raises(ArgumentError, match="must be a positive whole number, not 0"):
        GaussHermite(0)
    with pytest.raises(UnsupportedError, match=r"Normal\(scale=.*softplus"):
        predictive_distribution(td.Normal, {"loc": 0.0, "scale": f}, noise=GaussHermite())
    with pytest.raises(UnsupportedError, match=r"Poisson\(rate=.*softplus"):
        predictive_distribution(td.Poisson, {"rate": f})
    with pytest.raises(ValueError, match="already has the rule normal"):
        predictive_rule(td.Normal)(lambda loc, scale: None)


@pytest.mark.parametrize("noise", [MomentMatched(), GaussHermite(32)], ids=str)
def test_mean_and_scale_of_one_gaussian(noise: object) -> None:
    h = GaussianMoments(torch.tensor([0.3]).double(), torch.tensor([0.4]).double())
    joint = predictive_distribution(td.Normal, {"loc": h, "scale": h.exp()}, noise=noise)
    z = torch.linspace(-10, 10, 4001, dtype=torch.float64)
    w = torch.softmax(-0.5 * z**2, 0)
    values = h.loc + h.variance.sqrt() * z
    variance = h.variance + w @ (2 * values).exp()
    torch.testing.assert_close(joint.variance, variance, rtol=1e-6, atol=0)  # whatever the correlation
    if not isinstance(noise, MomentMatched):
        y = torch.tensor([1.5]).double()
        exact = (w * td.Normal(values, values.exp()).log_prob(y).exp()).sum().log()
        torch.testing.assert_close(joint.log_prob(y), exact[None], rtol=0, atol=1e-6)


def test_a_noise_scale_that_mixes_elements() -> None:
    h = GaussianMoments(torch.tensor([[0.3, -0.5, 1.0]]).double(), torch.full((1, 3), 0.8).double())
    given = {"loc": torch.zeros(1, 3).double(), "scale": torch.softmax(h, -1) + 0.3}
    ours = predictive_distribution(td.Normal, given, noise=GaussHermite())
    values = h.loc + h.variance.sqrt() * torch.randn(100_000, 1, 3, dtype=torch.float64)
    brute = (torch.softmax(values, -1) + 0.3).square().mean(0)
    torch.testing.assert_close(ours.variance, brute, rtol=0.01, atol=0)


def test_a_rule_that_knows_no_covariances_is_not_asked_about_dependent_parameters():
    class Measured(td.Normal):
        pass

    predictive_rule(Measured)(lambda loc, scale: td.Normal(loc.loc, 1.0))
    try:
        given = {"loc": GaussianMoments(torch.zeros(1), torch.ones(1))}
        given["scale"] = GaussianMoments(torch.full((1,), 3.0), torch.full((1,), 0.01))
        covariance = torch.tensor([[[1.0, 0.05], [0.05, 0.01]]])
        joint = Joint(covariance, {"loc": 1, "scale": 1})
        assert isinstance(predictive_distribution(Measured, given), td.Normal)
        assert isinstance(predictive_distribution(Measured, given, joint=joint), PointMixture)
    finally:
        _RULES.pop(Measured)
