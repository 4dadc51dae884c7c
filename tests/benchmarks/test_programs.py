# SPDX-License-Identifier: Apache-2.0
"""The shortest programs run, and the page shows their calls and lines."""

import importlib.util
from pathlib import Path

import pytest

from benchmarks.programs import count

PAGE = Path(__file__).parents[2] / "docs" / "how_to" / "one_call.md"
PACKAGES = {"laplace_torch": "laplace", "torch_ivon": "ivon", "tyxe": "tyxe", "numpyro": "numpyro"}
OURS, PEERS = (sorted((count.FOLDER / folder).glob("*.py")) for folder in ("ours", "peers"))


def test_calls_and_lines_are_counted(tmp_path):
    program = tmp_path / "program.py"
    program.write_text('"""A program."""\n\nimport math\n\n\nx = [\n    math.sin(abs(1)),\n]\nx.sort()\n')
    assert count.count(program) == (3, 4)


def test_the_page_shows_the_table():
    assert count.table() in PAGE.read_text()


def test_every_program_is_in_the_table():
    shown = {f"{x}_{other}" for _, other in count.ROWS.values() for x in count.LIBRARIES}
    assert {path.stem for path in OURS} == {own for own, _ in count.ROWS.values()}
    assert {path.stem for path in PEERS} <= shown


@pytest.mark.every(4)
@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_ours_run(path, monkeypatch):
    monkeypatch.setenv("EPOCHS", "5")
    assert 0 < count.run(path) < 2


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", PEERS, ids=lambda path: path.stem)
def test_those_of_other_libraries_run_where_installed(path, monkeypatch):
    package = next(
        (name for prefix, name in PACKAGES.items() if path.stem.startswith(prefix)), "torch_uncertainty"
    )
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    monkeypatch.setenv("EPOCHS", "5")
    assert 0 < count.run(path) < 2
