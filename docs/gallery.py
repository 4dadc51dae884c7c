# SPDX-License-Identifier: Apache-2.0
"""How the tutorials become pages: their order."""

from pathlib import Path

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
