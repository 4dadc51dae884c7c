# SPDX-License-Identifier: Apache-2.0
"""Reports, as text and as a notebook shows them."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any


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
    """What a cell of a notebook shows: tables as HTML and the rest as text, by default what ``print`` shows."""

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
    """Paragraphs and tables, the ``_shown`` of what was found; ``print`` has an empty line between them."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self._shown()))
