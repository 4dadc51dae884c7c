# SPDX-License-Identifier: Apache-2.0
"""How the tutorials become pages: their order, and the command line of those that have one."""

import tempfile
from pathlib import Path
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


def scratch(gallery_conf: dict[str, Any], script_vars: dict[str, Any]) -> list[str]:
    """Let a script write its files into a folder that nobody looks at."""
    return ["--output-dir", tempfile.mkdtemp()]
