# SPDX-License-Identifier: Apache-2.0
"""The API reference lists what ``import pyro_dvi`` offers, and files that the pages name exist."""

import re
from pathlib import Path

import pyro_dvi

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pyro_dvi.__file__).parent  # which may be installed elsewhere
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
NAMED = re.compile(r"\b(?:pyro_dvi|tests|examples|benchmarks|docs)/[a-z][\w./]*\w")


def test_every_public_name_stands_in_the_overview():
    overview = (ROOT / "docs" / "reference" / "api.md").read_text().split("\n## ")[0]
    assert set(re.findall(r"``(\w+)``", overview)) == set(pyro_dvi.__all__)


def test_files_that_the_pages_name_exist():
    """But for the changelog, which also names what is gone."""
    named = {
        (page.name, path)
        for page in PAGES
        if page.name != "CHANGELOG.md"
        for path in NAMED.findall(page.read_text())
    }
    roots = {PACKAGE.parent, ROOT, ROOT / "docs"}  # links between pages are relative
    assert [name for name in sorted(named) if not any(any(root.glob(f"{name[1]}*")) for root in roots)] == []


def test_tests_that_the_papers_page_names_exist():
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "docs" / "benchmarks" / "papers.md").read_text()))
    written = {
        name
        for path in (ROOT / "tests").rglob("test_*.py")
        for name in re.findall(r"def (test_\w+)\(", path.read_text())
    }
    assert len(named) > 20
    assert named - written == set()
