# SPDX-License-Identifier: Apache-2.0
"""Searches that go on from a file, and searches by a sampler of Optuna."""

import json
import sys

import pytest
import torch

from pyro_dvi.errors import ArgumentError, CheckpointError, DviWarning, NonFiniteError
from tests.analysis.tuning.stand_ins import Recorder, distance, stand_in, tune
from tests.analysis.tuning.test_settings import NOISY, ODD

LISTS = {"lr": (0.003, 0.01, 0.03), "act": ("relu", "tanh")}


def score(model, guide, validation):
    settings = model()
    return NOISY + distance(lr=0.1)(model, guide, validation) + ODD * (settings["act"] == "tanh")


class Interrupted(Recorder):
    """A training that is interrupted in a certain call."""

    def __init__(self, at):
        super().__init__()
        self.at = at

    def __call__(self, **settings):
        if len(self.calls) == self.at:
            raise KeyboardInterrupt
        if settings["lr"] == 0.01:
            self.calls.append(settings)
            raise NonFiniteError("the loss is nan")
        return super().__call__(**settings)


# A file ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", range(7))
def test_an_interrupted_search_goes_on_to_the_same_result(at, tmp_path):
    whole = Interrupted(None)
    expected = tune(whole, LISTS, score=score)
    first, second = Interrupted(at), Interrupted(None)
    try:
        tune(first, LISTS, score=score, storage=tmp_path / "trainings.jsonl")
    except KeyboardInterrupt:
        pass
    found = tune(second, LISTS, score=score, storage=str(tmp_path / "trainings.jsonl"))
    trained = [settings for settings in first.calls if settings["lr"] != 0.01]
    best = sorted(trained, key=lambda own: float(score(lambda: own, None, None).mean()))[:1]
    chosen = [found.settings] if found.settings in trained and [found.settings] != best else []
    assert second.calls == best + whole.calls[at:] + chosen and len(chosen + best) <= 1
    assert str(found) == str(expected) and found.settings == expected.settings
    assert found.failures == expected.failures and found.model() == found.settings


def test_a_finished_search_trains_only_the_chosen_again(tmp_path):
    path, seen = tmp_path / "trainings.jsonl", Recorder()
    first = tune(stand_in, LISTS, score=score, storage=path)
    second = tune(seen, LISTS, score=score, storage=path)
    assert seen.calls == [first.settings] and str(second) == str(first)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == first.table.rows
    assert rows[0]["settings"] == {"lr": 0.003, "act": "relu"} and len(rows[0]["score"]) == 4


def test_a_line_that_was_not_finished_is_left_out(tmp_path):
    path = tmp_path / "trainings.jsonl"
    first = tune(stand_in, LISTS, score=score, storage=path)
    whole = path.read_bytes()
    for end in (
        -1,
        -2,
        -20,
        -len(whole.splitlines()[-1]) + 5,
    ):  # without the newline only, the line is finished
        path.write_bytes(whole[:end])
        seen = Recorder()
        assert str(tune(seen, LISTS, score=score, storage=path)) == str(first)
        assert len(seen.calls) == (1 if end == -1 else 2) or seen.calls == [first.settings]
        again = Recorder()
        assert str(tune(again, LISTS, score=score, storage=path)) == str(first)
        assert again.calls == [first.settings]  # what was added after it is read


@pytest.mark.parametrize(
    "content",
    [
        '{"settings": {"lr": 0.1}, "seed": 0, "score": 1.0}\n',
        '{"lr": 0.1}',
        "[1, 2]",
        "3",
        "# Notes",
        "lr,act\n1,2\n",
    ],
)
def test_another_file_is_refused_and_left_as_it_is(content, tmp_path):
    path = tmp_path / "notes"
    path.write_text(content)
    with pytest.raises(CheckpointError, match="not a training run of this search .seed 0, settings lr, act"):
        tune(stand_in, LISTS, score=score, storage=path)
    assert path.read_text() == content


def test_another_seed_and_other_rows_are_refused(tmp_path):
    path = tmp_path / "trainings.jsonl"
    tune(stand_in, LISTS, score=score, storage=path)
    with pytest.raises(CheckpointError, match="search .seed 1, "):
        tune(stand_in, LISTS, score=score, storage=path, seed=1)
    with pytest.raises(CheckpointError, match="hoose another path for storage"):
        tune(stand_in, {**LISTS, "act": ("relu", "gelu")}, score=lambda *_: torch.ones(2), storage=path)


def failing(**settings):
    raise NonFiniteError("the loss is inf")


@pytest.mark.parametrize("scalar", [False, True])
@pytest.mark.parametrize(
    ("train", "shift", "gives"),
    [(stand_in, 0.05, r"1\.05"), (failing, 0.0, "the loss is inf")],
    ids=["score", "failure"],
)
def test_results_of_another_training_are_not_taken(train, shift, gives, scalar, tmp_path):
    """Before anything else is trained, the best training run is repeated, and its score is compared."""

    def score_of(shift):
        def value(model, guide, validation):
            rows = 1 + shift + distance(lr=0.01)(model, guide, validation) + NOISY
            return float(rows.mean()) if scalar else rows

        return value

    path = tmp_path / "trainings.jsonl"
    tune(stand_in, LISTS, score=score_of(0), storage=path)
    before = path.read_text()
    tune(stand_in, LISTS, score=score_of(0.001), storage=path)  # a repetition may differ a little
    with pytest.raises(
        CheckpointError, match=rf"score 1 for .*0\.01.*repetition gives {gives}.*another training"
    ):
        tune(train, {"lr": (0.01, 0.02, 0.03), "act": ("relu", "tanh")}, score=score_of(shift), storage=path)
    assert path.read_text() == before


BEGINNING = '{"settings": {"lr": 0.03, "act": "relu"}, "seed": 0'


@pytest.mark.parametrize(
    "line",
    [
        '{"settings": 3, "seed": 0, "score": 1.0}',
        '{"settings": ["lr", "act"], "seed": 0, "score": 1.0}',
        '{"settings": null, "seed": 0, "score": 1.0}',
        '{"settings": {"lr": [1], "act": "relu"}, "seed": 0, "score": 1.0}',
        '{"settings": {"lr": 0.03, "act": {}}, "seed": 0, "score": 1.0}',
        '{"settings": {"lr": "a", "act": "relu"}, "seed": 0, "score": 1.0}',
        '{"settings": {"lr": null, "act": "relu"}, "seed": 0, "score": 1.0}',
        BEGINNING + "}",
        BEGINNING + ', "score": "x"}',
        BEGINNING + ', "score": []}',
        BEGINNING + ', "score": [[1.0]]}',
        BEGINNING + ', "score": [1.0, null]}',
        BEGINNING + ', "score": [1.0, NaN]}',
        BEGINNING + ', "score": null}',
        BEGINNING + ', "failure": 3}',
    ],
)
def test_a_line_with_something_else_is_named(line, tmp_path):
    path = tmp_path / "trainings.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(
        CheckpointError, match="contains a line that is not a training run of this search"
    ) as caught:
        tune(stand_in, LISTS, score=score, storage=path)
    assert line in str(caught.value) and path.read_text() == line + "\n"


def test_a_folder_that_is_missing_is_found_out_before_the_first_training(tmp_path):
    seen = Recorder()
    with pytest.raises(FileNotFoundError):
        tune(seen, LISTS, score=score, storage=tmp_path / "missing" / "trainings.jsonl")
    assert seen.calls == []


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


# Optuna ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def optuna():
    return pytest.importorskip("optuna")


def test_a_sampler_proposes_settings_jointly(optuna):
    seen = Recorder()
    with pytest.warns(DviWarning, match="the best lr, 0.03, is the smallest or largest .* Try 0.1 too"):
        tuned = tune(
            seen, LISTS, score=score, sampler=optuna.samplers.RandomSampler(seed=0), max_trainings=20
        )
    tried = {tuple(one.values()) for one in seen.calls}
    assert len(tried) == len(seen.calls) == tuned.table.rows == 6  # all of them, and none twice
    assert tuned.settings == {"lr": 0.03, "act": "relu"}


def test_a_sampler_writes_no_lines_of_its_own(optuna, capfd):
    optuna.logging.enable_default_handler()
    before = optuna.logging.get_verbosity()
    tune(
        stand_in,
        {"lr": (0.01, 0.1, 1)},
        score=distance(lr=0.1),
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    assert capfd.readouterr().err == "" and optuna.logging.get_verbosity() == before


def test_a_grid_ends_by_itself_and_failures_are_rows(optuna):
    seen = Interrupted(None)
    sampler = optuna.samplers.GridSampler({name: list(values) for name, values in LISTS.items()})
    with pytest.warns(DviWarning, match="smallest or largest"):
        tuned = tune(seen, LISTS, score=score, sampler=sampler, max_trainings=50)
    assert len(seen.calls) == tuned.table.rows == 6 and len(tuned.failures) == 2


def test_lists_may_need_more_trainings_than_a_sampler_has(optuna):
    lists = {"lr": [float(k) for k in range(1, 50)], "temperature": [float(k) for k in range(1, 50)]}
    seen = Recorder()
    tuned = tune(
        seen,
        lists,
        score=distance(lr=20, temperature=20),
        sampler=optuna.samplers.TPESampler(seed=0),
        max_trainings=5,
    )
    assert len(seen.calls) == tuned.table.rows == 5


@pytest.mark.filterwarnings("ignore::pyro_dvi.errors.DviWarning")  # the best is at an end
@pytest.mark.parametrize("seed", [0, 1])
def test_a_sampler_goes_on_from_a_file(seed, optuna, tmp_path):
    path, first, second = tmp_path / "trainings.jsonl", Recorder(), Recorder()
    tune(first, LISTS, score=score, storage=path, sampler=optuna.samplers.TPESampler(seed=0), max_trainings=3)
    sampler = optuna.samplers.TPESampler(seed=seed)
    tuned = tune(second, LISTS, score=score, storage=path, sampler=sampler, max_trainings=5)
    calls = first.calls + [one for one in second.calls if one != tuned.settings or one not in first.calls]
    assert len({tuple(one.values()) for one in calls}) == len(calls) == tuned.table.rows <= 5
    assert tuned.table.rows > len(first.calls)


def test_something_else_than_a_sampler(optuna):
    with pytest.raises(ArgumentError, match="sampler must be an object such as optuna.samplers.TPESampler"):
        tune(stand_in, LISTS, score=score, sampler="TPE")


def test_optuna_is_loaded_only_for_a_sampler(monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)  # importing it would fail
    assert tune(stand_in, {"lr": (1, 2, 3)}, score=distance(lr=2)).settings == {"lr": 2}
