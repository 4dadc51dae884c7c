# SPDX-License-Identifier: Apache-2.0
"""The progress bar."""

from collections.abc import Iterable
from typing import Any

from tqdm.auto import tqdm

DELAY = 1.0  # seconds before a bar appears, so that short work shows none


def progress_bar(
    show: bool,
    total: int | None = None,
    *,
    unit: str = "step",
    label: str | None = None,
    of: Iterable[Any] | None = None,
) -> Any:
    """Return a progress bar, shown in a terminal or notebook for work that takes longer than ``DELAY``."""
    hidden = None if show else True  # with None, tqdm tests for a terminal
    return tqdm(of, label, total, unit=unit, disable=hidden, dynamic_ncols=True, delay=DELAY)
