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
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi import classifier, to_bayesian_
from pyro_dvi.analysis.diagnostics.model_checking import prior_predictive_check
from pyro_dvi.errors import ArgumentError, DataError, ModelError, NonFiniteError, UnsupportedError

X = torch.linspace(-1, 1, 30)


def line(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 2.0))
    with pyro.plate("data", 30, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(1.0 + slope * x, 0.5), obs=y)


def test_of_several_observations_the_one_that_is_called_like_the_site_is_checked():
    def two(x, z=None, y=None):
        with pyro.plate("others", len(x)):
            pyro.sample("z", dist.Normal(0.0, 1.0), obs=z)
        return line(x, y)

    data, options = {"x": X, "z": X, "y": 1 + X}, {"num_samples": 20, "seed": 0}
    by_site = prior_predictive_check(two, data, site="y", **options)
    assert by_site.rows == prior_predictive_check(two, data, site="y", observed="y", **options).rows
    with pytest.raises(ArgumentError, match=r"\['z', 'y'\].*observed='z' or observed='y'"):
        prior_predictive_check(two, data, **options)


def rows(check):
    return {row.statistic: row for row in check.rows}


def normal_tail(value, mean, sd):
    return 0.5 * math.erfc((value - mean) / (sd * math.sqrt(2)))


@pytest.mark.parametrize("batch_size", [1000, 13])
def test_p_values_of_a_linear_model(batch_size):
    """The mean of the data is Normal; so is the least-squares slope."""
    y = 1.15 + 0.0 * X
    y[0] += 0.3
    squares = X.square().sum()
    statistics = {"mean": torch.mean, "slope": lambda y: (X * y).sum() / squares}
    check = prior_predictive_check(
        line, (X, y), statistics=statistics, num_samples=600, batch_size=batch_size, seed=1
    )
    expected = {
        "mean": normal_tail(float(y.mean()), 1.0, 0.5 / math.sqrt(30)),  # the slope does not move the mean
        "slope": normal_tail(float((X * y).sum() / squares), 0.0, math.sqrt(4.0 + 0.25 / float(squares))),
    }
    for name, row in rows(check).items():
        exact = expected[name]
        assert 0.01 < exact < 0.99
        assert row.error == pytest.approx(math.sqrt(exact * (1 - exact) / 600), rel=0.2)
        assert abs(row.p_value - exact) < 4 * math.sqrt(exact * (1 - exact) / 600)


def test_one_draw_of_the_latents_serves_all_batches():
    """Otherwise the standard deviation of the slope would shrink with the number of batches."""
    data = [(x, x) for x in X.split(10)]
    squares = X.square().sum()
    check = prior_predictive_check(
        line, data, statistics={"slope": lambda y: (X * y).sum() / squares}, num_samples=300, seed=0
    )
    sd = math.sqrt(4.0 + 0.25 / float(squares))
    assert abs(check.draws["slope"].std() / sd - 1) < 4 / math.sqrt(2 * 300)


def test_noise_does_not_repeat_the_numbers_of_the_latents():
    """The variance of the first value is that of slope and noise together; four standard errors, fixed seed."""
    x = torch.full((3,), 1.0)
    check = prior_predictive_check(
        line, (x, x), statistics={"first": lambda y: y[0]}, num_samples=400, seed=0
    )
    assert abs(check.draws["first"].std() / math.sqrt(4.25) - 1) < 4 / math.sqrt(2 * 400)


def test_few_runs_of_the_model_serve_all_data_sets():
    runs = []

    def counted(x, y=None):
        runs.append(1)
        return line(x, y)

    prior_predictive_check(counted, (X, X), num_samples=200, seed=0)
    assert len(runs) <= 14


def test_latents_of_single_examples_are_drawn_with_their_batch():
    def local(x, y=None):
        with pyro.plate("data", 30, subsample_size=len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 2.0))
            return pyro.sample("y", dist.Normal(z, 1.0), obs=y)

    check = prior_predictive_check(local, (X, X), num_samples=200, batch_size=8, seed=0)
    variance = check.draws["sd"] ** 2  # (n - 1) / n times 5, chi-squared
    assert abs(variance.mean() - 5 * 29 / 30) < 4 * 5 * math.sqrt(2 * 29) / 30 / math.sqrt(200)


def test_data_from_the_prior_are_not_unusual_and_others_are():
    torch.manual_seed(3)
    y = line(X)
    check = prior_predictive_check(line, (X, y), seed=0)
    assert list(rows(check)) == ["mean", "sd", "min", "max"]
    assert not any(row.is_unusual for row in check.rows)
    assert check.verdict == "No statistic of the data is unusual under the prior."
    far = prior_predictive_check(line, (X, y + 40), seed=0)
    assert [row.statistic for row in far.rows if row.is_unusual] == ["mean", "min", "max"]
    assert rows(far)["mean"].p_value == 0 and rows(far)["mean"].error > 0
    assert "mean (above nearly all draws)" in far.verdict


def test_few_draws_call_nothing_unusual():
    few = prior_predictive_check(line, (X, X + 40), num_samples=50, seed=0)
    assert rows(few)["mean"].p_value == 0 and not any(row.is_unusual for row in few.rows)


def test_a_vague_prior_is_called_so():
    def vague(x, y=None):
        slope = pyro.sample("slope", dist.Normal(0.0, 1e4))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)

    check = prior_predictive_check(vague, (X, X), seed=0)
    assert "It is vague" in check.verdict


def test_p_values_are_uniform_if_the_prior_is_right():
    """Over data sets of the prior; Kolmogorov's 99.99 % bound is 2.23 / sqrt(n) beside the error of 60 draws."""
    p = []
    for seed in range(25):
        torch.manual_seed(1000 + seed)
        y = line(X)
        check = prior_predictive_check(line, (X, y), statistics={"sd": torch.std}, num_samples=60, seed=seed)
        p.append(check.rows[0].p_value)
    distance = np.abs(np.sort(p) - (np.arange(25) + 0.5) / 25).max()
    assert distance < 2.23 / math.sqrt(25)


def test_frequencies_of_classes():
    """Logits that do not depend on the input: the share of a class is a draw of its probability."""

    def classes(x, y=None):
        p = pyro.sample("p", dist.Dirichlet(torch.tensor([1.0, 2.0, 3.0])))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Categorical(p), obs=y)

    labels = torch.tensor([0] * 10 + [1] * 10 + [2] * 10)
    check = prior_predictive_check(classes, (X, labels), num_samples=300, seed=0)
    names = [f"share of class {k}" for k in range(3)]
    assert list(rows(check)) == [*names, "largest share", "classes seen"]
    for k, name in enumerate(names):
        mean = (k + 1) / 6
        variance = mean * (1 - mean) / 7 * (1 + 6 / 30)  # of a Dirichlet multinomial
        assert rows(check)[name].observed == pytest.approx(1 / 3)
        assert abs(check.draws[name].mean() - mean) < 4 * math.sqrt(variance / 300)
    assert rows(check)["classes seen"].observed == 3
    assert check.chance == pytest.approx(1 / 3)
    assert check.confidence.shape == (300,) and (check.confidence > 1 / 3).all()


def test_equal_values_count_half():
    check = prior_predictive_check(
        line, (X, X), statistics={"size": lambda y: len(y)}, num_samples=10, seed=0
    )
    assert check.rows[0].p_value == 0.5


@pytest.mark.parametrize("kind", ["Bernoulli", "OneHotCategorical"])
def test_other_codes_of_classes(kind):
    def coded(x, y=None):
        logit = pyro.sample("logit", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            if kind == "Bernoulli":
                return pyro.sample("y", dist.Bernoulli(logits=logit.expand(len(x))), obs=y)
            logits = torch.stack([logit, -logit]).expand(len(x), 2)
            return pyro.sample("y", dist.OneHotCategorical(logits=logits), obs=y)

    labels = (X > 0.5).long()
    y = labels.float() if kind == "Bernoulli" else torch.nn.functional.one_hot(labels, 2).float()
    check = prior_predictive_check(coded, (X, y), num_samples=20, seed=0)
    name = "share of 1" if kind == "Bernoulli" else "share of class 1"
    assert rows(check)[name].observed == pytest.approx(float(labels.float().mean()))
    assert check.chance == 0.5


def test_a_network_in_training_mode_is_left_as_it_is():
    net = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(16, 12)
    )
    model = classifier(to_bayesian_(net), num_data=10)
    x, y = torch.randn(10, 1, 4, 4), torch.arange(10)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    loader = DataLoader(TensorDataset(x, y), batch_size=4)
    check = prior_predictive_check(model, loader, num_samples=5, seed=0)
    assert list(rows(check)) == ["largest share", "classes seen"]  # twelve classes are many
    assert "confident on average" in check.verdict and check.num_examples == 10
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in before.items())
    assert all(module.training for module in net.modules())
    if not torch.equal(state, torch.get_rng_state()):  # the loader draws a seed of its own
        torch.set_rng_state(state)
        list(loader)
    again = prior_predictive_check(model, (x, y), num_samples=5, seed=0, batch_size=4)
    np.testing.assert_array_equal(check.draws["largest share"], again.draws["largest share"])


def test_double_precision_and_several_outputs():
    def wide(x, y=None):
        w = pyro.sample("w", dist.Normal(x.new_zeros(3), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(x[:, None] * w, 1.0).to_event(1), obs=y)

    x = X.double()
    shapes = []

    def look(y):
        shapes.append((y.shape, y.dtype))
        return 0.0

    check = prior_predictive_check(
        wide,
        (x, x[:, None].expand(30, 3)),
        statistics={"n": look},
        num_samples=3,
        batch_size=9,
    )
    assert set(shapes) == {((30, 3), torch.float64)} and check.num_examples == 30


def test_an_observation_by_keyword_alone():
    def keyword(x, *, y=None):
        return line(x, y)

    ours = prior_predictive_check(
        keyword, {"x": X, "y": X}, observed="y", num_samples=5, batch_size=7, seed=0
    )
    theirs = prior_predictive_check(line, (X, X), num_samples=5, batch_size=7, seed=0)
    np.testing.assert_array_equal(ours.draws["max"], theirs.draws["max"])


def test_text_and_frame():
    check = prior_predictive_check(line, (X, X + 40), num_samples=150, seed=0)
    text = str(check)
    assert "150 data sets of 30 examples" in text and "unusual" in text and text.endswith(check.verdict)
    frame = check.to_dataframe()
    assert list(frame.index) == ["mean", "sd", "min", "max"]
    assert frame.loc["mean", "two_sided"] == pytest.approx(1 / 151)


def improper(x, y=None):
    w = pyro.sample("w", dist.ImproperUniform(dist.constraints.real, (), ()))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


def masked(x, y=None):
    with poutine.mask(mask=True if y is None else y < 900):
        return line(x, y)


def check(model=line, data=(X, X), **options):
    return lambda: prior_predictive_check(model, data, **options)


MISTAKES = {
    "no observations": (check(data=(X,)), DataError, r"pass them with the inputs, as \(x, y\)"),
    "one draw": (check(num_samples=1), ArgumentError, "at least 2"),
    "no statistics": (check(statistics={}), ArgumentError, "functions by name"),
    "a list": (check(statistics=[torch.mean]), ArgumentError, "functions by name, .* not list"),
    "a vector": (
        check(statistics={"all": lambda y: y}),
        ArgumentError,
        r"'all' failed for observations of shape \(30,\).*one number",
    ),
    "a quantile of whole numbers": (
        check(statistics={"90 %": lambda y: y.long().quantile(0.9)}),
        ArgumentError,
        r"'90 %' failed for observations of shape \(30,\).*RuntimeError",
    ),
    "a mask": (
        check(model=masked, data=(X, torch.where(X > 0, X, 999.0))),
        UnsupportedError,
        "masks some of the observed values at site 'y'.*examples that count alone",
    ),
    "NaN": (check(statistics={"log": lambda y: (-y.abs()).log().sum()}), NonFiniteError, "'log' is NaN"),
    "an improper prior": (check(model=improper), ModelError, "improper priors have no prior predictive"),
    "another site": (check(site="z"), ModelError, "no observed site 'z'"),
    "NaN in the data": (check(data=(X, X / 0 * 0)), DataError, "NaN"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()
