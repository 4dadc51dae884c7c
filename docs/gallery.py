# SPDX-License-Identifier: Apache-2.0
"""How the tutorials become pages: their order, and how warnings are printed."""

import warnings
from pathlib import Path
from textwrap import fill
from typing import Any

ORDER = [
    "regression",
    "image_classification",
    "pretrained_network",
    "out_of_distribution",
    "hierarchical_model",
    "posterior_analysis",
    "saving_and_serving",
]


def reading_order(script: str) -> int:
    """Return the place of a script; one that is not listed comes last."""
    name = Path(script).stem
    return ORDER.index(name) if name in ORDER else len(ORDER)


def short_warnings(conf: Any, script: str) -> None:
    """Print warnings of a script without the path on the machine that builds the page."""

    def text(message: Any, category: type, *_: Any, **__: Any) -> str:
        return fill(f"{category.__name__}: {message}", 88) + "\n"

    warnings.formatwarning = text
