# SPDX-License-Identifier: Apache-2.0
"""The benchmarks that there are: their plans can be resumed, and their committed reports are those of their lines."""

import itertools
import re

import pytest

from benchmarks.__main__ import main
from benchmarks.shared.benchmark import RESULTS, all_benchmarks
from benchmarks.shared.index import index
from benchmarks.shared.runner import read_rows

FOUND = {name: benchmark for name, (benchmark, _) in all_benchmarks().items()}
WITH_LINES = [name for name in FOUND if (RESULTS / f"{name}.jsonl").exists()]


def test_the_entry_lists_all_benchmarks(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks", "list"])
    assert main() == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(FOUND)
    assert len(FOUND) >= 9


@pytest.mark.parametrize("name", FOUND)
def test_settings_of_a_plan_are_flat_and_differ(name):
    for rows, budget in itertools.product(([], read_rows(name)), ("small", "gpu")):
        plan = FOUND[name].plan(rows, budget)
        values = [value for settings in plan for value in settings.values()]
        assert all(isinstance(value, str | int | float | bool | None) for value in values)
        assert len({tuple(sorted(settings.items(), key=str)) for settings in plan}) == len(plan) > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", WITH_LINES)
def test_the_committed_report_is_that_of_the_lines(name, tmp_path):
    report = FOUND[name].report(read_rows(name), tmp_path)
    assert (RESULTS / f"{name}.md").read_text() == report.rstrip("\n") + "\n"
    figures = re.findall(r"!\[[^]]*\]\(([^)]*)\)", report)
    assert all((tmp_path / figure).exists() and (RESULTS / figure).exists() for figure in figures)


def test_the_committed_list_has_all_benchmarks():
    """If not: ``python -m benchmarks report``."""
    assert (RESULTS / "index.md").read_text() == index(list(FOUND.values()))


def test_packages_of_other_authors_are_imported_by_runs_only():
    """So that list, report and these tests need none of them; programs of peers are run alone."""
    of_others = re.compile(r"^(?:import|from) (?:backpack|ivon|jax|laplace|numpyro|suq|vbll)\b", re.MULTILINE)
    files = [path for path in sorted(RESULTS.parent.rglob("*.py")) if path.parent.name != "peers"]
    assert len(files) > 50
    assert [path.name for path in files if of_others.search(path.read_text())] == []
