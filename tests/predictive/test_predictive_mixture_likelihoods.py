# SPDX-License-Identifier: Apache-2.0
"""Every likelihood: also without a mean, a variance or a mixture of its own, and masked observations."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoNormal

from pyro_dvi import AtMean, Samples, predict
from pyro_dvi.errors import UnsupportedError

X = torch.linspace(-1, 1, 6)


def of_kind(likelihood):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", likelihood(w * x), obs=y)

    return model


LIKELIHOODS = {
    "Normal": lambda f: dist.Normal(f, 0.5),
    "StudentT": lambda f: dist.StudentT(4.0, f, 0.5),
    "Bernoulli": lambda f: dist.Bernoulli(logits=f),
    "Poisson": lambda f: dist.Poisson(f.exp()),
    "LogNormal": lambda f: dist.LogNormal(f, 0.5),
    "Gamma": lambda f: dist.Gamma(2.0, f.exp()),
    "events": lambda f: dist.Normal(torch.stack([f, -f], -1), 0.5).to_event(1),
    "labels": lambda f: dist.Bernoulli(logits=torch.stack([f, -f, f], -1)).to_event(1),
    "multivariate": lambda f: dist.MultivariateNormal(torch.stack([f, -f], -1), torch.eye(2)),
    "one-hot": lambda f: dist.OneHotCategorical(logits=torch.stack([f, -f], -1)),
    "masked": lambda f: dist.Normal(f, 0.5).mask(f > -100),
}


@pytest.mark.every(4)
@pytest.mark.parametrize("name", LIKELIHOODS)
@pytest.mark.parametrize("method", [AtMean(), Samples(4)])
def test_every_likelihood(name, method):
    model, x = of_kind(LIKELIHOODS[name]), torch.linspace(-1, 1, 6)
    y = LIKELIHOODS[name](x).sample()
    guide = AutoNormal(model)
    guide(x, y)
    prediction = predict(model, guide, (x, y), method, seed=0, batch_size=4)
    assert prediction.mean.shape == prediction.variance.shape == y.shape
    assert prediction.log_likelihood().shape == (6,)
    torch.manual_seed(0)
    components = (
        [draw["w"] for draw in Samples(4).draws(guide, (x,))] if method != AtMean() else [guide.median()["w"]]
    )
    densities = torch.stack([LIKELIHOODS[name](w.detach() * x).log_prob(y) for w in components])
    torch.testing.assert_close(
        prediction.log_likelihood(), densities.logsumexp(0) - math.log(len(components))
    )
    means = torch.stack([LIKELIHOODS[name](w.detach() * x).mean for w in components])
    torch.testing.assert_close(prediction.mean, means.mean(0))
    if name in ("Bernoulli", "labels", "one-hot"):
        torch.testing.assert_close(prediction.probabilities, means.mean(0))
        assert 0 <= prediction.metrics()["accuracy"] <= 1
    else:
        assert prediction.metrics()["rmse"] >= 0
        with pytest.raises(UnsupportedError, match="no class probabilities"):
            _ = prediction.probabilities


def test_distributions_without_moments_still_have_a_likelihood():
    model, x = of_kind(lambda f: dist.VonMises(f, 2.0)), torch.linspace(-1, 1, 6)
    guide = AutoNormal(model)
    guide(x, x)
    assert predict(model, guide, (x, x)).log_likelihood().shape == (6,)
    stable, x = of_kind(lambda f: dist.Cauchy(f, 1.0)), torch.linspace(-1, 1, 6)
    assert predict(stable, guide, (x, x)).mean.isnan().all()


def guide(x, *_args):
    pyro.sample("w", dist.Normal(0.5, 0.3))


def draws(count, seed):
    torch.manual_seed(seed)
    return [draw["w"] for draw in Samples(count).draws(guide, (X,))]


def test_several_one_hot_labels_of_an_example_form_no_known_mixture():
    def labels(f):
        logits = torch.stack(
            [torch.stack([f, -f], -1), torch.stack([2 * f, 0 * f], -1), f[:, None] + X[:2]], -2
        )
        return dist.OneHotCategorical(logits=logits).to_event(1)

    prediction = predict(of_kind(labels), guide, X, Samples(5), seed=1)
    expected = torch.stack([labels(w * X).base_dist.probs for w in draws(5, 1)]).mean(0)
    torch.testing.assert_close(prediction.probabilities, expected)
    for read in (lambda: prediction.sample(3), lambda: prediction.entropy):
        with pytest.raises(UnsupportedError):
            read()
    assert predict(of_kind(labels), guide, X, AtMean()).sample(3).shape == (3, 6, 3, 2)


@pytest.mark.parametrize("method", [AtMean(), Samples(3), Samples(70)])
def test_an_infinite_variance_stays_infinite(method):
    prediction = predict(of_kind(lambda f: dist.StudentT(1.5, f, 1.0)), guide, X, method, seed=0)
    assert bool((prediction.variance == math.inf).all())
    assert bool(prediction.mean.isfinite().all()) and bool(prediction.epistemic.isfinite().all())


def test_a_variance_that_is_infinite_for_some_draws():
    model = of_kind(lambda f: dist.StudentT(2.0 + f.mean() + 0.5 * (f[-1] - 0.5), f, 1.0))
    assert bool((predict(model, guide, X, Samples(30), seed=0).variance == math.inf).all())


def test_without_a_mean_there_is_no_rmse():
    scores = predict(of_kind(lambda f: dist.Cauchy(f, 1.0)), guide, (X, X), AtMean()).metrics()
    assert set(scores) == {"nll", "nll_standard_error", "coverage_95", "width_95"}


def flow(f):
    return dist.TransformedDistribution(dist.Normal(f, 1.0), [dist.transforms.TanhTransform()])


def test_a_distribution_without_moments_is_predicted_without_observations():
    y = 0.5 * torch.tanh(X)
    at_mean = predict(of_kind(flow), guide, X, AtMean())
    torch.testing.assert_close(at_mean.log_likelihood(y), flow(0.5 * X).log_prob(y))
    prediction = predict(of_kind(flow), guide, X, Samples(5), seed=0)
    assert len(prediction) == 6
    with pytest.raises(UnsupportedError):
        _ = prediction.mean
    scored = predict(of_kind(flow), guide, (X, y), Samples(5), seed=0).log_likelihood()
    each = torch.stack([flow(w * X).log_prob(y) for w in draws(5, 0)])
    torch.testing.assert_close(scored, each.logsumexp(0) - math.log(5))
    torch.testing.assert_close(prediction.log_likelihood(y), scored)
    below = (prediction.sample(4000, seed=1) < prediction.quantiles(0.5)).double().mean(0)
    assert bool(((below - 0.5).abs() < 0.05).all())


def test_kept_draws_and_crps_leave_out_what_the_mask_does():
    counts = torch.tensor([True, True, False, False, True, True])

    def model(x, y=None, mask=True):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)), poutine.mask(mask=mask):
            return pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)

    y = torch.where(counts, X, 1e6)
    for size in (6, 4):
        data = (X, y, counts)
        p = predict(model, guide, data, Samples(3), seed=0, observed="y", keep_draws=True, batch_size=size)
        for value in (p.log_likelihood(), p.crps(), *p.draws["log_likelihood"]):
            assert torch.equal(value.isnan(), ~counts)
        assert float(p.metrics()["crps"]) == pytest.approx(float(p.crps()[counts].mean()))


def test_a_likelihood_whose_expand_fails_keeps_its_scores():
    # Pyro's ZeroInflatedDistribution.expand raises a ValueError if the gate was given as logits.
    x = torch.linspace(-1, 1, 6)
    likelihoods = [
        lambda f: dist.ZeroInflatedPoisson(f.exp(), gate_logits=f),
        lambda f: dist.ZeroInflatedPoisson(f.exp(), gate=f.sigmoid()),
    ]
    scores = []
    for likelihood in likelihoods:
        guide = AutoNormal(of_kind(likelihood))
        y = torch.tensor([0.0, 1.0, 0.0, 2.0, 0.0, 3.0])
        guide(x, y)
        predictions = [predict(of_kind(likelihood), guide, (x, y), m, seed=0) for m in (AtMean(), Samples(4))]
        scores.append([list(p.metrics().values()) for p in predictions])
        pyro.clear_param_store()
    torch.testing.assert_close(torch.tensor(scores[0]), torch.tensor(scores[1]))


def test_hasattr_tells_which_quantities_a_prediction_has():
    found = {}
    for name in ("Bernoulli", "Normal"):
        guide = AutoNormal(of_kind(LIKELIHOODS[name]))
        guide(X, torch.zeros(6))
        prediction = predict(of_kind(LIKELIHOODS[name]), guide, X, AtMean())
        of_classes = ("probabilities", "mutual_information")
        found[name] = [hasattr(prediction, quantity) for quantity in of_classes]
        pyro.clear_param_store()
    assert found == {"Normal": [False, False], "Bernoulli": [True, True]}
    with pytest.raises(UnsupportedError, match=r"site 'obs' \(Normal\) has no class probabilities"):
        _ = prediction.probabilities
