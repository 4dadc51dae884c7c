# SPDX-License-Identifier: Apache-2.0
"""A benchmark of the frame itself: seconds in which nothing is measured."""

from pathlib import Path

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Three values, of which one fails, and the best of the others again."""
    runs: list[Settings] = [{"value": value, "stage": 1} for value in (1, 2, 3)]
    first = [row for row in rows if row["stage"] == 1]
    if len(first) == 2:
        runs.append({"value": max(row["value"] for row in first), "stage": 2})
    return runs


def run(settings: Settings, data_dir: str | None) -> Row:
    """Square a value."""
    if settings["value"] == 3:
        raise ValueError("three is refused")
    return {"square": settings["value"] ** 2, "data_dir": data_dir}


def report(rows: list[Row], folder: Path) -> str:
    """All squares."""
    return ", ".join(str(row["square"]) for row in rows) + "\n\n"


BENCHMARK = Benchmark("made_up", "What are squares?", plan, run, report)
