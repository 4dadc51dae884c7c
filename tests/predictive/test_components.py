# SPDX-License-Identifier: Apache-2.0
"""Sites that are neither in the guide nor observed are not taken for known."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoNormal

from pyro_dvi import AtMean, MeanFieldGuide, Moments, Samples, predict
from pyro_dvi.errors import ModelError, UnsupportedError

X = torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
Y = torch.randn(6, generator=torch.Generator().manual_seed(1))


def weights():
    return pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))


def guide(x, *_args, **_kwargs):
    pyro.sample("w", dist.Delta(torch.zeros(2), event_dim=1))


def chain(x, a=None, b=None):
    w = weights()
    with pyro.plate("data", len(x)):
        a = pyro.sample("a", dist.Normal(x @ w, 1.0), obs=a)
        pyro.sample("b", dist.Normal(a, 0.1), obs=b)


def clusters(x, y=None):
    w = weights()
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.01), infer={"enumerate": "parallel"})
        return pyro.sample("obs", dist.Normal(x @ w + 3 * z, 1.0), obs=y)


def independent(x, a=None, b=None):
    w = weights()
    with pyro.plate("data", len(x)):
        pyro.sample("a", dist.Normal(x @ w, 1.0), obs=a)
        pyro.sample("b", dist.Categorical(logits=x @ w[:, None] * torch.ones(3)), obs=b)


def flow(x, a=None, b=None):
    w = weights()
    with pyro.plate("data", len(x)):
        a = pyro.sample("a", dist.Normal(x @ w, 1.0), obs=a)
        shift = dist.transforms.AffineTransform(a, 1.0)
        pyro.sample("b", dist.TransformedDistribution(dist.Normal(torch.zeros(len(x)), 1.0), [shift]), obs=b)


@pytest.mark.parametrize(
    ("model", "site", "drawn"), [(chain, "b", "a"), (clusters, "obs", "z"), (flow, "b", "a")]
)
def test_a_rule_without_draws_refuses_what_depends_on_them(model, site, drawn):
    with pytest.raises(
        UnsupportedError, match=rf"{site!r} depends on sites \['{drawn}'\].*AtMean.*Samples\(n\)"
    ):
        predict(model, guide, X, AtMean(), site=site, seed=0)
    assert len(predict(model, guide, X, Samples(3), site=site)) == 6


@pytest.mark.parametrize("rows", [1, 6])
def test_other_rules_do_too(rows):
    mean_field = MeanFieldGuide(pyro.poutine.block(chain, expose=["w"]))
    mean_field(X)
    with pytest.raises(UnsupportedError, match=r"'b' depends on sites \['a'\].*Moments"):
        predict(chain, mean_field, X[:rows], Moments(), site="b")


def test_samples_average_over_them():
    prediction = predict(chain, guide, X, Samples(500), site="b", seed=0)
    torch.testing.assert_close(
        prediction.variance, torch.full((6,), 1.01), rtol=0.3, atol=0
    )  # 4.7 errors of 0.064


def test_independent_and_observed_sites_are_predicted_as_before():
    for site in ("a", "b"):
        assert len(predict(independent, guide, X, site=site)) == 6
    prediction = predict(chain, guide, {"x": X, "a": Y, "b": Y}, site="b", observed="b")
    torch.testing.assert_close(prediction.mean, Y)
    torch.testing.assert_close(prediction.variance, torch.full((6,), 0.01))
    assert len(predict(chain, guide, X, site="a")) == 6  # comes before any draw that could matter


def test_the_random_numbers_of_the_prediction_are_the_same_with_the_check():
    def two(x, a=None, b=None):
        independent(x, a, b)

    automatic = AutoNormal(pyro.poutine.block(two, expose=["w"]))
    automatic(X)
    state = torch.get_rng_state()
    predict(two, automatic, X, site="b", seed=0)
    assert torch.equal(torch.get_rng_state(), state)


def test_without_a_choice_the_error_knows_of_sites_that_are_left_to_the_model():
    with pytest.raises(ModelError, match=r"\['z', 'obs'\].*omits the variable.*Samples\(n\)"):
        predict(clusters, guide, X)
