# SPDX-License-Identifier: Apache-2.0
"""Searches by an Optuna study: what it proposes, and how it goes on from its storage."""

import math

import pytest

from pyro_dvi.errors import DviWarning, NonFiniteError
from tests.analysis.test_tuning_settings import NOISY, ODD
from tests.analysis.trainings import Recorder, distance, stand_in, tune

optuna = pytest.importorskip("optuna")
optuna.logging.set_verbosity(optuna.logging.ERROR)

LISTS = {"lr": (0.003, 0.01, 0.03), "act": ("relu", "tanh")}


def score(model, guide, validation):
    settings = model()
    return NOISY + distance(lr=0.1)(model, guide, validation) + ODD * (settings["act"] == "tanh")


class Interrupted(Recorder):
    """A training that fails at one step size, and is interrupted in a certain call."""

    def __init__(self, at=math.inf):
        super().__init__()
        self.at = at

    def __call__(self, **settings):
        if len(self.calls) == self.at:
            raise KeyboardInterrupt
        made = super().__call__(**settings)
        if settings["lr"] == 0.01:
            raise NonFiniteError("the loss is nan")
        return made


def grid(**options):
    sampler = optuna.samplers.GridSampler({name: list(values) for name, values in LISTS.items()}, seed=0)
    return optuna.create_study(sampler=sampler, **options)


def test_a_study_proposes_settings_jointly():
    seen, study = Recorder(), optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    with pytest.warns(DviWarning, match="the best lr, 0.03, is the smallest or largest .* Try 0.1 too"):
        tuned = tune(seen, LISTS, score=score, study=study, max_trainings=20)
    tried = {tuple(one.values()) for one in seen.calls}
    assert len(tried) == len(seen.calls) == tuned.table.rows == 6  # all of them, and none twice
    assert tuned.settings == {"lr": 0.03, "act": "relu"}
    assert study.best_params == tuned.settings and study.best_value == min(tuned.table["score"])


def test_a_grid_ends_by_itself_and_failures_are_rows():
    seen = Interrupted()
    with pytest.warns(DviWarning, match="smallest or largest"):
        tuned = tune(seen, LISTS, score=score, study=grid(), max_trainings=50)
    assert len(seen.calls) == tuned.table.rows == 6 and len(tuned.failures) == 2


def test_lists_may_need_more_trainings_than_a_study_has():
    lists = {"lr": [float(k) for k in range(1, 50)], "temperature": [float(k) for k in range(1, 50)]}
    seen, study = Recorder(), optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0))
    tuned = tune(seen, lists, score=distance(lr=20, temperature=20), study=study, max_trainings=5)
    assert len(seen.calls) == tuned.table.rows == 5


@pytest.mark.filterwarnings("ignore::pyro_dvi.errors.DviWarning")  # the best is at an end
@pytest.mark.parametrize("at", [0, 3, 6])
def test_an_interrupted_study_goes_on_from_its_storage(at, tmp_path):
    lists = {"lr": (0.003, 0.01, 0.03, 0.1, 0.3), "act": ("relu", "tanh")}
    options = {"storage": f"sqlite:///{tmp_path / 'study.db'}", "study_name": "s", "load_if_exists": True}

    def search(train):
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=len(train.calls)), **options)
        return tune(train, lists, score=score, study=study, max_trainings=8)

    first, second = Interrupted(at), Interrupted()
    try:
        done = search(first).table.rows
    except KeyboardInterrupt:
        done = len(first.calls)
    tuned = search(second)
    worked = [one for one in first.calls if one["lr"] != 0.01]
    again = [one for one in second.calls if one in worked]
    assert again in ([], [tuned.settings])  # at most the chosen settings are trained again
    assert done <= tuned.table.rows + 2 and tuned.model() == tuned.settings
    rows = list(zip(tuned.table["lr"], tuned.table["act"], strict=True))
    assert len(set(rows)) == len(rows) and {tuple(one.values()) for one in worked} <= set(rows)
    for lr, act, value in zip(*(tuned.table[name] for name in ("lr", "act", "score")), strict=True):
        expected = float(score(lambda lr=lr, act=act: {"lr": lr, "act": act}, None, None).double().mean())
        assert lr == 0.01 or value == expected


def test_one_number_as_score_goes_on_too():
    study = grid()
    first = tune(stand_in, LISTS, score=distance(lr=0.01), study=study)
    second = tune(stand_in, LISTS, score=distance(lr=0.01), study=study)
    assert str(first) == str(second) and first.settings == {"lr": 0.01, "act": first.settings["act"]}
