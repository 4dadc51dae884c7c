# SPDX-License-Identifier: Apache-2.0
"""The progress bar."""

from typing import Any

from tqdm.auto import tqdm
from tqdm.notebook import tqdm as notebook_tqdm

__all__ = ["progress_bar"]


def progress_bar(show: bool, total: int | None, *, unit: str = "step") -> Any:
    """Return a bar: shown in a notebook, or where the output is a terminal.

    ``disable=None`` is tqdm's own test for a terminal; its notebook bar would take a notebook for none.
    """
    automatic = False if issubclass(tqdm, notebook_tqdm) else None
    return tqdm(total=total, unit=unit, disable=automatic if show else True, dynamic_ncols=True)
