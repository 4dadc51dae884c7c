# SPDX-License-Identifier: Apache-2.0
"""Reports, as text and as a notebook shows them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Columns:
    """Cells in columns of equal width, names to the left and numbers to the right.

    Args:
        titles: of the columns.
        rows: cells.
        names: number of first columns that are names.

    Example:
        >>> print(Columns(("site", "n"), [("a", "10"), ("bias", "2")]))
        site   n
        --------
        a     10
        bias   2
    """

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1

    def __str__(self) -> str:
        lines = [tuple(self.titles), *map(tuple, self.rows)]
        widths = [max(len(line[k]) for line in lines) for k in range(len(self.titles))]
        text = [
            "  ".join(
                cell.ljust(width) if k < self.names else cell.rjust(width)
                for k, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        text.insert(1, "-" * max(map(len, text)))
        return "\n".join(text)

    def _repr_html_(self) -> str:
        import pandas

        return pandas.DataFrame(list(self.rows), columns=list(self.titles)).to_html(index=False, border=0)


class InNotebook:
    """Objects that a notebook cell shows as tables in HTML and as text, by default the text of ``print``."""

    def _shown(self) -> Sequence[Any]:
        return [str(self)]

    def _repr_html_(self) -> str:
        return "\n".join(
            part._repr_html_()
            if hasattr(part, "_repr_html_")
            else f'<pre style="white-space: pre-wrap">{escape(part)}</pre>'
            for part in self._shown()
        )


class Report(InNotebook):
    """Paragraphs and tables, listed by ``_shown``; ``print`` breaks lines and puts an empty one between parts."""

    def __str__(self) -> str:
        return "\n\n".join(_broken(part) if isinstance(part, str) else str(part) for part in self._shown())


def _broken(text: str) -> str:
    """Return text whose lines have at most 88 characters, where words allow it."""
    return "\n".join(
        fill(line, 88, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()
    )


@dataclass(frozen=True)
class Table(Report):
    """A report of one table: a heading, rows of named values, and the finding in words.

    ``print(report)`` shows it, ``report["name"]`` is a column, and ``report.to_dataframe()`` has all columns.

    Attributes:
        heading: what the table is about.
        rows: one mapping from column to value for each line; they all have the same columns.
        formats: the columns to print, the first of them the name of the row, with the format of each. Names and texts
            have an empty one; those that come first are aligned to the left. An underscore in a name is printed as a
            space, and a missing number (NaN) as a dash.
        verdict: the finding in words.

    Example:
        >>> rows = (
        ...     {"site": "bias", "mean_error": 0.25},
        ...     {"site": "scale", "mean_error": float("nan")},
        ... )
        >>> table = Table("Errors", rows, {"site": "", "mean_error": ".1%"})
        >>> print(table)
        Errors
        <BLANKLINE>
        site   mean error
        -----------------
        bias        25.0%
        scale           -
        >>> table["site"]
        ['bias', 'scale']
    """

    heading: str
    rows: Sequence[Mapping[str, Any]]
    formats: Mapping[str, str]
    verdict: str = ""

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self.rows]

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return all columns as a ``pandas.DataFrame``, indexed by the first."""
        import pandas

        return pandas.DataFrame(list(self.rows)).set_index(next(iter(self.formats)))

    def _shown(self) -> list[Any]:
        titles = [name.replace("_", " ") for name in self.formats]
        cells = [
            [
                "-" if row[name] != row[name] else format(row[name], form)
                for name, form in self.formats.items()
            ]
            for row in self.rows
        ]
        names = next(k for k, form in enumerate(self.formats.values()) if form)
        return [self.heading, Columns(titles, cells, names), *([self.verdict] if self.verdict else [])]
