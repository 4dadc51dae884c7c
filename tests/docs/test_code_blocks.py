# SPDX-License-Identifier: Apache-2.0
"""What the documentation shows, runs: the code blocks of each page, and the examples in docstrings."""

import doctest
import importlib
import pkgutil
from pathlib import Path

import pytest
import torch

import pyro_dvi
from pyro_dvi.curvature.per_example import rules
from tests.docs.shown_code import ROOT, python_blocks

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = ["pyro_dvi", *(m.name for m in pkgutil.walk_packages(pyro_dvi.__path__, "pyro_dvi."))]


def docstring_examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    found = [test for name in MODULES for test in finder.find(importlib.import_module(name), name)]
    return [test for test in found if test.examples]


@pytest.fixture(autouse=True)
def _rules_end_with_their_example(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test asks that every rule for gradients of single examples has a case."""
    monkeypatch.setattr(rules, "_RULES", rules._RULES.copy())


@pytest.mark.parametrize(
    "page", [p for p in PAGES if python_blocks(p)], ids=lambda p: str(p.relative_to(ROOT))
)
def test_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # a page may write files
    exec(compile(python_blocks(page), str(page), "exec"), {"__name__": "__page__"})


@pytest.mark.parametrize("example", docstring_examples(), ids=lambda example: example.name)
def test_docstring_example(example: doctest.DocTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    example.globs.setdefault("torch", torch)  # every reader has imported it
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, _ = runner.run(example)
    assert failed == 0, "the captured output shows what was expected and what came"
