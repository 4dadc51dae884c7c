# SPDX-License-Identifier: Apache-2.0
"""Predictions of ensembles, against loops over their members in plain torch."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import distributions as td, nn

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, DviWarning, GuideError, ModelError
from pyro_dvi.predictive.rules.rule import OfMembers
from pyro_dvi.training import train_ensemble
from pyro_dvi.training.ensemble import train_apart

X = torch.linspace(-1, 1, 24, dtype=torch.float64)[:, None]
Y = (3 * X[:, 0]).sin()
LABELS = (X[:, 0] > 0).long() + (X[:, 0] > 0.5)
NOISE = 0.2


def network(outputs: int = 1) -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, outputs)).double()


def trained(make_guide=None, elbo=None, optimizer=None, *, classes: bool = False, epochs: int = 5):
    """Return a training of small networks of any method."""

    def train():
        net = dvi.to_bayesian_(network(3 if classes else 1))
        model = dvi.classifier(net, 24) if classes else dvi.regressor(net, 24, noise_scale=NOISE)
        guide = (make_guide or (lambda m: AutoDelta(m, init_loc_fn=dvi.bayesian.init_to_module)))(model)
        loss = elbo() if elbo else Trace_ELBO()
        svi = SVI(model, guide, optimizer() if optimizer else dvi.optim.Adam({"lr": 0.03}), loss=loss)
        dvi.fit(svi, [(X, LABELS if classes else Y)], epochs, progress=False)
        return model, guide

    return train


def outputs_of(member, outputs: int) -> torch.Tensor:
    """Run the network of a point mass in plain torch, in evaluation mode."""
    plain = network(outputs).eval()
    state = {**dict(member.model.named_parameters()), **dict(member.model.named_buffers())}
    with member.in_store():
        state |= member.guide.median()
    plain.load_state_dict(
        {name.removeprefix("net."): state[name] for name in map("net.{}".format, plain.state_dict())}
    )
    with torch.no_grad():
        return plain(X)


@pytest.fixture(scope="module")
def regression():
    model, guide = train_ensemble(trained(), 4, progress=False)
    return model, guide, torch.stack([outputs_of(member, 1)[:, 0] for member in guide.members])


@pytest.fixture(scope="module")
def classes():
    model, guide = train_ensemble(trained(classes=True), 4, progress=False)
    return model, guide, torch.stack([outputs_of(member, 3).softmax(-1) for member in guide.members])


def test_moments_and_densities_of_a_regression(regression):
    model, guide, means = regression
    prediction = dvi.predict(model, guide, (X, Y), batch_size=7)
    assert prediction.method == OfMembers((dvi.AtMean(),) * 4)
    assert means.var(0).min() > 1e-4  # the members are not the same
    torch.testing.assert_close(prediction.mean, means.mean(0))
    torch.testing.assert_close(prediction.epistemic, means.var(0, unbiased=False))
    torch.testing.assert_close(prediction.aleatoric, torch.full_like(Y, NOISE**2))
    torch.testing.assert_close(prediction.variance, means.var(0, unbiased=False) + NOISE**2)
    each = td.Normal(means, NOISE).log_prob(Y)
    torch.testing.assert_close(prediction.log_likelihood(), each.logsumexp(0) - math.log(4))
    torch.testing.assert_close(prediction.draws["mean"], means)


def test_quantiles_scores_and_later_observations_of_a_regression(regression):
    model, guide, means = regression
    prediction = dvi.predict(model, guide, X)
    for level in (0.025, 0.5, 0.9):
        found = td.Normal(means, NOISE).cdf(prediction.quantiles(level)).mean(0)
        torch.testing.assert_close(found, torch.full_like(Y, level))
    each = td.Normal(means, NOISE).log_prob(Y + 1)
    torch.testing.assert_close(prediction.log_likelihood(Y + 1), each.logsumexp(0) - math.log(4))
    assert {"nll", "rmse", "crps", "coverage_95"} <= prediction.metrics(Y).keys()
    # CRPS = E|Y - y| - E|Y - Y'| / 2, by draws of the mixture: 5 standard errors
    draws = (means[torch.randint(4, (2, 4000)), 3] + NOISE * torch.randn(2, 4000)).double()
    terms = (draws - Y[3]).abs().mean(0) - (draws[0] - draws[1]).abs() / 2
    assert abs(prediction.crps(Y)[3] - terms.mean()) < 5 * terms.std() / 4000**0.5


def test_probabilities_and_entropies_of_classes(classes):
    model, guide, probabilities = classes
    prediction = dvi.predict(model, guide, (X, LABELS))
    mean = probabilities.mean(0)
    torch.testing.assert_close(prediction.probabilities, mean)
    torch.testing.assert_close(prediction.log_likelihood(), mean.gather(1, LABELS[:, None])[:, 0].log())
    entropy = -(mean * mean.log()).sum(-1)
    expected = -(probabilities * probabilities.log()).sum(-1).mean(0)
    torch.testing.assert_close(prediction.entropy, entropy)
    torch.testing.assert_close(prediction.expected_entropy, expected)
    torch.testing.assert_close(prediction.mutual_information, entropy - expected)
    assert prediction.metrics()["mutual_information"] == pytest.approx(float((entropy - expected).mean()))


METHODS = {
    "VL": trained(dvi.MeanFieldGuide, dvi.TaylorELBO),
    "MNVI": trained(dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO),
    "VOGN": trained(
        dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, lambda: dvi.VOGN({"initial_curvature": 1.0})
    ),
    "mean field": trained(AutoNormal),
}


def laplace():
    model, guide = trained(dvi.LaplaceGuide)()
    guide.fit([(X, Y)], dvi.laplace.Diagonal(dvi.laplace.GGN()), unconverged="accept")
    return model, guide


@pytest.mark.every(4)
@pytest.mark.filterwarnings("ignore:.*converge:pyro_dvi.errors.DviWarning")
@pytest.mark.parametrize("train", [*METHODS.values(), laplace], ids=[*METHODS, "Laplace"])
def test_members_of_any_method_are_predicted_by_their_rule(train):
    model, guide = train_ensemble(train, 2, progress=False)
    prediction = dvi.predict(model, guide, (X, Y), seed=0)
    each = []
    for member, rule in zip(guide.members, prediction.method.rules, strict=True):
        with member.in_store():
            own = dvi.predict(member.model, member.guide, (X, Y), seed=0)
        assert own.method == rule
        if not isinstance(rule, dvi.Samples):
            each.append(own)
    assert prediction.mean.isfinite().all()
    if each:
        means, variances = (
            torch.stack([getattr(own, name) for own in each]) for name in ("mean", "variance")
        )
        torch.testing.assert_close(prediction.mean, means.mean(0))
        torch.testing.assert_close(prediction.variance, variances.mean(0) + means.var(0, unbiased=False))
        density = torch.stack([own.log_likelihood() for own in each]).logsumexp(0) - math.log(2)
        torch.testing.assert_close(prediction.log_likelihood(), density)
    else:
        assert prediction.method == OfMembers((dvi.Samples(30),) * 2)


def test_members_that_are_mixtures_themselves():
    """Laplace with an uncertain noise scale predicts by a mixture of Normals, which those of the members join."""

    def train():
        net = dvi.to_bayesian_(nn.Linear(1, 1).double(), prior_scale=1.0)
        model = dvi.regressor(net, 24, noise_scale=dist.LogNormal(torch.zeros((), dtype=X.dtype), 1.0))
        guide = dvi.LaplaceGuide(model)
        guide.initialize(X, Y)
        with torch.no_grad():
            for value in guide.parameters():
                value.add_(torch.randn_like(value))
        guide.fit([(X, Y)], dvi.laplace.Dense(dvi.laplace.GGN()), unconverged="accept")
        return model, guide

    model, guide = train_ensemble(train, 3, progress=False)
    prediction = dvi.predict(model, guide, (X, Y))
    each = []
    for member in guide.members:
        with member.in_store():
            each.append(dvi.predict(member.model, member.guide, (X, Y)))
    densities = torch.stack([own.log_likelihood(Y + 1) for own in each])
    torch.testing.assert_close(prediction.log_likelihood(Y + 1), densities.logsumexp(0) - math.log(3))
    assert {"crps", "coverage_95"} <= prediction.metrics().keys()
    low, high = prediction.interval(0.9)
    draws = torch.cat([own.sample(4000, seed=0) for own in each])
    for limit, level in ((low, 0.05), (high, 0.95)):  # 5 standard errors of a share of 12,000 draws
        assert ((draws < limit).double().mean(0) - level).abs().max() < 5 * (
            level * (1 - level) / 12_000
        ) ** 0.5


def linear_model(x, y=None):
    slope = pyro.sample("slope", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)


def gaussian(loc: float, scale: float):
    """Return a function as a guide, whose parameters no module holds."""

    def train():
        loc_, scale_ = torch.tensor(loc), torch.tensor(scale)

        def guide(x, y=None):
            mean = pyro.param("mean", loc_)
            pyro.sample("slope", dist.Normal(mean, scale_))

        guide(X[:1, 0])
        return linear_model, guide

    return train


@pytest.mark.slow
def test_draws_of_each_member_are_its_own():
    """Of 4,000 draws each, 5 standard errors: the mixture of two Gaussians of 1 and 5 has variance 4 + .26 / 2."""
    made = [train_apart(gaussian(loc, scale), 0) for loc, scale in ((1.0, 0.1), (5.0, 0.5))]
    guide = dvi.training.EnsembleGuide(made)
    prediction = dvi.predict(guide.model, guide, torch.ones(1), dvi.Samples(4000), seed=1, keep_draws=True)
    slopes = prediction.draws["mean"][:, 0]
    assert len(slopes) == 8000
    for part, loc, scale in zip(slopes.split(4000), (1.0, 5.0), (0.1, 0.5), strict=True):
        assert abs(part.mean() - loc) < 5 * scale / 4000**0.5
        assert abs(part.std() / scale - 1) < 5 / 8000**0.5
    standard = (slopes[:4000] - 1) / 0.1, (slopes[4000:] - 5) / 0.5
    assert abs(torch.corrcoef(torch.stack(standard))[0, 1]) < 5 / 4000**0.5  # noise of their own
    torch.testing.assert_close(prediction.epistemic, slopes.var(0, unbiased=False)[None])


def test_several_observed_sites():
    def train():
        loc = torch.randn(())

        def model(x, a=None, b=None):
            slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
            with pyro.plate("data", len(x)):
                pyro.sample("a", dist.Normal(slope * x, 0.5), obs=a)
                pyro.sample("b", dist.Poisson((slope * x).exp()), obs=b)

        guide = AutoDelta(model, init_loc_fn=lambda site: loc)
        guide(torch.ones(1), torch.ones(1), torch.ones(1))
        return model, guide

    model, guide = train_ensemble(train, 3, progress=False)
    x = torch.linspace(-1, 1, 5)
    slopes = torch.stack([*guide.parameters()])[:, None].detach()
    rates = (slopes * x).exp()
    found = dvi.predict(model, guide, (x, x, x.abs().round()), site="b", observed="b")
    torch.testing.assert_close(found.mean, rates.mean(0))
    torch.testing.assert_close(found.variance, rates.mean(0) + rates.var(0, unbiased=False))
    torch.testing.assert_close(dvi.predict(model, guide, x, site="a").mean, (slopes * x).mean(0))


def test_an_ensemble_of_ensembles(regression):
    model, guide, means = regression
    halves = [dvi.training.EnsembleGuide(guide.members[:2]), dvi.training.EnsembleGuide(guide.members[2:])]
    whole = dvi.training.EnsembleGuide([(half.model, half) for half in halves])
    torch.testing.assert_close(dvi.predict(whole.model, whole, X).mean, means.mean(0))


def test_a_rule_for_all_members_and_rules_of_each(regression):
    model, guide, means = regression
    again = dvi.predict(model, guide, X).method
    torch.testing.assert_close(dvi.predict(model, guide, X, again).mean, means.mean(0))
    drawn = dvi.predict(model, guide, X, dvi.Samples(2))  # of point masses
    assert repr(drawn.method) == "4 x Samples(num_samples=2)"
    torch.testing.assert_close(drawn.mean, means.mean(0))


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["VL", "MNVI", "mean field"])
def test_a_prepared_predictor_has_the_numbers_of_predict(name):
    model, guide = train_ensemble(METHODS[name], 2, progress=False)
    method = dvi.Samples(4) if name == "mean field" else None  # of 30 draws each, recording takes seconds
    expected = dvi.predict(model, guide, X, method, seed=3)
    found = dvi.predictor(model, guide, X, method, seed=3)(X)
    torch.testing.assert_close(found.mean, expected.mean)
    torch.testing.assert_close(found.variance, expected.variance)


# Mistakes ---------------------------------------------------------------------------------------------------------


def test_rules_that_would_weigh_members_unequally():
    with pytest.raises(ArgumentError, match=r"average \[1, 30\] distributions.*choose one rule"):
        OfMembers((dvi.AtMean(), dvi.Samples(30)))


def test_rules_of_another_ensemble(regression):
    model, guide, _ = regression
    with pytest.raises(ValueError, match="shorter"):
        dvi.predict(model, guide, X, OfMembers((dvi.AtMean(),) * 2))


def test_the_model_of_a_member(regression):
    model, guide, _ = regression
    with pytest.raises(GuideError, match=r"predict\(guide\.model"):
        dvi.predict(guide.members[0].model, guide, X)


def test_members_that_predict_unlike_things(regression, classes):
    mixed = dvi.training.EnsembleGuide([*regression[1].members[:1], *classes[1].members[:1]])
    with pytest.raises(
        ModelError,
        match=r"different sites.*first member .*\('obs', \(24,\)\), another \('obs', \(24, 3\)\)",
    ):
        dvi.predict(mixed.model, mixed, X)


def test_moments_of_members_are_told_apart():
    """By the law of total variance: what each member is unsure of, and what they disagree on."""
    model, guide = train_ensemble(METHODS["MNVI"], 2, progress=False)
    whole = dvi.predict(model, guide, X)
    means, variances = whole.draws["mean"], whole.draws["variance"]
    torch.testing.assert_close(whole.variance, variances.mean(0) + means.var(0, correction=0))
    torch.testing.assert_close(whole.aleatoric, whole.variance - whole.epistemic)
    assert (whole.epistemic > means.var(0, correction=0)).all() and (whole.aleatoric > 0).all()


def test_drawn_weights_of_a_variational_laplace_posterior():
    model, guide = train_ensemble(METHODS["VL"], 2, progress=False)
    with pytest.warns(DviWarning, match="TaylorELBO trains a posterior for predictions at the mean"):
        dvi.predict(model, guide, X, dvi.Samples(2))


@pytest.mark.parametrize(
    "look",
    [
        lambda model, guide: dvi.diagnostics.compare_with_sampling(model, guide, X),
        lambda model, guide: dvi.diagnostics.signal_to_noise(guide),
    ],
)
def test_what_asks_for_one_gaussian(regression, look):
    model, guide, _ = regression
    with pytest.raises(GuideError, match=r"ensemble.* guide\.members"):
        look(model, guide)
