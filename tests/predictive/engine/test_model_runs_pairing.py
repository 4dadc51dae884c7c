# SPDX-License-Identifier: Apache-2.0
"""Every value is scored by its own site, at its own latents, and only if it counts."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer.autoguide import AutoGuideList, AutoNormal

from pyro_dvi import AtMean, LaplaceGuide, MeanFieldGuide, Samples, predict, to_arviz
from pyro_dvi.errors import ArgumentError, DataError, GuideError
from tests.analysis.arviz_export.reading import values

pytestmark = pytest.mark.filterwarnings("ignore:.* scores .*point estimate")
X = torch.linspace(-1, 1, 20)


def slope(x, *_args, **_kwargs):
    pyro.sample("w", dist.Normal(2.0, 0.1))


slope.prediction_rule = AtMean()


def two_responses(x, a=None, b=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("a", dist.Normal(w * x, 1.0), obs=a)
        pyro.sample("b", dist.Normal(-w * x, 1.0), obs=b)


def keyword_responses(x, *, a=None, b=None):
    two_responses(x, a, b)


def test_arguments_that_are_called_like_sites_are_their_observations():
    for model in (two_responses, keyword_responses):
        for data in ((X, 2 * X, -2 * X), {"x": X, "a": 2 * X, "b": -2 * X}):
            exported = to_arviz(model, slope, data, 5)
            np.testing.assert_array_equal(values(exported, "observed_data", "a"), 2 * X)
            np.testing.assert_array_equal(values(exported, "observed_data", "b"), -2 * X)
            assert set(exported["constant_data"].data_vars) == {"x"}
        for name, observation in (("a", 2 * X), ("b", -2 * X)):
            alone = {"x": X, name: observation}
            assert predict(model, slope, alone, AtMean(), site=name).metrics()["rmse"] < 1e-6
            assert set(to_arviz(model, slope, alone, 5, site=name)["observed_data"].data_vars) == {name}
    assert predict(two_responses, slope, (X, 2 * X, -2 * X), AtMean(), site="a").metrics()["rmse"] < 1e-6


def test_other_arguments_that_may_be_left_out_are_inputs_beside_an_observation_called_like_its_site():
    def model(x, shift=None, obs=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(w * x + (0.0 if shift is None else shift), 1.0), obs=obs)

    data = (X, X**2, 2 * X + X**2)
    assert predict(model, slope, data, AtMean()).metrics()["rmse"] < 1e-6
    np.testing.assert_array_equal(values(to_arviz(model, slope, data, 5), "constant_data", "shift"), X**2)


def by_other_names(x, first=None, second=None):
    two_responses(x, first, second)


@pytest.mark.parametrize("score", [predict, to_arviz])
def test_one_of_several_observations_is_named_and_checked(score):
    with pytest.raises(ArgumentError, match=r"\['first', 'second'\].*observed='second'"):
        score(by_other_names, slope, (X, X, -X), site="a")
    with pytest.raises(DataError, match="site 'a' is not observed.*observed="):
        score(two_responses, slope, {"x": X, "b": -X}, site="a", observed="b")
    with pytest.raises(DataError, match="site 'b' is not observed.*site="):
        score(two_responses, slope, {"x": X, "a": X}, site="b", observed="a")
    assert score(two_responses, slope, {"x": X, "a": X}, site="a", observed="a") is not None


def test_the_named_observation_is_the_one_that_is_scored():
    for model in (two_responses, keyword_responses):
        for name, observation in (("a", 2 * X), ("b", -2 * X)):
            prediction = predict(model, slope, {"x": X, name: observation}, site=name, observed=name)
            assert prediction.metrics()["rmse"] < 1e-6
    assert predict(two_responses, slope, X, site="a").mean.shape == (20,)  # inputs alone are not ambiguous


def test_an_observation_given_by_name_only_needs_no_naming():
    def model(x, *, y=None):
        two_responses(x, y)

    for data in ({"x": X, "y": 2 * X}, (X, 2 * X)):
        assert predict(model, slope, data, site="a").metrics()["rmse"] < 1e-6
    with pytest.raises(DataError, match=r"arguments \['b'\].* are keyword-only"):
        predict(keyword_responses, slope, {"x": X, "a": X, "b": X}, site="a")


def test_an_observation_that_the_model_transforms_is_not_scored_as_it_is():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(w * x, 1.0), obs=None if y is None else y.log())

    with pytest.raises(DataError, match="'obs' has other observed values"):
        predict(model, slope, (X, X.exp()))
    assert predict(model, slope, X).metrics(2 * X)["rmse"] < 1e-6


def test_a_column_of_observations_is_scored_in_the_shape_of_its_site():
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(w * x, 1.0), obs=None if y is None else y.squeeze(-1))

    assert predict(model, slope, (X, 2 * X[:, None]), batch_size=7).metrics()["rmse"] < 1e-6


def local(x, y=None):
    with pyro.plate("data", 20, subsample_size=len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("obs", dist.Normal(z + x, 0.1), obs=y)


def local_without_size(x, y=None):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("obs", dist.Normal(z + x, 0.1), obs=y)


@pytest.mark.parametrize("method", [AtMean(), Samples(3)])
@pytest.mark.parametrize("score", [predict, to_arviz])
def test_latents_of_single_examples_stay_with_their_examples(method, score):
    for model in (local, local_without_size):
        guide = AutoNormal(model)
        guide(X, X)
        for part in (X[10:], (X[10:], X[10:])):
            with pytest.raises(DataError, match=r"'z' has one value per example.*batch"):
                score(model, guide, part, method=method)
        with pytest.raises(DataError, match=r"'z' has one value per example.*batch"):
            score(model, guide, (X, X), method=method, batch_size=10)
        assert score(model, guide, (X, X), method=method) is not None


def test_examples_of_a_second_batch_do_not_get_the_latents_of_the_first():
    guide = AutoNormal(local_without_size)
    guide(X[:10], X[:10])
    with pytest.raises(DataError, match=r"'z'.*starts at example 10"):
        predict(local_without_size, guide, (X, X), batch_size=10)


@pytest.mark.every(2)
@pytest.mark.parametrize("make", [AutoNormal, MeanFieldGuide, LaplaceGuide])
def test_latents_of_single_examples_are_not_those_of_other_data_of_equal_length(make):
    guide = make(local_without_size)
    guide(X, y=X)
    for other in (X + 0.5, (X + 0.5, X), X.flip(0)):
        for score in (predict, to_arviz):
            with pytest.raises(DataError, match=r"'z' has one value per example.*learnt for other"):
                score(local_without_size, guide, other, method=AtMean())
    for same in (X.clone(), (X.double().float(), X + 1), [(X, X)]):
        assert len(predict(local_without_size, guide, same, AtMean())) == 20


def test_latents_of_a_guide_that_was_set_up_on_the_first_examples_are_those_of_all():
    guide = AutoNormal(local, create_plates=lambda x, y=None: pyro.plate("data", 20, subsample_size=len(x)))
    guide(X[:5], X[:5])
    assert len(predict(local, guide, (X, X))) == 20


def test_a_function_among_automatic_guides_computes_latents_of_single_examples_for_other_data():
    def amortised(x, y=None):
        pyro.sample("z", dist.Normal(x, 0.1))

    guide = AutoGuideList(local_without_size)
    guide.append(amortised)
    guide(X, X)
    mean = predict(local_without_size, guide, X + 0.5, Samples(400), seed=0).mean
    torch.testing.assert_close(mean, 2 * X + 1, atol=0.03, rtol=0)  # errors of 0.005


def test_amortised_latents_in_a_subsampled_plate():
    def guide(x, y=None):
        with pyro.plate("data", 20, subsample_size=len(x)):
            pyro.sample("z", dist.Normal(x, 0.1))

    torch.testing.assert_close(predict(local, guide, X, AtMean()).mean, 2 * X)
    with pytest.raises(DataError, match="20 values, but this batch has 10"):
        predict(local, guide, X[10:])


def test_latents_in_a_plate_of_the_model_are_not_local():
    def model(x, y=None):
        with pyro.plate("features", 10):
            w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 20, subsample_size=len(x)):
            pyro.sample("obs", dist.Normal(w.sum(-1) * x, 1.0), obs=y)

    guide = AutoNormal(model)
    guide(X, X)
    assert len(predict(model, guide, (X, X), Samples(2), batch_size=10)) == 20


def by_handler(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)), poutine.mask(mask=x > 0):
        pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)


def by_distribution(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pair = dist.Normal((w * x)[:, None].expand(-1, 1), 1.0).mask(x[:, None] > 0)
        pyro.sample("obs", pair.to_event(1), obs=y)


def by_observation(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    mask = True if y is None else y > -1
    with pyro.plate("data", len(x)), poutine.mask(mask=mask):
        pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)


MASKED = {
    by_handler: X > 0,
    by_distribution: X > 0,
    by_observation: 2 * X > -1,
}


@pytest.mark.parametrize("model", MASKED)
@pytest.mark.parametrize("method", [AtMean(), Samples(3)])
def test_masked_values_are_predicted_but_not_scored(model, method):
    counts = MASKED[model]
    y = 2 * X[:, None] if model is by_distribution else 2 * X
    wrong = torch.where(counts.reshape(y.shape), y, torch.tensor(100.0))
    if model is by_observation:
        wrong = y
    everywhere = predict(slope_everywhere, slope, (X, 2 * X), method, seed=1)
    prediction = predict(model, slope, (X, wrong), method, seed=1, batch_size=7)
    torch.testing.assert_close(prediction.mean.flatten(), everywhere.mean)
    log_likelihood = prediction.log_likelihood()
    assert torch.equal(log_likelihood.isnan(), ~counts)
    torch.testing.assert_close(log_likelihood[counts], everywhere.log_likelihood()[counts])
    scores = prediction.metrics()
    assert scores["nll"] == pytest.approx(-float(log_likelihood[counts].mean()))
    assert scores["rmse"] == pytest.approx(
        float((everywhere.mean - 2 * X)[counts].square().mean().sqrt()), abs=1e-6
    )
    assert torch.equal(prediction.mask.flatten(), counts)


@pytest.mark.parametrize("model", [by_handler, by_distribution])
def test_values_that_come_later_are_scored_under_the_same_mask(model):
    y = 2 * X[:, None] if model is by_distribution else 2 * X
    later, along = predict(model, slope, X), predict(model, slope, (X, y))
    torch.testing.assert_close(later.log_likelihood(y), along.log_likelihood(), equal_nan=True)
    assert later.metrics(y) == pytest.approx(along.metrics())


def slope_everywhere(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)


@pytest.mark.parametrize("method", [AtMean(), Samples(3)])
def test_what_stands_where_labels_are_masked_need_not_be_a_label(method):
    def model(x, y=None, seen=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)), poutine.mask(mask=x > 0):
            pyro.sample("obs", dist.Categorical(logits=torch.stack([w * x, -w * x], -1)), obs=y)

    y = torch.where(X > 0, torch.ones(20), torch.full((20,), -100.0)).long()
    with pyro.validation_enabled(False):
        prediction = predict(model, slope, {"x": X, "y": y}, method, seed=1, observed="y")
    by_hand = predict(model, slope, {"x": X[X > 0], "y": y[X > 0]}, method, seed=1, observed="y")
    # A difference of entropies, of which each is rounded in float32, has the error of an entropy.
    assert prediction.metrics() == pytest.approx(by_hand.metrics(), abs=1e-6)


@pytest.mark.parametrize("method", [AtMean(), Samples(3)])
def test_masked_parts_of_an_observation_are_left_out_of_its_density(method):
    counts = torch.rand(20, 2) > 0.4

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pair = dist.Normal(torch.stack([w * x, -w * x], -1), 1.0).mask(counts)
            pyro.sample("obs", pair.to_event(1), obs=y)

    def single(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)

    y = torch.stack([X, X + 1], -1)
    prediction = predict(model, slope, (X, y), method, seed=1)
    if method == AtMean():
        first = predict(single, slope, (X, X)).log_likelihood()
        second = predict(single, slope, (-X, X + 1)).log_likelihood()
        expected = torch.where(counts[:, 0], first, 0) + torch.where(counts[:, 1], second, 0)
        torch.testing.assert_close(
            prediction.log_likelihood(), expected.masked_fill(~counts.any(-1), math.nan), equal_nan=True
        )
    error = (prediction.mean - y)[counts].square().mean().sqrt()
    assert prediction.metrics()["rmse"] == pytest.approx(float(error))
    torch.testing.assert_close(prediction.log_likelihood(y), prediction.log_likelihood(), equal_nan=True)


def test_a_mask_that_leaves_nothing_out_is_none():
    assert predict(by_handler, slope, (X + 2, 2 * X + 4)).metrics()["rmse"] < 1e-6


@pytest.mark.parametrize("method", [AtMean(), Samples(3)])
def test_images_of_classes(method):
    weights = torch.randn(5, 3)

    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        logits = w * x[:, None, None] * weights  # [batch, positions, classes]
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Categorical(logits=logits).to_event(1), obs=y)

    x, y = torch.randn(6), torch.randint(3, (6, 5))
    prediction = predict(model, slope, (x, y), method, seed=0, batch_size=4)
    p = prediction.probabilities
    assert p.shape == (6, 5, 3)
    assert prediction.log_likelihood().shape == (6,)
    assert prediction.metrics()["accuracy"] == pytest.approx(float((p.argmax(-1) == y).float().mean()))
    if method == AtMean():
        by_position = p.gather(-1, y[..., None])[..., 0].log().sum(-1)
        torch.testing.assert_close(prediction.log_likelihood(), by_position)
        assert math.isclose(prediction.metrics(y)["nll"], -float(by_position.mean()), rel_tol=1e-5)
    with pytest.raises(DataError, match="outside the support of Categorical"):
        predict(model, slope, (x, y + 0.5), method)


def test_a_guide_that_was_loaded_too_early_says_what_to_do():
    guide = MeanFieldGuide(two_responses)
    with pytest.raises(GuideError, match=r"guide\(x, y\).*load\(\.\.\., example=batch\)"):
        predict(two_responses, guide, X)
