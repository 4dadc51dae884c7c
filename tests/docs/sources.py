# SPDX-License-Identifier: Apache-2.0
"""Where the numbers of the first pages come from: ``docs/sources.toml``, compared with the pages and the lines."""

import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

from benchmarks.shared.benchmark import RESULTS, Row
from benchmarks.shared.runner import read_rows
from benchmarks.shared.tables import paired
from tests.docs.shown_code import ROOT

SOURCES = ROOT / "docs" / "sources.toml"
PAGES = ("README.md", "docs/which_method.md", "docs/index.md")  # every number of these has a source

SUMMARIES: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": mean,
    "median": median,
    "min": min,
    "max": max,
    "sd": stdev,
    "error": lambda values: paired(values, [0.0] * len(values)).error,  # half the 95 % interval of the mean
    "count": len,
    "negative": lambda values: sum(value < 0 for value in values),
}

# Not read as prose: code, comments, targets of links, versions. What directives such as figures say is prose.
NOT_PROSE = re.compile(
    r"^```\w+\n.*?^```$|<!--.*?-->|(?<!`)`(?!`)[^`]+`|\]\([^)]*\)|https?://\S+|\bPython \d+\.\d+",
    re.MULTILINE | re.DOTALL,
)
WORDS = "one two three four five six seven eight nine ten eleven twelve".split()
UNITS = "times|seeds|tasks|trainings|gradients|steps|seconds|minutes|hours|per cent"
# A numeral, but not that of a name such as CIFAR-10; a word before a unit, or in "four of six".
NUMBER = re.compile(
    r"(?<![\w.])(?<![A-Za-z]-)[-−+]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)"
    rf"|\b(?:{'|'.join(WORDS[1:])})(?=\s+(?:{UNITS})\b)"
    rf"|\b(?:{'|'.join(WORDS)})(?=\s+of\s+(?:the\s+)?(?:\d|(?:{'|'.join(WORDS)})\b))",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """An entry of ``docs/sources.toml``, where its fields are explained."""

    page: str | list[str]
    words: str
    benchmark: str = ""
    rows: Row = field(default_factory=dict)
    column: str | list[Any] = ""
    plus: str | list[Any] = ""
    over: Row = field(default_factory=dict)
    less: Row = field(default_factory=dict)
    by: str | list[str] = field(default_factory=list)
    each: str | list[str] = field(default_factory=list)
    unit: float = 1.0
    summary: str | list[str] = "mean"
    run_by: str = ""
    reason: str = ""

    def __post_init__(self):
        if sum(map(bool, (self.benchmark, self.run_by, self.reason))) != 1:
            raise ValueError(f"'{self.words}' needs one of benchmark, run_by and reason")
        if self.over and self.less:
            raise ValueError(f"'{self.words}' has both over and less")

    def is_on(self, page: str) -> bool:
        """Whether the words stand on a page."""
        return page in _listed(self.page)

    def values(self, results: Path = RESULTS) -> list[float]:
        """Return what the lines give, a value for each name in ``summary``."""
        lines = read_rows(self.benchmark, results)
        ours = self._columns(lines, self.rows, self.column)
        if self.plus:
            more = self._columns(lines, self.rows, self.plus)
            ours = [(line, a + b) for (line, a), (_, b) in zip(ours, more, strict=True)]
        names = _listed(self.summary)
        if not (other := self.over or self.less):
            return [self._summary(name, ours) for name in names]
        theirs = self._columns(lines, other.get("rows", self.rows), other.get("column", self.column))
        if not self.by:
            return [self._related(self._summary(name, ours), self._summary(name, theirs)) for name in names]
        by, each = _listed(self.by), _listed(self.each)
        of_key = {_key(line, by): value for line, value in theirs}
        distinct = {_key(line, by + each) for line, _ in ours}
        if (
            {_key(line, by) for line, _ in ours} != set(of_key)
            or len(distinct) < len(ours)
            or len(of_key) < len(theirs)
        ):
            raise ValueError(f"the lines do not pair by {' and '.join(by)}")
        pairs = [(line, self._related(value, of_key[_key(line, by)])) for line, value in ours]
        return [self._summary(name, pairs) for name in names]

    def _columns(self, lines: list[Row], rows: Row, column: str | list[Any]) -> list[tuple[Row, float]]:
        """The numbers of a column in the lines that match."""
        found = [
            (line, float(value) / self.unit)
            for line in _chosen(lines, rows)
            for value in _at(line, _listed(column))
        ]
        if not found:
            raise ValueError(f"{self.benchmark} has no lines")
        return found

    def _related(self, ours: float, theirs: float) -> float:
        return ours / theirs if self.over else ours - theirs

    def _summary(self, name: str, found: list[tuple[Row, float]]) -> float:
        if name not in SUMMARIES:
            raise ValueError(f"summary {name} is none of {', '.join(SUMMARIES)}")
        groups: dict[Any, list[float]] = {}
        for index, (line, value) in enumerate(found):
            groups.setdefault(_key(line, _listed(self.each)) if self.each else index, []).append(value)
        return SUMMARIES[name]([mean(values) for values in groups.values()])


def read_sources(path: Path = SOURCES) -> list[Source]:
    """Return the entries."""
    return [Source(**entry) for entry in tomllib.loads(path.read_text())["number"]]


def problems(page: str, text: str, sources: list[Source], results: Path = RESULTS) -> list[str]:
    """Return what is wrong with the numbers of a page: each message says what to do.

    Args:
        page: its name in the entries.
        text: what the page says.
        sources: all entries.
        results: the folder of the lines.
    """
    prose = NOT_PROSE.sub(lambda found: " " * len(found[0]), text)
    numbers = list(NUMBER.finditer(prose))
    covered, wrong = set(), []
    for source in sources:
        if not source.is_on(page):
            continue
        places = list(re.finditer(r"\s+".join(map(re.escape, source.words.split())), text))
        if len(places) != 1:
            wrong.append(
                f"{page} has '{source.words}' {len(places)} times, not once: change page or docs/sources.toml"
            )
            continue
        start, end = places[0].span()
        inside = [number for number in numbers if start <= number.start() and number.end() <= end]
        covered |= {number.start() for number in inside}
        wrong += [
            f"{page}, '{source.words}': {said}" for said in _wrong(source, inside, prose[start:end], results)
        ]
    for number in numbers:
        if number.start() not in covered:
            around = " ".join(text[max(0, number.start() - 40) : number.end() + 20].split())
            wrong.append(
                f"{page} has the number {number[0]} without a source, in '...{around}...': add a [[number]] to "
                "docs/sources.toml, with the benchmark, rows and column that it comes from, or take it out"
            )
    return wrong


def _wrong(source: Source, inside: list[re.Match[str]], prose: str, results: Path) -> Iterator[str]:
    if source.run_by:
        if prose.strip():
            yield "run_by is for code blocks and their output"
        return
    if not inside:
        yield "there is no number in these words"
    if not source.benchmark:
        return
    try:
        values = source.values(results)
    except (KeyError, TypeError, ValueError) as error:
        yield f"{type(error).__name__}: {error}"
        return
    if len(values) != len(inside):
        yield f"{len(inside)} numbers in these words, but {len(values)} in summary"
        return
    for number, value in zip(inside, values, strict=True):
        digits = len(number[0].partition(".")[2])
        expected = f"{value:.{digits}f}"
        if _read(number[0]) != float(expected):
            yield f"{number[0]} stands where the lines of {source.benchmark} give {expected} ({value:.6g})"


def _read(number: str) -> float:
    if number.lower() in WORDS:
        return WORDS.index(number.lower()) + 1
    return float(number.replace("−", "-").replace(",", ""))


def _key(line: Row, names: list[str]) -> tuple[Any, ...]:
    return tuple(line[name] for name in names)


def _chosen(entries: list[Row], settings: Row) -> list[Row]:
    """The lines, or entries of a list, with these settings; a list means any of its values, all of which occur."""
    wanted = {key: _listed(value) for key, value in settings.items()}
    found = [e for e in entries if all(key in e and e[key] in values for key, values in wanted.items())]
    for key, values in wanted.items():
        if missing := [value for value in values if all(entry[key] != value for entry in found)]:
            raise ValueError(f"nothing has {settings}: no {key} is {' or '.join(map(repr, missing))}")
    return found


def _at(value: Any, path: list[Any]) -> list[Any]:
    """What is at the end of a path of keys; a table in it selects entries of a list."""
    if not path:
        return [value]
    if isinstance(path[0], dict):
        return [found for entry in _chosen(value, path[0]) for found in _at(entry, path[1:])]
    return _at(value[path[0]], path[1:])


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
