# SPDX-License-Identifier: Apache-2.0
"""Schedules start, rise and end where they say."""

import dataclasses
import pickle

import pytest

from pyro_dvi.errors import ArgumentError
from pyro_dvi.objectives.schedules import CosineWarmup, LinearWarmup, Staged

SCHEDULES = [
    LinearWarmup(10, start=0.2, end=0.8),
    CosineWarmup(10, start=0.2, end=0.8),
    Staged([4, 10], [0.2, 0.5, 0.8]),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_schedule_starts_ends_and_never_turns_back(schedule):
    weights = [schedule(step) for step in range(25)]
    assert weights[0] == 0.2
    assert set(weights[10:]) == {0.8}
    assert weights == sorted(weights)
    assert all(type(weight) is float for weight in weights)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: type(s).__name__)
def test_schedule_is_a_value(schedule):
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert hash(schedule) == hash(dataclasses.replace(schedule))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.steps = 3


def test_cosine_is_symmetric_about_its_middle():
    ramp = CosineWarmup(8)
    assert ramp(4) == pytest.approx(0.5)
    assert ramp(2) + ramp(6) == pytest.approx(1.0)
    assert ramp(1) < LinearWarmup(8)(1)


def test_warmup_may_go_down():
    assert [LinearWarmup(2, start=1.0, end=0.0)(step) for step in range(3)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LinearWarmup(0), "steps must be a positive whole number"),
        (lambda: LinearWarmup(2.5), "steps must be a positive whole number"),
        (lambda: CosineWarmup(True), "steps must be a positive whole number"),
        (lambda: CosineWarmup(5, start=-0.1), "start must be a finite number >= 0"),
        (lambda: LinearWarmup(5, end=float("nan")), "finite number"),
        (lambda: LinearWarmup(5, end="1"), "finite number"),
        (lambda: Staged([5, 5], [0.0, 0.5, 1.0]), "increasing boundaries must be"),
        (lambda: Staged([0], [0.0, 1.0]), "increasing boundaries must be"),
        (lambda: Staged([5], [1.0]), "separate 2 values"),
        (lambda: Staged([5], [1.0, -1.0]), "values must be a finite number >= 0"),
    ],
)
def test_bad_schedules(build, message):
    with pytest.raises(ArgumentError, match=message):
        build()
