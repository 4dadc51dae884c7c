# SPDX-License-Identifier: Apache-2.0
"""The file of a checkpoint: its format, its version, and whether it is whole."""

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pyro
import torch

from pyro_dvi.errors import CheckpointError

_FORMAT, _VERSION = "pyro_dvi checkpoint", 3


def write_file(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint in one move, so that a crash leaves the file of before.

    Raises:
        CheckpointError: it cannot be written.
    """
    versions = {"torch": str(torch.__version__), "pyro": str(pyro.__version__)}
    content = {"format": _FORMAT, "version": _VERSION, "versions": versions, **content}
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        torch.save(content, unfinished)
        os.replace(unfinished, path)
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError) as error:
        raise CheckpointError(f"Could not write the checkpoint {str(path)!r}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def read_file(path: Path, map_location: Any) -> dict[str, Any]:
    """Read a checkpoint; for the arguments see :func:`~pyro_dvi.training.load`.

    Raises:
        CheckpointError: the file is missing, damaged, foreign or of another version.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {str(path)!r}.")
    try:
        # torch.save keeps a checksum of every tensor, but torch.load does not compare it.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged!r} is damaged")
        content = torch.load(path, map_location=map_location, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} is not a checkpoint, is damaged or cut off, or holds objects that a safe load does not "
            f"build (see torch.serialization.add_safe_globals): {first_line(error)}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise CheckpointError(
            f"{str(path)!r} was not written by pyro_dvi.save: it holds {list(content)[:5]}. Load a plain state_dict "
            "with load_state_dict, Pyro's store with pyro.get_param_store().load."
        )
    if content["version"] != _VERSION:
        raise CheckpointError(
            f"{str(path)!r} has version {content['version']} of the format; this library reads version {_VERSION}. "
            "Load it with the release that wrote it."
        )
    return content


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
