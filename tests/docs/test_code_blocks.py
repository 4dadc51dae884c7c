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
from pyro_dvi.curvature.per_example import rules

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = ["pyro_dvi", *(m.name for m in pkgutil.walk_packages(pyro_dvi.__path__, "pyro_dvi."))]

# A block that is not meant to run (another library's code, a fragment) says so on the line before its fence.
NOT_RUN = "<!-- not run"
# One that trains for long says there what the test writes in place of its number: "<!-- tested with epochs=2 -->".
TESTED_WITH = re.compile(r"<!-- tested with (\w+)=(\d+) -->")


def python_blocks(page: Path) -> str:
    """The page's Python blocks as one program, each at its own line number so that tracebacks point home."""
    text = page.read_text()
    program: list[str] = []
    for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        line_before = text[: block.start()].rstrip("\n").rpartition("\n")[2]
        if line_before.startswith(NOT_RUN):
            continue
        first_line = text[: block.start(1)].count("\n")
        program += [""] * (first_line - len(program))
        code = block[1]
        if shorter := TESTED_WITH.fullmatch(line_before):
            code = re.sub(rf"\b{shorter[1]}=\d+", f"{shorter[1]}={shorter[2]}", code)
        program += code.splitlines()
    return "\n".join(program)


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
