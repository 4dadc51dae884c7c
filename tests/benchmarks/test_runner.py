# SPDX-License-Identifier: Apache-2.0
"""The runner: what is there is not repeated, what fails is kept apart, and later runs follow from earlier ones."""

import pytest

from benchmarks.shared.runner import forget_rows, read_rows, run_all, write_report
from tests.benchmarks.made_up import BENCHMARK

pytestmark = pytest.mark.slow  # runs are processes of their own

MODULE = "tests.benchmarks.made_up"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with the lines of one call, in a process of its own."""
    folder = tmp_path_factory.mktemp("results")
    failures = run_all(BENCHMARK, MODULE, "data", "small", 1, lambda settings: True, folder)
    return folder, failures


def test_later_runs_follow_from_earlier_ones(results):
    rows = read_rows("made_up", results[0])
    assert sorted((row["stage"], row["value"], row["square"]) for row in rows) == [
        (1, 1, 1),
        (1, 2, 4),
        (2, 2, 4),
    ]
    assert all(
        row["data_dir"] == "data" and {"torch", "machine", "cpu_seconds"} <= row.keys() for row in rows
    )


def test_a_run_that_fails_is_told_and_leaves_no_line(results):
    (failure,) = results[1]
    assert "'value': 3" in failure
    assert "ValueError: three is refused" in failure


def test_what_is_there_is_not_run_again(results, monkeypatch):
    def never(*args):
        raise AssertionError("was run again")

    folder, before = results[0], read_rows("made_up", results[0])
    monkeypatch.setattr("benchmarks.shared.runner._run", never)
    assert run_all(BENCHMARK, MODULE, None, "small", 1, lambda s: s["value"] != 3, folder) == []
    assert read_rows("made_up", folder) == before


def test_lines_are_forgotten_on_request(results, tmp_path):
    (tmp_path / "made_up.jsonl").write_text((results[0] / "made_up.jsonl").read_text())
    forget_rows("made_up", lambda row: row["value"] == 2, tmp_path)
    assert [row["value"] for row in read_rows("made_up", tmp_path)] == [1]


def test_the_report_is_written_beside_the_lines(results, tmp_path):
    assert write_report(BENCHMARK, results[0])
    assert (results[0] / "made_up.md").read_text() == "1, 4, 4\n"
    assert not write_report(BENCHMARK, tmp_path)
