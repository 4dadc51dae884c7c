# SPDX-License-Identifier: Apache-2.0
"""Every number of the first pages has a source, and is what the committed lines give."""

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from tests.docs.shown_code import ROOT
from tests.docs.sources import PAGES, Source, problems, read_sources

ENTRIES = read_sources()
PAGE = """\
The NLL of A is 0.25 ± 0.07, a difference of −0.10 ± 1.27 from [B's](b.md#2.0), in two seeds. Steps take 0.6 to 1.2
milliseconds, 3.6 times as long as `1.0` on CIFAR-10. A has the lower NLL with one of two seeds, and methods have 0.25
to 0.35.

```python
print(1.23)  # 1.23
```

```{figure} figure.png
Of 1,200 steps.
```
"""


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_the_page_is_that_of_its_source(page):
    assert problems(page, (ROOT / page).read_text(), ENTRIES) == []


def test_entries_name_pages_benchmarks_and_tests_that_there_are(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["benchmarks", "list"])
    assert main() == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert {entry.benchmark for entry in ENTRIES if entry.benchmark} <= listed
    assert [entry for entry in ENTRIES if not any(entry.is_on(page) for page in PAGES)] == []
    for path, _, name in {entry.run_by.partition("::") for entry in ENTRIES if entry.run_by}:
        assert f"def {name}(" in (ROOT / path).read_text()


def problems_of(page: str, folder: Path, first: float = 0.2) -> list[str]:
    """What is wrong with a page, given the sources of PAGE and the lines of two methods and seeds."""
    lines = [
        {"method": method, "seed": seed, "last": {"nll": nll}, "steps": [{"step": "plain", "ms": 3 * nll}]}
        for method, seed, nll in (("A", 0, first), ("A", 1, 0.3), ("B", 0, 0.4), ("B", 1, 0.3))
    ]
    (folder / "made_up.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    a: dict = {
        "page": "page",
        "benchmark": "made_up",
        "rows": {"method": "A"},
        "column": ["last", "nll"],
    }
    methods: dict = {"rows": {"method": ["A", "B"]}}
    steps: dict = a | methods | {"column": ["steps", {"step": "plain"}, "ms"]}
    difference: dict = {"less": {"rows": {"method": "B"}}, "by": "seed", "summary": ["mean", "error"]}
    sources = [
        Source(words="NLL of A is 0.25 ± 0.07", **a, summary=["mean", "sd"]),
        Source(words="a difference of −0.10 ± 1.27", **a, **difference),
        Source(words="in two seeds", **a, summary="count"),
        Source(words="Steps take 0.6 to 1.2 milliseconds", **steps, summary=["min", "max"]),
        Source(words="3.6 times as long", **steps, over={"rows": {"method": "A"}, "column": ["last", "nll"]}),
        Source(
            words="lower NLL with one of two seeds", **a, **difference | {"summary": ["negative", "count"]}
        ),
        Source(words="methods have 0.25 to 0.35", **a | methods, each="method", summary=["min", "max"]),
        Source(page="page", words="# 1.23", run_by="a test"),
        Source(page="page", words="Of 1,200 steps", reason="a setting"),
    ]
    return problems("page", page, sources, folder)


def test_a_page_with_its_sources_has_no_problems(tmp_path):
    assert problems_of(PAGE, tmp_path) == []


@pytest.mark.parametrize(
    "number", ["0.25", "0.07", "0.10", "1.27", "two", "0.6", "1.2\n", "3.6", "0.35", "# 1.23", "1,200"]
)
def test_a_changed_number_on_the_page_is_found(number, tmp_path):
    changed = {"two": "three", "1.2\n": "1.3\n"}.get(number, number[:-1] + "9")
    said = problems_of(PAGE.replace(number, changed, 1), tmp_path)
    assert said and "change page or docs/sources.toml" in said[0]


def test_a_changed_line_is_found(tmp_path):
    said = problems_of(PAGE, tmp_path, first=0.22)
    assert "page, 'NLL of A is 0.25 ± 0.07': 0.25 stands where the lines of made_up give 0.26 (0.26)" in said


@pytest.mark.parametrize(
    "new", ["an ECE of 0.031", "40 % better", "on −3 counts", "of .5", "twelve trainings", "| 0 |"]
)
def test_a_new_number_is_found(new, tmp_path):
    (said,) = problems_of(f"{PAGE}\nIt has {new}.", tmp_path)
    assert "without a source" in said and "add a [[number]] to docs/sources.toml" in said


@pytest.mark.parametrize(
    "harmless", ["Python 3.11", "`x=0.5`", "[this](page.md#0.5)", "ResNet-18", "<!-- 0.5 -->"]
)
def test_code_links_names_and_versions_need_no_source(harmless, tmp_path):
    assert problems_of(f"{PAGE}\nIt has {harmless}.", tmp_path) == []


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"rows": {"method": ["A", "C"]}}, "no method is 'C'"),
        ({"column": ["steps", {"step": "fast"}, "ms"]}, "no step is 'fast'"),
        ({"column": "nll"}, "KeyError: 'nll'"),
        ({"summary": "mode"}, "summary mode is none of mean, median"),
        ({"summary": ["min", "max"]}, "1 numbers in these words, but 2 in summary"),
        ({"less": {"rows": {"seed": 1}}, "by": "seed"}, "do not pair by seed"),
        ({"less": {"rows": {"method": "B", "seed": 1}}, "by": "method"}, "do not pair by method"),
        ({"benchmark": "", "run_by": "a test"}, "run_by is for code blocks"),
    ],
)
def test_an_entry_that_is_wrong_is_found(wrong, says, tmp_path):
    problems_of(PAGE, tmp_path)  # writes the lines
    entry: dict = {"page": "page", "words": "is 0.25", "benchmark": "made_up", "column": ["last", "nll"]}
    source = Source(**entry | {"rows": {"method": "A"}} | wrong)
    assert says in " ".join(problems("page", "A is 0.25.", [source], tmp_path))


def test_an_entry_has_one_source():
    with pytest.raises(ValueError, match="one of benchmark, run_by and reason"):
        Source(page="page", words="is 0.25", benchmark="made_up", reason="a setting")
