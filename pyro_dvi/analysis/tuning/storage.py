# SPDX-License-Identifier: Apache-2.0
"""Results of trainings in a file with a line of JSON for each, to which an interrupted search returns."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, CheckpointError

Key = tuple[Any, ...]  # the values of all settings, in the order of their names

_BEGINNING = '{"settings": '  # of every line


def read_results(path: Path, names: list[str], seed: int) -> dict[Key, Tensor | str]:
    """Return scores, or why trainings failed, by the values of their settings.

    A line that was not finished is left out.

    Raises:
        CheckpointError: the file is about other settings or another seed, or about something else.
    """
    path.touch()  # fails before the first training, if at all
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
                f"{path} holds something else than trainings with seed {seed} of the settings {', '.join(names)}: "
                f"{line[:100]}; choose another path for the storage"
            )
        key = tuple(row["settings"][name] for name in names)
        found[key] = row["failure"] if "failure" in row else as_score(row["score"])
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    return found


def write_result(path: Path, settings: dict[str, Any], seed: int, result: Tensor | str) -> None:
    """Add a line."""
    found = {"failure": result} if isinstance(result, str) else {"score": result.tolist()}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"settings": settings, "seed": seed, **found}) + "\n")


def as_score(value: Any) -> Tensor:
    """Return one number, or a vector with a number for each row, in double precision.

    Raises:
        ArgumentError: it has another shape.
    """
    value = value if hasattr(value, "__len__") else float(value)
    found = torch.as_tensor(value, dtype=torch.double, device="cpu").detach()
    if found.dim() > 1 or not found.numel():
        raise ArgumentError(
            f"score must return one number, or one for each row, not shape {tuple(found.shape)}"
        )
    return found
