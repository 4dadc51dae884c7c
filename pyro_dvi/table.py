# SPDX-License-Identifier: Apache-2.0
"""Reports as text: columns of equal width."""

from collections.abc import Sequence

__all__ = ["text_table"]


def text_table(titles: Sequence[str], rows: Sequence[Sequence[str]], names: int = 1) -> list[str]:
    r"""Align cells to columns, names to the left and numbers to the right.

    Args:
        titles: of the columns.
        rows: cells.
        names: number of first columns that are names.

    Returns:
        Lines: titles, a rule, and one for each row.

    Example:
        >>> print("\n".join(text_table(("site", "n"), [("a", "10"), ("bias", "2")])))
        site   n
        --------
        a     10
        bias   2
    """
    lines = [tuple(titles), *map(tuple, rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(titles))]
    text = [
        "  ".join(
            cell.ljust(width) if k < names else cell.rjust(width)
            for k, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    text.insert(1, "-" * max(map(len, text)))
    return text
