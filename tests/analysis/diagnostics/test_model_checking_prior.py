# SPDX-License-Identifier: Apache-2.0
"""Prior predictive checks, against models whose prior predictive has a closed form.

Monte-Carlo checks are z-tests at four standard errors, with fixed seeds: a right implementation would fail one of
them with a probability below 1e-4.
"""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_dvi import classifier, to_bayesian_
from pyro_dvi.analysis.diagnostics.model_checking import prior_predictive_check
from pyro_dvi.errors import ArgumentError, DataError, ModelError, NonFiniteError

X = torch.linspace(-1, 1, 30)


def line(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("data", 30, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(1.0 + slope * x, 0.5), obs=y)


def rows(check):
    return {row["statistic"]: row for row in check.rows}


def test_of_several_observations_the_one_that_is_called_like_the_site_is_checked():
    def two(x, z=None, y=None):
        with pyro.plate("others", len(x)):
            pyro.sample("z", dist.Normal(0.0, 1.0), obs=z)
        return line(x, y)

    data, options = {"x": X, "z": X, "y": 1 + X}, {"num_samples": 20, "seed": 0}
    by_site = prior_predictive_check(two, data, site="y", **options)
    assert by_site.rows == prior_predictive_check(two, data, site="y", observed="y", **options).rows
    with pytest.raises(ArgumentError, match=r"\['z', 'y'\].*observed='y'"):
        prior_predictive_check(two, data, **options)


def test_the_mean_of_a_linear_model():
    """It is Normal, and the slope does not move it."""
    y = 1.15 + 0.0 * X
    y[0] += 0.3
    row = rows(prior_predictive_check(line, (X, y), num_samples=600, seed=1))["mean"]
    exact = 0.5 * math.erfc((float(y.mean()) - 1.0) / (0.5 / math.sqrt(30) * math.sqrt(2)))
    assert 0.01 < exact < 0.99
    assert abs(row["p-value"] - exact) < 4 * math.sqrt(exact * (1 - exact) / 600)
    assert row["95%"] == pytest.approx(1 + 1.645 * 0.5 / math.sqrt(30), abs=0.04)


def test_noise_does_not_repeat_the_numbers_of_the_latents():
    """The variance of a single value is the sum of those of slope and noise, and its quantiles are Gaussian."""
    x = torch.ones(1)
    row = rows(prior_predictive_check(line, (x, x), num_samples=800, seed=0))["mean"]
    assert (row["95%"] - row["5%"]) / (2 * 1.645 * math.sqrt(4.25)) == pytest.approx(1, abs=0.12)


def test_few_runs_of_the_model_serve_all_data_sets():
    """Besides one for each draw from the prior."""
    runs = []

    def counting(x, y=None):
        runs.append(1)
        return line(x, y)

    prior_predictive_check(counting, (X, X), num_samples=200, seed=0)
    assert len(runs) <= 200 + 14


def test_latents_of_single_examples():
    def local(x, y=None):
        with pyro.plate("data", 30, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 2.0))
            return pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    check = prior_predictive_check(local, (X, X), num_samples=200, seed=0)
    assert rows(check)["sd"]["50%"] == pytest.approx(math.sqrt(5 * 29 / 30), abs=0.15)


def test_data_from_the_prior_are_not_unusual_and_others_are():
    torch.manual_seed(3)
    y = line(X)
    check = prior_predictive_check(line, (X, y), seed=0)
    assert check["statistic"] == ["mean", "sd", "min", "max"]
    assert set(check["finding"]) == {""}
    assert check.verdict == "No statistic of the data is unusual under the prior."
    far = prior_predictive_check(line, (X, y + 40), seed=0)
    assert [row["statistic"] for row in far.rows if row["finding"] == "unusual"] == ["mean", "min", "max"]
    assert rows(far)["mean"]["p-value"] == 0
    assert "The mean of the data is above nearly all draws" in far.verdict
    text = str(far)
    assert (
        "200 data sets of 30 examples" in text
        and "unusual" in text
        and text.replace("\n", " ").endswith(far.verdict)
    )
    assert list(far.to_dataframe().index) == far["statistic"]


def test_few_draws_call_nothing_unusual():
    few = prior_predictive_check(line, (X, X + 40), num_samples=50, seed=0)
    assert rows(few)["mean"]["p-value"] == 0 and set(few["finding"]) == {""}


def test_a_vague_prior_is_called_so():
    def vague(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1e4))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)

    check = prior_predictive_check(vague, (X, X), seed=0)
    assert "The prior is vague" in check.verdict


def test_p_values_are_uniform_if_the_prior_is_right():
    """Over data sets of the prior; Kolmogorov's 99.99 % bound is 2.23 / sqrt(n) beside the error of 60 draws."""
    p = []
    for seed in range(25):
        torch.manual_seed(1000 + seed)
        check = prior_predictive_check(line, (X, line(X)), num_samples=60, seed=seed)
        p.append(rows(check)["sd"]["p-value"])
    distance = np.abs(np.sort(p) - (np.arange(25) + 0.5) / 25).max()
    assert distance < 2.23 / math.sqrt(25)


@pytest.mark.parametrize("kind", ["Categorical", "Bernoulli", "OneHotCategorical"])
def test_codes_of_classes(kind):
    """The confidence is the probability of the likelier class, whose quantiles are those of a Gaussian's logit."""

    def coded(x, y=None):
        logit = pyro.sample("logit", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            if kind == "Bernoulli":
                return pyro.sample("y", dist.Bernoulli(logits=logit.expand(len(x))), obs=y)
            logits = torch.stack([logit, torch.zeros_like(logit)]).expand(len(x), 2)
            return pyro.sample("y", getattr(dist, kind)(logits=logits), obs=y)

    labels = (X > 0.5).long()
    y = {
        "Categorical": labels,
        "Bernoulli": labels.float(),
        "OneHotCategorical": nn.functional.one_hot(labels).float(),
    }
    check = prior_predictive_check(coded, (X, y[kind]), num_samples=400, seed=0)
    assert check["statistic"] == ["largest share", "confidence"]
    assert rows(check)["largest share"]["data"] == pytest.approx(float((1 - labels.float()).mean()))
    assert rows(check)["confidence"]["50%"] == pytest.approx(1 / (1 + math.exp(-0.6745)), abs=0.02)
    assert math.isnan(rows(check)["confidence"]["data"])


def test_a_prior_of_confident_networks_is_named():
    net = to_bayesian_(nn.Linear(20, 3), prior_scale=30.0)
    torch.manual_seed(0)
    data = torch.randn(12, 20), torch.arange(12) % 3
    check = prior_predictive_check(classifier(net, num_data=12), data, num_samples=20, seed=0)
    assert rows(check)["confidence"]["finding"] == "overconfident"
    assert "try narrower priors" in check.verdict


def test_a_network_in_training_mode_is_left_as_it_is():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(16, 12)
    )
    model = classifier(to_bayesian_(net), num_data=10)
    x, y = torch.randn(10, 1, 4, 4), torch.arange(10)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    check = prior_predictive_check(model, (x, y), num_samples=5, seed=0)
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert all(module.training for module in net.modules())
    assert torch.equal(state, torch.get_rng_state())
    assert str(check) == str(prior_predictive_check(model, (x, y), num_samples=5, seed=0))


def test_several_outputs_and_an_observation_by_keyword_alone():
    def wide(x, *, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x[:, None] * w, 1.0).to_event(1), obs=y)

    x = X.double()
    y = x[:, None] * torch.tensor([1.0, 2.0, 3.0])
    check = prior_predictive_check(wide, {"x": x, "y": y}, observed="y", num_samples=5, seed=0)
    assert check["data"] == pytest.approx([float(y.mean()), float(y.std(correction=0)), -3.0, 3.0])


def test_masked_values_do_not_count():
    def masked(x, y=None):
        with poutine.mask(mask=True if y is None else y < 900):
            return line(x, y)

    check = prior_predictive_check(masked, (X, torch.where(X > 0, X, 999.0)), num_samples=100, seed=0)
    assert rows(check)["max"]["data"] == 1 and rows(check)["min"]["data"] == pytest.approx(float(X[X > 0][0]))


def improper(x, y=None):
    w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


def overflowing(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1e4))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(w.exp().expand(len(x)), 1.0, validate_args=False), obs=y)


def check(model=line, data=(X, X), **options):
    return lambda: prior_predictive_check(model, data, **options)


MISTAKES = {
    "no observations": (check(data=(X,)), DataError, r"pass them with the inputs, as \(x, y\)"),
    "one draw": (check(num_samples=1), ArgumentError, "at least 2"),
    "NaN": (check(model=overflowing), NonFiniteError, "is NaN for some draws from the prior"),
    "an improper prior": (check(model=improper), ModelError, "improper priors have no prior predictive"),
    "another site": (check(site="z"), ModelError, "no observed site 'z'"),
    "NaN in the data": (check(data=(X, X / 0 * 0)), DataError, "NaN"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()
