# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows, runs: the code blocks of each page, and the examples in docstrings."""

import doctest
import importlib
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import pyro_dvi
from pyro_dvi.curvature.per_example import example_rules
from tests.docs.shown_code import ROOT, python_blocks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# A page whose first block goes on where another page ended says so there: "<!-- continues laplace.md -->".
CONTINUES = re.compile(r"^<!-- continues (\S+) -->$", re.MULTILINE)
MODULES = ["pyro_dvi", *(m.name for m in pkgutil.walk_packages(pyro_dvi.__path__, "pyro_dvi."))]
MODULES = [name for name in MODULES if not name.endswith("_kernel")]  # needs Triton
LONG = {"tune", "train_ensemble", "TaylorELBO", "NaturalGradientELBO", "moment_comparison"}


def docstring_examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name), name)]
    return [test for test in found if test.examples]


@pytest.fixture(autouse=True)
def _rules_end_with_their_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test asks that every rule for gradients of single examples has a case."""
    monkeypatch.setattr(example_rules, "_RULES", example_rules._RULES.copy())


def continued(page: Path) -> Path | None:
    found = CONTINUES.search(page.read_text())
    return (page.parent / found[1]).resolve() if found else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [p for p in PAGES if python_blocks(p) and not continued(p)],
    ids=lambda p: str(p.relative_to(ROOT)),
)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the pages that continue it, each of which begins where this one ends."""
    monkeypatch.chdir(tmp_path)  # a page may write files
    names = {"__name__": "__page__"}
    exec(compile(python_blocks(page), str(page), "exec"), names)
    for further in (p for p in PAGES if continued(p) == page):
        exec(compile(python_blocks(further), str(further), "exec"), dict(names))


def test_pages_continue_pages_that_run():
    targets = {continued(page) for page in PAGES} - {None}
    assert targets <= {page for page in PAGES if not continued(page)} and len(targets) >= 1


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(one, marks=pytest.mark.slow if one.name.rpartition(".")[2] in LONG else (), id=one.name)
        for one in docstring_examples()
    ],
)
def test_docstring_example(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    example.globs.setdefault("torch", torch)  # every reader has imported it
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, _ = runner.run(example)
    assert failed == 0, "the captured output shows what was expected and what came"
