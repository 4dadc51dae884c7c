# SPDX-License-Identifier: Apache-2.0
"""Reports that are shown as text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Columns:
    """Text cells in aligned columns, with names aligned to the left and numbers to the right.

    Args:
        titles: titles of the columns.
        rows: cells, row by row.
        names: number of leading columns that are names.

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


class InNotebook:
    """Base class of objects that a notebook shows as the text of ``print``."""

    def _repr_html_(self) -> str:
        return f'<pre style="white-space: pre-wrap">{escape(str(self))}</pre>'


@dataclass(frozen=True)
class Table(InNotebook):
    """A report with one table: a heading, rows of named values, and a note below the table.

    ``print(report)`` shows the table, ``report["name"]`` is a column, and ``report.to_dataframe()`` contains all
    columns.

    Attributes:
        heading: text above the table.
        rows: one mapping from column to value for each line, all with the same columns.
        formats: the columns to print, with their formats; the first column is the name of the row. Names and texts have
            an empty format; leading names are aligned to the left. Underscores in column names are printed as spaces,
            and missing numbers (NaN) as dashes.
        note: text below the table.

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
    note: str = ""

    def __getitem__(self, column: str) -> list[Any]:
        return [row[column] for row in self.rows]

    def to_dataframe(self) -> "pandas.DataFrame":
        """Return all columns as a ``pandas.DataFrame``, indexed by the first column."""
        import pandas

        return pandas.DataFrame(list(self.rows)).set_index(next(iter(self.formats)))

    def __str__(self) -> str:
        titles = [name.replace("_", " ") for name in self.formats]
        cells = [
            [
                "-" if row[name] != row[name] else format(row[name], form)
                for name, form in self.formats.items()
            ]
            for row in self.rows
        ]
        names = next(k for k, form in enumerate(self.formats.values()) if form)
        parts = (self.heading, str(Columns(titles, cells, names)), self.note)
        return "\n\n".join(filter(None, parts))
