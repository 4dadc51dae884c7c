# SPDX-License-Identifier: Apache-2.0
"""Cold posteriors: the temperature T of every objective and of LaplaceGuide."""

import math
from copy import deepcopy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoMultivariateNormal, AutoNormal
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.bayesian import init_to_module
from pyro_dvi.curvature import GGNDiagonal
from pyro_dvi.errors import ArgumentError, ModelError, UnsupportedError
from pyro_dvi.laplace import GGN, Dense, Diagonal, KroneckerFactored
from pyro_dvi.natural_gradients import IVON, VOGN, AsPrinted
from pyro_dvi.objectives import Captured, SampledELBO
from tests.models import LinearRegression, gradients

T, PRIOR = 0.05, 0.8
pytestmark = pytest.mark.usefixtures("double")


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(30, 2, generator=generator, dtype=torch.float64)
    return x, (x.sum(-1) > 0).long()


def classifier(prior_scale):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 2))
    return dvi.classifier(dvi.to_bayesian_(net, prior_scale=prior_scale), num_data=30)


VARIATIONAL = {
    "VL": (dvi.TaylorELBO, dvi.MeanFieldGuide),
    "moments": (dvi.MomentPropagationELBO, dvi.MeanFieldGuide),
    "MNVI": (dvi.MomentPropagationELBO, dvi.MultiplicativeNoiseGuide),
    "sampled": (SampledELBO, lambda model: AutoNormal(model, init_loc_fn=init_to_module)),
    "full covariance, sampled": (
        SampledELBO,
        lambda model: AutoMultivariateNormal(model, init_loc_fn=init_to_module),
    ),
}


@pytest.mark.parametrize("method", VARIATIONAL)
def test_with_normal_priors_it_is_a_kl_weight_and_a_narrower_prior(data, method):
    """With prior sd s, T has the gradients of the KL weight T and the prior sd s sqrt(T)."""
    objective, family = VARIATIONAL[method]
    found = []
    parameters = None
    for options, scale in (({"temperature": T}, PRIOR), ({"kl_weight": T}, PRIOR * math.sqrt(T))):
        pyro.clear_param_store()
        model = classifier(scale)
        guide, elbo = family(model), objective(**options)
        elbo.loss(model, guide, *data)
        parameters = deepcopy(guide.state_dict()) if parameters is None else parameters
        guide.load_state_dict(parameters)
        losses = []
        for _ in range(2):  # whose difference has no constant
            pyro.set_rng_seed(0)
            losses.append(elbo.loss_and_grads(model, guide, *data))
            grads = gradients()
            with torch.no_grad():
                for parameter in guide.parameters():
                    parameter.add_(0.01 * torch.sin(torch.arange(parameter.numel())).reshape(parameter.shape))
        found.append((losses[1] - losses[0], grads))
    (cold, ours), (weighted, theirs) = found
    assert cold == pytest.approx(weighted, rel=1e-9)
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-8, atol=1e-10)


@pytest.mark.every(2)
@pytest.mark.parametrize("optimizer", [VOGN, IVON])
def test_natural_gradients_end_where_a_kl_weight_and_a_narrower_prior_end(data, optimizer):
    means = []
    for options, scale in (({"temperature": T}, PRIOR), ({"kl_weight": T}, PRIOR * math.sqrt(T))):
        pyro.clear_param_store()
        pyro.set_rng_seed(3)
        model = classifier(scale)
        guide = dvi.NaturalGradientGuide(model, initial_scale=0.05 * PRIOR / scale)
        svi = SVI(model, guide, optimizer({"max_step": None, "lr": 0.1}), dvi.NaturalGradientELBO(**options))
        for _ in range(30):
            svi.step(*data)
        means.append(dict(guide.named_parameters()))
    for name, value in means[0].items():
        torch.testing.assert_close(value, means[1][name], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("optimizer", [VOGN, IVON])
def test_the_precision_of_natural_gradients_is_divided_by_it(data, optimizer):
    """At frozen means and a frozen curvature s, the precision is (N s / beta + delta) / T."""
    model = classifier(PRIOR)
    guide = dvi.NaturalGradientGuide(model)
    options = {"lr": 1e-12, "initial_curvature": 0.3, "betas": (0.9, 1 - 1e-12), "warmup_steps": 0}
    elbo = dvi.NaturalGradientELBO(kl_weight=0.5, temperature=T)
    svi = SVI(model, guide, optimizer(options), elbo)
    for _ in range(2):  # the first one may measure what the optimizer does not want
        svi.step(*data)
    for name in ("net.0.weight", "net.2.bias"):
        expected = (30 * 0.3 / 0.5 + PRIOR**-2) / T
        found = guide.precision_parameter(name).detach()
        torch.testing.assert_close(found, torch.full_like(found, expected), rtol=1e-6, atol=0)


@pytest.mark.slow
def test_variational_laplace_of_a_linear_model_ends_at_the_cold_posterior():
    """The mean is the mode, and each variance T / (information + prior precision)."""
    problem = LinearRegression()
    guide, elbo = dvi.MeanFieldGuide(problem.model), dvi.TaylorELBO(curvature=GGNDiagonal(), temperature=0.2)
    svi = SVI(problem.model, guide, dvi.optim.Adam({"lr": 0.05, "betas": (0.9, 0.99)}), elbo)
    for _ in range(500):
        svi.step(problem.x, problem.y)
    precision = problem.information().diagonal() + problem.prior_scale**-2
    found = torch.cat([guide.scales.weight.reshape(-1), guide.scales.bias.reshape(-1)]).square()
    torch.testing.assert_close(found, 0.2 / precision, rtol=1e-3, atol=0)


@pytest.mark.parametrize(
    "prior", [dist.StudentT(4.0, 0.3, 0.5), dist.Gamma(2.0, 3.0), dist.LogNormal(0.1, 0.4)]
)
def test_other_priors_have_the_loss_of_the_definition(prior):
    """E_q[-log p(u)] - T H[q] in unconstrained space, by a sum over a fine grid."""

    def model():
        w = pyro.sample("w", prior)
        pyro.sample("y", dist.Normal(0 * w, 1.0), obs=torch.tensor(0.0))

    guide = dvi.MeanFieldGuide(model)
    constant = 0.5 * math.log(2 * math.pi)
    loss = dvi.TaylorELBO(kl_weight=0.7, temperature=T).loss(model, guide) - constant
    loc, scale = guide.locs.w.detach(), guide.scales.w.detach()
    u = loc + scale * torch.linspace(-9, 9, 40_001)
    weights = torch.softmax(-0.5 * ((u - loc) / scale) ** 2, 0)
    transform = torch.distributions.transform_to(prior.support)
    log_prior = prior.log_prob(transform(u))
    if prior.support is not torch.distributions.constraints.real:
        log_prior = log_prior + u  # of the exponential
    entropy = math.log(scale) + 0.5 * math.log(2 * math.pi * math.e)
    assert loss == pytest.approx(0.7 * (-(weights * log_prior).sum() - T * entropy).item(), rel=1e-5)


def test_a_guide_of_a_joint_vector_has_the_entropy_of_the_joint(data):
    model = classifier(PRIOR)
    guide = dvi.LastLayerGuide(model, "net.2.*", rest=dvi.MeanFieldGuide)
    losses = []
    for temperature in (1.0, 0.5):
        pyro.set_rng_seed(0)  # of the points of the likelihood
        elbo = dvi.MomentPropagationELBO(temperature=temperature, kl_weight=0.3)
        losses.append(elbo.loss(model, guide, *data))
    with torch.no_grad():
        trace = pyro.poutine.trace(guide).get_trace(*data)
        entropy = sum(
            site["fn"].entropy().sum()
            for site in trace.nodes.values()
            if site["type"] == "sample" and "Delta" not in type(site["fn"]).__name__
        )
    assert losses[1] - losses[0] == pytest.approx(0.3 * 0.5 * float(entropy), rel=1e-8)


def test_a_point_mass_has_no_temperature(data):
    model = classifier(PRIOR)
    guide = AutoDelta(model)
    losses = {SampledELBO(temperature=t).loss(model, guide, *data) for t in (0.01, 1.0)}
    assert len(losses) == 1


@pytest.mark.slow
def test_a_density_of_constrained_values_counts_in_unconstrained_space():
    """The entropy of a Gamma guide is that of the logarithm, here by 400,000 draws; particles err by about .015."""

    def model():
        w = pyro.sample("w", dist.Gamma(2.0, 1.0))
        pyro.sample("y", dist.Normal(0 * w, 1.0), obs=torch.tensor(0.0))

    def guide():
        pyro.sample("w", dist.Gamma(torch.full((), 3.0), 2.0))

    losses = []
    for temperature in (1.0, 0.5):
        pyro.set_rng_seed(0)
        elbo = SampledELBO(temperature=temperature, num_particles=1500)
        losses.append(elbo.loss(model, guide))
    q = dist.Gamma(3.0, 2.0)
    u = q.sample((400_000,)).log()
    entropy = -(q.log_prob(u.exp()) + u).mean()
    assert losses[1] - losses[0] == pytest.approx(0.5 * float(entropy), abs=0.05)


def test_a_gaussian_that_is_transformed_once_more_is_refused():
    def model():
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(1.0))

    def guide():
        s = pyro.param("s", torch.tensor(0.5))
        shift = dist.transforms.AffineTransform(0.0, s)
        pyro.sample("w", dist.TransformedDistribution(dist.Normal(torch.zeros(()), 1.0), [shift]))

    with pytest.raises(UnsupportedError, match="posterior of site 'w' is not Normal in unconstrained space"):
        SampledELBO(temperature=0.5).loss(model, guide)


@pytest.mark.slow
@pytest.mark.parametrize("objective", [dvi.TaylorELBO, dvi.NaturalGradientELBO])
def test_a_cold_posterior_becomes_a_prior_in_which_data_count_once(objective):
    """Two tasks of linear regression at any temperature end at the mean of both."""
    ends = []
    for temperature in (1.0, 0.1):
        pyro.clear_param_store()
        problem = LinearRegression()
        model = problem.model
        for _ in range(2):
            natural = objective is dvi.NaturalGradientELBO
            guide = dvi.NaturalGradientGuide(model) if natural else dvi.MeanFieldGuide(model)
            lr = dvi.OGN({"lr": 0.3, "max_step": None}) if natural else dvi.optim.Adam({"lr": 0.02})
            options = {} if natural else {"curvature": GGNDiagonal()}
            elbo = objective(temperature=temperature, **options)
            steps = [(problem.x, problem.y)] * (500 if natural else 700)
            dvi.fit(SVI(model, guide, lr, elbo), steps, 1, progress=False)
            state = guide.state_dict()
            guide.load_state_dict(state)  # the temperature goes along
            model = guide.as_prior()(problem.model)
            pyro.clear_param_store()
            problem.y = problem.y + 1.0
        ends.append(guide.median()["weight"])
    torch.testing.assert_close(ends[1], ends[0], rtol=0.02, atol=0.01)


@pytest.mark.parametrize("scale", ["learned", "latent"])
@pytest.mark.parametrize("objective", [dvi.TaylorELBO, dvi.MomentPropagationELBO, SampledELBO])
def test_scales_of_priors_that_are_free_are_refused_below_one(objective, scale):
    def model():
        if scale == "latent":
            s = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        else:
            s = pyro.param("s", torch.tensor(0.5), dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(0.0, s))
        pyro.sample("y", dist.Normal(w, 1.0), obs=torch.tensor(0.3))

    guide = dvi.MeanFieldGuide(model)
    objective(temperature=1.5).loss(model, guide)
    with pytest.raises(ModelError, match=r"prior of site 'w'.*kl_weight instead of temperature"):
        objective(temperature=0.5).loss(model, guide)


@pytest.mark.parametrize(
    "prior",
    [
        lambda s: dist.TransformedDistribution(
            dist.Normal(0.0, 1.0), [dist.transforms.AffineTransform(0.0, s)]
        ),
        lambda s: dist.Weibull(s, 2.0),
        lambda s: dist.Gumbel(0.0, s),
        lambda s: dist.Normal(0.0, s).mask(True),
        lambda s: dist.Beta(s, 1.0),
        lambda s: dist.MultivariateNormal(torch.zeros(2), s * torch.eye(2)),
    ],
)
def test_free_scales_are_found_wherever_they_are(prior):
    def model():
        w = pyro.sample("w", prior(pyro.param("s", torch.tensor(0.5), dist.constraints.positive)))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(0.3))

    with pytest.raises(ModelError, match="prior of site 'w'"):
        SampledELBO(temperature=0.5).loss(model, dvi.MeanFieldGuide(model))


def test_free_scales_are_refused_for_guides_with_covariances():
    def model():
        s = pyro.param("s", torch.tensor(0.5), dist.constraints.positive)
        w = pyro.sample("w", dist.Normal(torch.zeros(2), s).to_event(1))
        pyro.sample("y", dist.Normal(w.sum(), 1.0), obs=torch.tensor(0.3))

    guide = AutoMultivariateNormal(model)
    assert math.isfinite(SampledELBO(temperature=1.5).loss(model, guide))
    with pytest.raises(ModelError, match="prior of site 'w'"):
        SampledELBO(temperature=0.5).loss(model, guide)


def test_a_learned_mean_of_a_prior_is_no_free_scale():
    def model():
        loc = pyro.param("loc", torch.tensor(0.5))
        w = pyro.sample("w", dist.Normal(loc, 1.0))
        v = pyro.sample("v", dist.Gumbel(loc, 1.0))
        pyro.sample("y", dist.Normal(w + v, 1.0), obs=torch.tensor(0.3))

    assert math.isfinite(SampledELBO(temperature=0.5).loss(model, dvi.MeanFieldGuide(model)))


def test_algorithm_1_to_the_letter_has_no_second_temperature(data):
    model = classifier(PRIOR)
    guide = dvi.NaturalGradientGuide(model)
    svi = SVI(model, guide, VOGN({"formulation": AsPrinted()}), dvi.NaturalGradientELBO(temperature=0.5))
    with pytest.raises(UnsupportedError, match="AsPrinted"):
        [svi.step(*data) for _ in range(2)]


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf, "cold"])
def test_it_is_a_positive_number(wrong):
    for make in (dvi.TaylorELBO, dvi.MomentPropagationELBO, dvi.NaturalGradientELBO, SampledELBO):
        with pytest.raises(ArgumentError, match="temperature"):
            make(temperature=wrong)
    with pytest.raises(ArgumentError, match="temperature"):
        dvi.LaplaceGuide(lambda: None, temperature=wrong)


def test_captured_steps_follow_it(data):
    losses = []
    for captured in (False, True):
        pyro.clear_param_store()
        model = classifier(PRIOR)
        guide, elbo = dvi.MeanFieldGuide(model), dvi.TaylorELBO(temperature=T)
        used = Captured(elbo) if captured else elbo
        svi, found = SVI(model, guide, dvi.optim.Adam({"lr": 0.01}), used), []
        for step in range(30):
            elbo.temperature = T if step < 20 else 0.5
            found.append(svi.step(*data))
        losses.append(found)
    assert losses[0] == losses[1]


# Laplace ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [Dense(GGN()), Diagonal(GGN()), KroneckerFactored()], ids=repr)
def test_the_covariance_of_laplace_is_multiplied_by_it(data, method):
    variances = []
    for temperature in (1.0, 0.3):
        pyro.clear_param_store()
        model = classifier(PRIOR)
        guide = dvi.LaplaceGuide(model, kl_weight=0.5, temperature=temperature)
        guide.initialize(*data)
        guide.fit([data], method, unconverged="accept")
        variances.append(guide.predictive(data[0]).variance)
    torch.testing.assert_close(variances[1], 0.3 * variances[0], rtol=1e-6, atol=0)


def test_the_mode_of_laplace_does_not_depend_on_it_and_the_evidence_refuses_it(data):
    modes = []
    for temperature in (1.0, 0.3):
        pyro.clear_param_store()
        model = classifier(PRIOR)
        guide = dvi.LaplaceGuide(model, temperature=temperature)
        guide.initialize(*data)
        guide.polish([data], progress=False)
        modes.append(guide.unconstrained_mode())
    for name, value in modes[0].items():
        torch.testing.assert_close(value, modes[1][name], rtol=0, atol=1e-4)
    with pytest.raises(ArgumentError, match="no evidence"):
        guide.log_evidence([data])
