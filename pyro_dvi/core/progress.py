# SPDX-License-Identifier: Apache-2.0
"""The progress bar."""

import sys
from collections.abc import Iterable
from typing import Any

from tqdm.std import tqdm

DELAY = 1.0  # seconds before a bar appears, so that short work shows none


def progress_bar(
    show: bool,
    total: int | None = None,
    *,
    unit: str = "step",
    label: str | None = None,
    of: Iterable[Any] | None = None,
) -> Any:
    """Return a progress bar, shown in a terminal or notebook for work that takes longer than ``DELAY``.

    ``disable=None`` lets tqdm test for a terminal, which excludes notebooks. ``tqdm.auto`` would load IPython, and warn
    if ipywidgets is missing.
    """
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    bar: Any = tqdm
    unseen = None
    if shell is not None and "IPKernelApp" in shell.config:
        from tqdm import notebook

        bar = tqdm if getattr(notebook, "IProgress", None) is None else notebook.tqdm
        unseen = False
    return bar(of, label, total, unit=unit, disable=unseen if show else True, dynamic_ncols=True, delay=DELAY)
