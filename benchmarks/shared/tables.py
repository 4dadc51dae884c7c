# SPDX-License-Identifier: Apache-2.0
"""Tables in Markdown, spreads, and paired differences."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import mean, stdev

from scipy.stats import t

from benchmarks.shared.benchmark import Row

__all__ = ["Paired", "mean_sd", "paired", "provenance", "table"]


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown; None is an empty cell."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    lines = [list(header), ["---"] * len(header), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def mean_sd(values: Sequence[float], digits: int = 3) -> str:
    """Return ``mean ± standard deviation``, or the one value that there is."""
    if len(values) == 1:
        return f"{values[0]:.{digits}f}"
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


@dataclass(frozen=True)
class Paired:
    """The mean of paired differences and its confidence interval.

    Attributes:
        mean: of the differences.
        error: half the 95 % confidence interval of that mean by Student's t; 0 of a single pair.
        count: of pairs.
    """

    mean: float
    error: float
    count: int

    @property
    def is_clear(self) -> bool:
        """Whether the interval, of three pairs or more, leaves out zero."""
        return self.count > 2 and abs(self.mean) > self.error

    def __str__(self) -> str:
        text = f"{self.mean:+.3f}" if self.count < 2 else f"{self.mean:+.3f} ± {self.error:.3f}"
        return f"**{text}**" if self.is_clear else text


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Paired:
    """Return the differences ``ours - theirs`` of runs with the same seed or fold; bold where clear."""
    differences = [a - b for a, b in zip(ours, theirs, strict=True)]
    count = len(differences)
    error = stdev(differences) / sqrt(count) * float(t.ppf(0.975, count - 1)) if count > 1 else 0.0
    return Paired(mean(differences), error, count)


def provenance(name: str, rows: Sequence[Row]) -> str:
    """Return where the lines of a benchmark come from: command, versions of torch, machines, seeds, cost and notes."""
    parts = [f"Written by `python -m benchmarks run {name}`"]
    for prefix, key in (("torch ", "torch"), ("", "machine")):
        values = sorted({row[key] for row in rows if key in row})
        parts.append(prefix + " and ".join(values) if values else "")
    seeds = sorted({row["seed"] for row in rows if "seed" in row})
    if seeds:
        parts.append(f"seeds {', '.join(map(str, seeds))}")
    minutes = sum(row.get("cpu_seconds", 0.0) for row in rows) / 60
    if minutes >= 1 and all("cpu_seconds" in row for row in rows):
        parts.append(f"{minutes:.0f} minutes of processor time")
    notes = sorted({row["note"] for row in rows if "note" in row})
    return " ".join(["; ".join(part for part in parts if part) + ".", *notes])
