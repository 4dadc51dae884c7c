# SPDX-License-Identifier: Apache-2.0
"""The API reference lists what ``import pyro_dvi`` offers, and files that the pages name exist."""

import inspect
import re
from pathlib import Path

import pyro_dvi

ROOT = Path(__file__).parents[2]
PACKAGE = Path(pyro_dvi.__file__).parent  # which may be installed elsewhere
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
TUTORIALS = [*(ROOT / "examples" / "tutorials").glob("*.py")]
NAMED = re.compile(r"\b(?:pyro_dvi|tests|examples|benchmarks|docs)/[a-z][\w./]*\w")


def test_every_public_name_has_one_entry_in_the_api_pages():
    """Under its shortest path: a name of ``pyro_dvi`` itself has no second entry under its chapter."""
    chapters = [name for name, value in vars(pyro_dvi).items() if inspect.ismodule(value) and value.__doc__]
    chapters = [*{getattr(pyro_dvi, name).__name__: name for name in [*chapters, "plots"]}.values()]
    expected = {name for name in pyro_dvi.__all__ if name not in chapters}
    for chapter in chapters:
        module = getattr(pyro_dvi, chapter)
        own = [
            name
            for name, value in vars(module).items()
            if inspect.isclass(value) and value.__module__ == module.__name__
        ]
        for name in getattr(module, "__all__", own):
            value = getattr(module, name)
            if value is not getattr(pyro_dvi, name, None) and not inspect.ismodule(value):
                expected.add(f"{chapter}.{name}")
    pages = (ROOT / "docs" / "reference" / "api").glob("*.rst")
    listed = [page.read_text().partition(".. entries::")[2].split() for page in pages]
    entries = [name for names in listed for name in names]
    assert sorted(entries) == sorted(set(entries))
    assert {
        name for name in entries if not name.startswith("tuning.")
    } == expected  # not an attribute of pyro_dvi


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


def test_code_in_pages_and_tutorials_fits_their_column():
    """Of 90 characters; ``ruff format`` breaks longer statements, but no comments and strings."""
    blocks = [
        (page.name, block)
        for page in (ROOT / "docs").rglob("*.md")
        for block in re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    ]
    for tutorial in TUTORIALS:
        code = tutorial.read_text().split('"""', 2)[2]  # what follows the title
        blocks.append((tutorial.name, re.sub(r"^#.*", "", code, flags=re.MULTILINE)))
    lines = [(name, line) for name, block in blocks for line in block.splitlines()]
    assert len(lines) > 500
    assert [line for line in lines if len(line[1]) > 90] == []


def test_tutorials_link_to_pages_by_their_documents():
    """Sphinx checks ``:doc:`` and copies the address of a raw link, which then misses its ``.html``."""
    raw = {p.name: re.findall(r"<(?!https?:)[\w./]*/[\w./]+>`_", p.read_text()) for p in TUTORIALS}
    assert not any(raw.values()), raw
