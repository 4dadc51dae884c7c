# SPDX-License-Identifier: Apache-2.0
"""The list of all benchmarks, with the page of the documentation that shows each."""

import os
import re
from pathlib import Path

from benchmarks.shared.benchmark import RESULTS, Benchmark
from benchmarks.shared.tables import table

__all__ = ["index", "write_index"]

DOCS = RESULTS.parents[1] / "docs"
INCLUDED = re.compile(r"\{include\} \S*benchmarks/results/(\w+)\.md")


def index(benchmarks: list[Benchmark]) -> str:
    """Return a table of names, questions and pages, whose links are those of a page in ``docs/benchmarks``."""
    shown = {name: path for path in sorted(DOCS.rglob("*.md")) for name in INCLUDED.findall(path.read_text())}
    lines = []
    for benchmark in benchmarks:
        page = shown.get(benchmark.name)
        name = f"`{benchmark.name}`"
        link = f"[{name}]({os.path.relpath(page, DOCS / 'benchmarks')})" if page else name
        lines.append([link, benchmark.question])
    return table(["benchmark", "question"], lines)


def write_index(benchmarks: list[Benchmark], folder: Path = RESULTS) -> None:
    """Write the table for docs/benchmarks/index.md."""
    (folder / "index.md").write_text(index(benchmarks))
