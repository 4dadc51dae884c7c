# SPDX-License-Identifier: Apache-2.0
"""Schedules start, rise and end where they say."""

import dataclasses
import pickle

import pytest

from pyro_dvi.errors import ArgumentError
from pyro_dvi.objectives.schedules import LinearWarmup

SCHEDULES = [
    LinearWarmup(10, start=0.2, end=0.8),
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


def test_warmup_may_go_down():
    assert [LinearWarmup(2, start=1.0, end=0.0)(step) for step in range(3)] == [1.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: LinearWarmup(0), "steps must be a positive whole number"),
        (lambda: LinearWarmup(2.5), "steps must be a positive whole number"),
        (lambda: LinearWarmup(True), "steps must be a positive whole number"),
    ],
)
def test_bad_schedules(build, message):
    with pytest.raises(ArgumentError, match=message):
        build()
