# SPDX-License-Identifier: Apache-2.0
"""Storage of results: a file with one line of JSON per training run, from which an interrupted search continues."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, CheckpointError

Key = tuple[Any, ...]  # the values of all settings, in the order of their names

_BEGINNING = '{"settings": '  # beginning of every line


def read_results(path: Path, names: list[str], seed: int) -> dict[Key, Tensor | str]:
    """Return a mapping from values of the settings to the score of the training run, or to the reason why it failed.

    An incomplete line is ignored.

    Raises:
        CheckpointError: if the file belongs to other settings or another seed, or does not contain results.
    """
    path.touch()  # an invalid path fails here, before the first training run
    found: dict[Key, Tensor | str] = {}
    text = path.read_text(encoding="utf-8", errors="replace")
    for line in text.splitlines():
        try:
            row = dict(json.loads(line))
        except (ValueError, TypeError):
            if _BEGINNING.startswith(line[: len(_BEGINNING)]):
                continue
            row = {}
        if set(row.get("settings", ())) != set(names) or row.get("seed") != seed:
            raise CheckpointError(
                f"{path} contains a line that is not a training run of this search (seed {seed}, settings "
                f"{', '.join(names)}): {line[:100]}. Choose another path for storage"
            )
        key = tuple(row["settings"][name] for name in names)
        found[key] = row["failure"] if "failure" in row else as_score(row["score"])
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    return found


def write_result(path: Path, settings: dict[str, Any], seed: int, result: Tensor | str) -> None:
    """Append a result to the file."""
    found = {"failure": result} if isinstance(result, str) else {"score": result.tolist()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"settings": settings, "seed": seed, **found}) + "\n")


def as_score(value: Any) -> Tensor:
    """Return the score in double precision: a single number, or a vector with one number per row.

    Raises:
        ArgumentError: if the score has any other shape.
    """
    value = value if hasattr(value, "__len__") else float(value)
    found = torch.as_tensor(value, dtype=torch.double, device="cpu").detach()
    if found.dim() > 1 or not found.numel():
        raise ArgumentError(
            f"score must return a single number or a vector of one number per row, not shape {tuple(found.shape)}"
        )
    return found
