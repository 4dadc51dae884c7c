# SPDX-License-Identifier: Apache-2.0
"""Settings that are best on validation data: the search, the choice, what fails, and what is left in place."""

import math
import subprocess
import sys

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, DviWarning, GuideError, NonFiniteError
from tests.analysis.trainings import Recorder, distance, stand_in, tune

X = torch.linspace(-1, 1, 20, dtype=torch.float64)
NOISE, SLOPE = 0.5, 0.4
WEIGHTS = (0.003, 0.01, 0.03, 0.1, 0.3)


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=x.dtype), 0.3))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(w * x, NOISE), obs=y)


def train(kl_weight, guide_of=dvi.MeanFieldGuide, steps=60, own_model=model):
    guide = guide_of(own_model)
    elbo = dvi.TaylorELBO(kl_weight=kl_weight)
    svi = SVI(own_model, guide, dvi.optim.Adam({"lr": 0.1}), loss=elbo)
    dvi.fit(svi, [(X, X)], steps, progress=False)
    return own_model, guide


def best_weight():
    """The posterior mean is a fraction of the least-squares slope 1; at this weight it is the true slope."""
    squares = float((X**2).sum()) / NOISE**2
    return squares * 0.3**2 * (1 - SLOPE) / SLOPE  # 1 / (1 + β / (s² Σ x²/σ²)) = slope


# The default score --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_score_of_a_linear_regression():
    exact = best_weight()
    grid = [exact / 3, exact, exact * 3]
    tuned = tune(train, {"kl_weight": grid}, validation=(X, SLOPE * X))
    assert tuned.settings == {"kl_weight": exact}
    for weight, score, error in zip(
        *(tuned.table[n] for n in ("kl_weight", "score", "standard_error")), strict=True
    ):
        with pyro.get_param_store().scope():
            pyro.set_rng_seed(0)
            reference = dvi.predict(*train(weight), (X, SLOPE * X)).metrics()
        assert score == pytest.approx(reference["nll"], rel=1e-12)
        assert error == pytest.approx(reference["nll_standard_error"], rel=1e-9)
    assert dvi.predict(tuned.model, tuned.guide, X).mean[-1] == tuned.guide.median()["w"]


def test_maximum_a_posteriori():
    exact = best_weight()
    grid = {"kl_weight": [exact / 3, exact, 3 * exact]}
    tuned = tune(lambda kl_weight: train(kl_weight, AutoDelta), grid, validation=(X, SLOPE * X))
    assert tuned.settings == {"kl_weight": exact}
    assert isinstance(tuned.guide, AutoDelta)
    assert float(tuned.guide.median()["w"]) == pytest.approx(SLOPE, abs=0.1)


def test_rows_of_several_observations_some_of_them_masked():
    """The mean is that of all observations that count; the error is that of rows, of which one is masked."""

    def two_columns(x, y=None):
        w = pyro.sample("w", dist.Normal(torch.zeros((), dtype=X.dtype), 0.3))
        with pyro.plate("data", len(x), dim=-2), pyro.plate("columns", 2, dim=-1):
            seen = torch.ones(len(x), 2, dtype=torch.bool)
            seen[0], seen[1, 1] = False, False
            return pyro.sample("y", dist.Normal(w * x[:, None], NOISE).mask(seen), obs=y)

    def fixed(kl_weight):
        guide = AutoDelta(two_columns)
        guide(*data)
        return two_columns, guide

    data = X, torch.stack([X, 2 * X], -1)
    tuned = tune(fixed, {"kl_weight": [1]}, validation=data)
    prediction = dvi.predict(tuned.model, tuned.guide, data)
    (score,), (error,) = tuned.table["score"], tuned.table["standard_error"]
    assert score == pytest.approx(prediction.metrics()["nll"], rel=1e-12)
    rows = prediction.log_likelihood().double()[1:].nansum(-1) * 19 / 37
    assert error == pytest.approx(float(rows.std()) / math.sqrt(19), rel=1e-9)


# The search -----------------------------------------------------------------------------------------------------------


def test_one_setting_after_the_other_from_the_middle_and_none_twice():
    seen = Recorder()
    tuned = tune(
        seen,
        {"lr": (0.03, 0.003, 0.01), "width": (10, 20, 30), "act": ("tanh", "relu", "gelu", "silu")},
        score=lambda m, g, v: distance(lr=0.01, width=20)(m, g, v) + (m()["act"] != "gelu"),
        max_trainings=8,
    )
    assert [tuple(one.values()) for one in seen.calls] == [
        (0.003, 20, "relu"),
        (0.01, 20, "relu"),
        (0.03, 20, "relu"),
        (0.01, 10, "relu"),
        (0.01, 30, "relu"),
        (0.01, 20, "tanh"),
        (0.01, 20, "gelu"),
        (0.01, 20, "silu"),
    ]
    assert tuned.settings == {"lr": 0.01, "width": 20, "act": "gelu"}
    assert tuned.model() == tuned.settings
    assert tuned.table["lr"] == [0.003, *[0.01] * 6, 0.03]
    assert tuned.table["width"] == [20, 10, 20, 20, 20, 20, 30, 20] and isinstance(
        tuned.model()["width"], int
    )
    assert tuned.table["act"] == ["relu", "relu", "tanh", "relu", "gelu", "silu", "relu", "relu"]


@pytest.mark.parametrize(
    ("target", "tried"),
    [
        (0.1, list(WEIGHTS)),
        (0.001, [0.0003, 0.001, *WEIGHTS]),
        (1.1, [*WEIGHTS, 1.0, 3.0]),
    ],
)
def test_the_search_goes_on_beyond_an_end(target, tried):
    tuned = tune(stand_in, {"lr": WEIGHTS}, score=distance(lr=target))
    assert tuned.table["lr"] == tried
    assert tuned.settings["lr"] == min(tried, key=lambda weight: abs(math.log(weight / target)))


def test_two_values_go_on_by_their_ratio_and_one_stays_alone():
    assert tune(stand_in, {"lr": (1.0, 2.0)}, score=distance(lr=4)).table["lr"] == [1, 2, 4, 8]
    assert tune(stand_in, {"lr": [2.0]}, score=distance(lr=4)).table["lr"] == [2]


def test_the_search_ends_where_the_curve_is_flat():
    """The gain of the last value is .3, and its paired standard error .577: neither goes on nor warns."""
    means = {0.01: 1.0, 0.1: 0.3, 1.0: 0.0}
    seen = Recorder()
    tuned = tune(seen, {"lr": list(means)}, score=lambda m, g, v: NOISY + means[m()["lr"]] + ODD * m()["lr"])
    assert tuned.settings == {"lr": 1.0} and len(seen.calls) == 3


def test_whole_numbers_stay_whole():
    tuned = tune(stand_in, {"width": (16, 32, 64)}, score=distance(width=8))
    assert tuned.table["width"] == [4, 8, 16, 32, 64]
    assert all(isinstance(width, int) for width in tuned.table["width"])
    assert tune(stand_in, {"depth": (1, 2, 3)}, score=distance(depth=0.1)).table["depth"] == [1, 2, 3]


@pytest.mark.parametrize(("values", "best"), [((0, 0.1, 0.2), 0.2), ((-1, 1), 1.0), (("a", "b"), "b")])
def test_what_has_no_next_value_has_no_end(values, best):
    tuned = tune(stand_in, {"s": values}, score=lambda m, g, v: float(m()["s"] != best))
    assert tuned.settings["s"] == best and tuned.table.rows == len(values)


def test_later_lists_are_searched_before_an_end_takes_all_trainings():
    seen = Recorder()
    with pytest.warns(DviWarning, match=r"the best lr, 1, is the smallest or largest .* Try 10 too"):
        tuned = tune(
            seen,
            {"lr": (0.01, 0.1), "decay": (1.0, 2.0, 3.0)},
            score=distance(lr=1e5, decay=2),
            max_trainings=5,
        )
    assert [one["lr"] for one in seen.calls] == [0.01, 0.1, 1, 1, 1]
    assert tuned.settings == {"lr": 1, "decay": 2}


def test_one_warning_for_each_setting_at_an_end():
    with pytest.warns(DviWarning) as caught:
        tune(
            stand_in, {"lr": (0.01, 0.1), "decay": (1.0, 2.0)}, score=distance(lr=9, decay=9), max_trainings=3
        )
    first, second = (str(one.message) for one in caught)
    assert "the best lr, 0.1, is the smallest or largest value that was tried. Try 1 too" in first
    assert "the best decay, 2, is the smallest or largest value that was tried. Try 4 too" in second


def test_the_end_is_reached_in_trainings_that_are_left():
    with pytest.warns(DviWarning, match="Try 0.0001 too"):
        tuned = tune(stand_in, {"lr": WEIGHTS}, score=distance(lr=1e-6), max_trainings=7)
    assert tuned.table.rows == 7


# The choice -----------------------------------------------------------------------------------------------------------

NOISY = torch.tensor([5.0, -5.0, 3.0, -3.0])  # of all rows: large, and the same in each training
ODD = torch.tensor([1.0, -1.0, 1.0, -1.0])  # of mean 0 and paired standard error sqrt(1/3)


def rows_of(means, **spread):
    """Scores of rows whose means are given, and whose differences from the first have a known standard error."""

    def score(model, guide, validation):
        (value,) = model().values()
        return NOISY + means[value] + spread.get("by", 1.0) * ODD * (value != spread.get("best"))

    return score


def test_the_largest_temperature_within_one_paired_standard_error():
    means = {0.01: 0.0, 0.1: 0.3, 1.0: 0.5, 10.0: 0.7}  # one paired standard error of ODD is .577
    for name in ("temperature", "kl_weight"):
        tuned = tune(stand_in, {name: list(means)}, score=rows_of(means, best=0.01))
        assert tuned.settings == {name: 1.0} and tuned.model() == {name: 1.0}
        assert tuned.table["paired_standard_error"] == pytest.approx([0, *[math.sqrt(1 / 3)] * 3])
        assert tuned.table["standard_error"][0] == pytest.approx(float(NOISY.std()) / 2)
        lines = str(tuned).splitlines()
        assert lines[2].split()[:3] == ["lowest", "score", "0.01"] and lines[4].split()[:2] == ["chosen", "1"]


def test_differences_are_paired():
    """Unpaired, the noise of the rows would hide this difference."""
    means = {0.01: 0.0, 0.1: 0.3, 1.0: 0.5}
    with pytest.warns(DviWarning, match="Try 0.001 too"):
        tuned = tune(
            stand_in, {"temperature": list(means)}, score=rows_of(means, best=0.01, by=0.1), max_trainings=3
        )
    assert tuned.settings == {"temperature": 0.01}


def test_other_settings_take_their_lowest_score():
    means = {0.01: 0.2, 0.1: 0.0, 1.0: 0.1}
    assert tune(stand_in, {"lr": list(means)}, score=rows_of(means, best=0.1)).settings == {"lr": 0.1}


def test_one_number_takes_the_lowest():
    score = rows_of({0.01: 0.01, 0.1: 0.0, 1.0: 0.01}, best=0.1)
    tuned = tune(stand_in, {"temperature": (0.01, 0.1, 1.0)}, score=lambda *given: score(*given).mean())
    assert tuned.settings == {"temperature": 0.1}
    assert all(
        math.isnan(one) for one in tuned.table["standard_error"] + tuned.table["paired_standard_error"]
    )
    assert str(tuned).splitlines()[3].split() == "chosen 0.1 0.0000 - -".split()


def test_other_settings_are_those_of_the_best():
    """A larger temperature that is close with another step size does not count."""

    def score(model, guide, validation):
        lr, temperature = model()["lr"], model()["temperature"]
        if lr == 0.2:  # the best, from which all others differ by less than one standard error, .577
            return NOISY - 0.1 + ODD
        return NOISY + (5.0 if lr > 0.2 else 0.3 * (temperature != 0.2))

    space = {"temperature": (0.1, 0.2, 0.4), "lr": (0.1, 0.2)}
    tuned = tune(stand_in, space, score=score, max_trainings=4)
    assert tuned.settings == {"temperature": 0.2, "lr": 0.2}


def test_the_search_goes_round_again_with_the_neighbours_of_the_best():
    """The first round finds lr 1 at decay 2; the lowest score, at lr 10 and decay 3, needs a second one."""
    scores = {(1, 2): 3.0, (1, 3): 2.0, (10, 3): 1.0}
    seen = Recorder()
    tuned = tune(
        seen,
        {"lr": (0.1, 1, 10), "decay": (1, 2, 3)},
        score=lambda m, g, v: scores.get((m()["lr"], m()["decay"]), 9.0),
    )
    assert [tuple(one.values()) for one in seen.calls][:5] == [(0.1, 2), (1, 2), (10, 2), (1, 1), (1, 3)]
    assert tuned.settings == {"lr": 10, "decay": 3}
    assert len(seen.calls) <= 12


def test_a_flat_curve_is_not_followed_to_smaller_temperatures():
    means = {0.01: 0.0, 0.1: 0.1, 1.0: 5.0}
    tuned = tune(stand_in, {"temperature": list(means)}, score=rows_of(means, best=0.01))
    assert tuned.settings == {"temperature": 0.1} and tuned.table.rows == 3


# What fails -----------------------------------------------------------------------------------------------------------


def fails_at(*values, error=None):
    def train(lr):
        if lr in values:
            raise NonFiniteError("the loss is nan in step 3. More.") if error is None else error
        return stand_in(lr=lr)

    return train


def test_a_training_that_fails_is_a_row():
    tuned = tune(fails_at(0.03), {"lr": WEIGHTS}, score=distance(lr=0.1))
    assert tuned.settings["lr"] == 0.1
    assert tuned.failures == {2: "the loss is nan in step 3"}
    assert math.isnan(tuned.table["score"][2])
    lines = str(tuned).splitlines()
    assert lines[4].split() == "failed: the loss is nan in step 3 0.03 - - -".split()
    assert lines[5].split() == "chosen 0.1 0.0000 - -".split()


@pytest.mark.parametrize("of_rows", [False, True])
def test_a_score_that_is_not_finite_is_a_failure(of_rows):
    def score(model, guide, validation):
        value = math.inf if model()["lr"] == 0.3 else -model()["lr"]
        return torch.tensor([0.0, value]) if of_rows else value

    tuned = tune(stand_in, {"lr": WEIGHTS}, score=score)
    assert tuned.settings["lr"] == 0.1
    assert tuned.failures == {4: "the score is inf"}


def test_parameters_that_have_become_nan():
    def ruined(kl_weight):
        model, guide = train(kl_weight, steps=2)
        if kl_weight == 0.3:
            dict(pyro.get_param_store().named_parameters())["MeanFieldGuide.locs.w"].data.fill_(math.nan)
        return model, guide

    with pytest.warns(DviWarning, match="smallest or largest"):
        tuned = tune(ruined, {"kl_weight": (0.1, 0.3)}, validation=(X, X), max_trainings=2)
    assert tuned.settings["kl_weight"] == 0.1
    assert "not finite" in tuned.failures[1]


def test_all_fail():
    with pytest.raises(
        NonFiniteError, match=r"every training run has failed \(0.03: the loss is nan in step 3; 0.1"
    ) as e:
        tune(fails_at(0.03, 0.1), {"lr": (0.03, 0.1)}, score=distance(lr=1))
    assert isinstance(e.value.__cause__, NonFiniteError)


def test_the_middle_may_fail():
    def train(lr, width):
        return fails_at(0.03)(lr) and stand_in(lr=lr, width=width)

    lists = {"lr": (0.01, 0.03, 0.1), "width": (10, 20, 40)}
    tuned = tune(train, lists, score=distance(lr=0.02, width=20), max_trainings=9)
    assert tuned.settings == {"lr": 0.01, "width": 20} and tuned.failures == {4: "the loss is nan in step 3"}


@pytest.mark.parametrize("error", [TypeError("typo"), GuideError("not factorised")])
def test_mistakes_are_no_failures(error):
    with pytest.raises(type(error), match=str(error)):
        tune(fails_at(0.1, error=error), {"lr": WEIGHTS}, score=distance(lr=1))


def test_a_value_beyond_the_list_may_be_one_that_cannot_be():
    tuned = tune(
        fails_at(1.0, error=ArgumentError("a rate below one")), {"lr": WEIGHTS}, score=distance(lr=9)
    )
    assert tuned.settings["lr"] == 0.3 and tuned.failures == {5: "a rate below one"}


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"lr": ()}, "'lr' with values"),
        ({"lr": "adam"}, "'lr' with values"),
        ({"lr": (0.1, math.nan)}, "finite numbers"),
        ({"act": (torch.relu,)}, r"strings \(for other objects\)"),
        ({"prior_scale": ([1, 2],)}, r"'prior_scale' with values \(\[1, 2\],\) cannot be tuned"),
        ({"prior_scale": ({},)}, "'prior_scale' with values"),
        ({"lr": 0.1}, "'lr' with values 0.1 .* must be a list"),
        ({"lr": None}, "'lr' with values None"),
        ({3: (1, 2)}, "setting 3 with values"),
        ({"score": (1, 2)}, "are reserved"),
        ({"lr": range(1, 14)}, "need 13 training runs, more than max_trainings=12"),
        ({"lr": range(1, 8), "width": range(1, 8)}, "need 13 training runs"),
    ],
)
def test_lists_that_cannot_be(space, message):
    with pytest.raises(ArgumentError, match=message):
        tune(stand_in, space, score=lambda *_: 0.0)


def test_scores_that_cannot_be():
    with pytest.raises(ArgumentError, match="one number per row, not shape \\(2, 2\\)"):
        tune(stand_in, {"lr": (1, 2)}, score=lambda *_: torch.ones(2, 2))
    with pytest.raises(ArgumentError, match="different shapes"):
        tune(stand_in, {"rows": (1, 2)}, score=lambda m, g, v: torch.ones(1 + m()["rows"]))


def test_a_network_of_another_training_is_refused():
    net = torch.nn.Linear(1, 1)
    with pytest.raises(ArgumentError, match="build network, model and guide inside train"):
        tune(lambda lr: (net, lambda: None), {"lr": (1.0, 2.0)}, score=lambda *_: 0.0)


# What is around it ----------------------------------------------------------------------------------------------------


def test_what_is_around_it_stays():
    pyro.get_param_store()["mine"] = torch.ones(1)
    pyro.get_param_store()["MeanFieldGuide.locs.w"] = torch.tensor(7.0)
    state, inner = torch.get_rng_state(), []

    def noisy(kl_weight):
        inner.append((torch.rand(()), list(pyro.get_param_store())))
        return train(kl_weight, steps=2)

    with pytest.warns(DviWarning, match="smallest or largest"):
        tuned = tune(noisy, {"kl_weight": (0.3, 1.0)}, validation=(X, X), max_trainings=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert inner[0] == inner[1] and inner[0][1] == []  # the same seed, an empty store
    assert "mine" in pyro.get_param_store()
    assert float(pyro.param("MeanFieldGuide.locs.w").detach()) == float(tuned.guide.median()["w"].detach())


def test_a_score_that_draws_has_the_seed_and_leaves_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    tuned = tune(stand_in, {"lr": ("a", "b")}, score=lambda *_: float(torch.rand(())), seed=5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        assert tuned.table["score"] == [float(torch.rand(()))] * 2
    torch.testing.assert_close(torch.rand(3), expected, rtol=0, atol=0)


def test_a_posterior_that_may_be_chosen_later_is_kept():
    """The largest temperature is trained last of all that are close, or first: it is never trained again."""
    for means in ({1.0: 0.0, 2.0: 0.1, 3.0: 0.2}, {1.0: 0.2, 2.0: 0.1, 3.0: 0.0}):
        seen = Recorder()
        tune(
            seen,
            {"temperature": list(means)},
            score=lambda m, g, v, means=means: NOISY + means[m()["temperature"]] + ODD * m()["temperature"],
            max_trainings=3,
        )
        assert len(seen.calls) == 3


def test_the_own_search_needs_no_optuna():
    code = """
import sys, pyro_dvi
sys.modules["optuna"] = None  # importing it would fail
train = lambda lr: (lambda: lr, lambda: None)
tuned = pyro_dvi.tune(train, None, {"lr": (1, 2, 3)}, score=lambda model, *_: (model() - 2) ** 2)
print(tuned.settings["lr"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2\n"
