# SPDX-License-Identifier: Apache-2.0
"""The KL weight that is best on validation data: the grid, what fails, and what is left in place."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, DviWarning, GuideError, NonFiniteError

X = torch.linspace(-1, 1, 20, dtype=torch.float64)
NOISE, SLOPE = 0.5, 0.4


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=x.dtype), 0.3))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(w * x, NOISE), obs=y)


def train(kl_weight, guide_of=dvi.MeanFieldGuide, steps=60):
    guide = guide_of(model)
    elbo = dvi.TaylorELBO(kl_weight=kl_weight)
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.1}), loss=elbo)
    dvi.fit(svi, [(X, X)], steps, progress=False)
    return model, guide


def stand_in(kl_weight):
    """A training of no time, whose model knows its weight."""

    def weighted():
        return kl_weight

    return weighted, lambda: None


def distance(target):
    return lambda model, guide, validation: abs(math.log(model() / target))


def test_the_score_of_a_linear_regression():
    """The posterior mean is a fraction of the least-squares slope 1: that at which it is the true slope is known."""
    squares = float((X**2).sum()) / NOISE**2
    exact = squares * 0.3**2 * (1 - SLOPE) / SLOPE  # 1 / (1 + β / (s² Σ x²/σ²)) = slope
    grid = [exact / 3, exact, exact * 3]
    tuned = dvi.tune_kl_weight(train, (X, SLOPE * X), grid, progress=False)
    assert tuned.kl_weight == exact
    for weight, score in zip(*tuned.table.values(), strict=True):
        with pyro.get_param_store().scope():
            pyro.set_rng_seed(0)
            reference = dvi.predict(*train(weight), (X, SLOPE * X)).metrics()["nll"]
        assert score == pytest.approx(reference, rel=1e-12)
    assert dvi.predict(tuned.model, tuned.guide, X).mean[-1] == tuned.guide.median()["w"]


def test_maximum_a_posteriori():
    exact = float((X**2).sum()) / NOISE**2 * 0.3**2 * (1 - SLOPE) / SLOPE
    tuned = dvi.tune_kl_weight(
        lambda w: train(w, AutoDelta), (X, SLOPE * X), [exact / 3, exact, 3 * exact], progress=False
    )
    assert tuned.kl_weight == exact
    assert isinstance(tuned.guide, AutoDelta)
    assert float(tuned.guide.median()["w"]) == pytest.approx(SLOPE, abs=0.1)


@pytest.mark.parametrize(
    ("target", "tried"),
    [
        (0.1, [0.003, 0.01, 0.03, 0.1, 0.3]),
        (0.001, [0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3]),
        (1.1, [0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0]),
    ],
)
def test_the_grid_grows_where_the_best_is_at_its_end(target, tried):
    tuned = dvi.tune_kl_weight(stand_in, None, score=distance(target), progress=False)
    assert tuned.table["kl_weight"] == tried
    assert tuned.kl_weight == min(tried, key=lambda weight: abs(math.log(weight / target)))


def test_two_weights_go_on_by_their_ratio_and_one_stays_alone():
    tuned = dvi.tune_kl_weight(stand_in, None, (1, 2), score=distance(4), progress=False)
    assert tuned.table["kl_weight"] == [1, 2, 4, 8]
    assert dvi.tune_kl_weight(stand_in, None, [2], score=distance(4), progress=False).table["kl_weight"] == [
        2
    ]


def test_growth_is_bounded_and_says_so():
    with pytest.warns(DviWarning, match="0.0003, is at the end of those tried, 0.0003 to 0.3"):
        tuned = dvi.tune_kl_weight(stand_in, None, score=distance(1e-6), max_trainings=7, progress=False)
    assert tuned.table.rows == 7


def fails_at(*weights, error=None):
    def train(kl_weight):
        if kl_weight in weights:
            raise NonFiniteError("the loss is nan in step 3. More.") if error is None else error
        return stand_in(kl_weight)

    return train


def test_a_training_that_fails_is_a_row():
    tuned = dvi.tune_kl_weight(fails_at(0.03), None, score=distance(0.1), progress=False)
    assert tuned.kl_weight == 0.1
    assert tuned.failures == {0.03: "the loss is nan in step 3"}
    assert math.isnan(tuned.table["score"][2])
    lines = str(tuned).splitlines()
    assert lines[4].split() == "failed: the loss is nan in step 3 0.03 nan".split()
    assert lines[5].split() == "best 0.1 0.0000".split()


def test_a_score_that_is_not_finite_is_a_failure():
    tuned = dvi.tune_kl_weight(
        stand_in, None, score=lambda m, g, v: math.inf if m() == 0.3 else -m(), progress=False
    )
    assert tuned.kl_weight == 0.1
    assert tuned.failures == {0.3: "the score is inf"}


def test_parameters_that_have_become_nan():
    def ruined(kl_weight):
        model, guide = train(kl_weight, steps=2)
        if kl_weight == 0.3:
            dict(pyro.get_param_store().named_parameters())["MeanFieldGuide.locs.w"].data.fill_(math.nan)
        return model, guide

    with pytest.warns(DviWarning, match="at the end"):
        tuned = dvi.tune_kl_weight(ruined, (X, X), (0.1, 0.3), max_trainings=2, progress=False)
    assert tuned.kl_weight == 0.1
    assert "not finite" in tuned.failures[0.3]


def test_all_fail():
    with pytest.raises(
        NonFiniteError, match=r"every training has failed \(0.03: the loss is nan in step 3; 0.1"
    ):
        dvi.tune_kl_weight(fails_at(0.03, 0.1), None, (0.03, 0.1), score=distance(1), progress=False)


@pytest.mark.parametrize("error", [TypeError("typo"), GuideError("not factorised")])
def test_mistakes_are_no_failures(error):
    with pytest.raises(type(error), match=str(error)):
        dvi.tune_kl_weight(fails_at(0.1, error=error), None, score=distance(1), progress=False)


@pytest.mark.parametrize("weights", [(), (0.0, 1.0), (-1.0,), tuple(range(1, 11))])
def test_weights_that_cannot_be(weights):
    with pytest.raises(ArgumentError, match="kl_weights"):
        dvi.tune_kl_weight(stand_in, None, weights, score=distance(1), progress=False)


def test_what_is_around_it_stays():
    pyro.get_param_store()["mine"] = torch.ones(1)
    pyro.get_param_store()["MeanFieldGuide.locs.w"] = torch.tensor(7.0)
    state, inner = torch.get_rng_state(), []

    def noisy(kl_weight):
        inner.append(torch.rand(()))
        return train(kl_weight, steps=2)

    with pytest.warns(DviWarning, match="at the end"):
        tuned = dvi.tune_kl_weight(noisy, (X, X), (0.3, 1), max_trainings=2, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert inner[0] == inner[1]  # the same seed
    assert "mine" in pyro.get_param_store()
    assert float(pyro.param("MeanFieldGuide.locs.w").detach()) == float(tuned.guide.median()["w"].detach())


def test_a_score_that_draws_leaves_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    dvi.tune_kl_weight(stand_in, None, (1.0,), score=lambda *_: float(torch.rand(())), progress=False)
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)
