# SPDX-License-Identifier: Apache-2.0
"""The file of a checkpoint: its format, its version, and whether it is whole."""

import os
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.distributions import constraints as pyro_constraints
from torch.distributions import constraints as torch_constraints

from pyro_dvi.errors import CheckpointError
from pyro_dvi.guides import factors

_FORMAT, _VERSION = "pyro_dvi checkpoint", 2
_ENTRIES = set(
    "described states store elbo optimizer lr_schedule random history best_weights inputs fingerprint".split()
)


def write_file(path: Path, content: dict[str, Any]) -> None:
    """Write a checkpoint in one move, so that a crash leaves the file of before.

    Raises:
        CheckpointError: it cannot be written.
    """
    versions = {"torch": str(torch.__version__), "pyro": str(pyro.__version__)}
    content = {"format": _FORMAT, "version": _VERSION, "versions": versions, **content}
    unfinished = path.with_name(path.name + ".unfinished")
    checksums = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)  # which read_file compares
    try:
        torch.save(content, unfinished)
        os.replace(unfinished, path)
    except (OSError, RuntimeError, pickle.PicklingError, AttributeError) as error:
        raise CheckpointError(f"Could not write the checkpoint {str(path)!r}: {error}") from error
    finally:
        torch.serialization.set_crc32_options(checksums)
        unfinished.unlink(missing_ok=True)


def read_file(path: Path, map_location: Any, weights_only: bool) -> dict[str, Any]:
    """Read a checkpoint; for the arguments see :func:`~pyro_dvi.training.load`.

    Raises:
        CheckpointError: the file is missing, damaged, foreign, of another version, or lacks an entry.
    """
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {str(path)!r}.")
    try:
        # torch.save keeps a checksum of every tensor, but torch.load does not compare it.
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise zipfile.BadZipFile(f"{damaged!r} is damaged")
        with torch.serialization.safe_globals(_constraint_classes()):
            content = torch.load(path, map_location=map_location, weights_only=weights_only)
    except pickle.UnpicklingError as error:
        found = re.search(r"Unsupported [^.]*?GLOBAL (\S+)", str(error))
        raise CheckpointError(
            f"{str(path)!r} holds objects that a safe load does not build{f': {found[1]}' if found else ''}. If you "
            "trust the file, pass weights_only=False, or tell torch of the class with "
            "torch.serialization.add_safe_globals."
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"{str(path)!r} is not a checkpoint, or is damaged or cut off: {first_line(error)}"
        ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        keys = f" with the keys {list(content)[:5]}" if isinstance(content, dict) else ""
        raise CheckpointError(
            f"{str(path)!r} was not written by pyro_dvi.save: it holds a {type(content).__name__}{keys}. Load a "
            "plain state_dict with load_state_dict, Pyro's store with pyro.get_param_store().load."
        )
    missing = sorted(_ENTRIES.difference(content))
    if missing or content["version"] != _VERSION:
        lacks = f" and no {missing}" if missing else ""
        raise CheckpointError(
            f"{str(path)!r} has version {content.get('version')} of the format{lacks}; this library reads version "
            f"{_VERSION}. Load it with the release that wrote it."
        )
    return content


def _constraint_classes() -> list[Any]:
    """Constraints of parameters in Pyro's store: plain values, but of classes that a safe load must be told of."""
    found = {}
    for library in (torch_constraints, pyro_constraints, factors):
        for value in vars(library).values():
            if isinstance(value, type) and issubclass(value, torch_constraints.Constraint):
                found[id(value)] = value
    return list(found.values())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    return (str(error) or type(error).__name__).strip().splitlines()[0][:200]
