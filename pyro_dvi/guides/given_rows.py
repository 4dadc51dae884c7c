# SPDX-License-Identifier: Apache-2.0
"""Guides whose local latents follow the rows that the model gives to its plates."""

from collections.abc import Set
from contextlib import suppress
from typing import Any

import pyro
import torch
from pyro.infer.autoguide import AutoGuide
from pyro.poutine.util import site_is_subsample

from pyro_dvi.core.undisturbed import undisturbed


class FollowsRows(AutoGuide):
    """A guide that takes the rows of each plate, ``pyro.plate(name, size, subsample=rows)``, from the model.

    Pyro's guides draw these rows at random unless ``create_plates`` returns the plate, and so train latents on the data
    of other rows. If latents are in such a plate, the model first runs, in each step, until it has made the plate. A
    plate without given rows draws them in the guide, and the model may read them from its own plate.
    """

    _given: Set[str] = frozenset()  # the plates whose rows the model gives

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        if self._prototype_frames:
            self._given = self._rows(*args, **kwargs).keys() & self._prototype_frames.keys()

    def _rows(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        rows: dict[str, Any] = {}

        def note(msg: Any) -> bool:
            if msg["type"] == "sample" and site_is_subsample(msg) and msg["value"] is not None:
                rows[msg["name"]] = msg["value"]
                if self._given and self._given <= rows.keys():
                    raise _AllFound
            return True

        with suppress(_AllFound), torch.no_grad(), undisturbed(), pyro.poutine.block(hide_fn=note):
            self.model(*args, **kwargs)
        return rows

    def _create_plates(self, *args: Any, **kwargs: Any) -> Any:
        frames = self._prototype_frames
        if self.master or self.create_plates or not self._given & frames.keys():
            return super()._create_plates(*args, **kwargs)
        rows = self._rows(*args, **kwargs)
        self.plates = {}
        for name, frame in frames.items():
            drawn = None if name in rows else frame.size
            whole = name in rows and len(rows[name]) == frame.full_size
            kind = _WholePlate if whole else pyro.plate
            self.plates[name] = kind(name, frame.full_size, drawn, rows.get(name), frame.dim)
        return self.plates


class _WholePlate(pyro.plate):
    """A plate with all its rows in any order; Pyro itself selects rows only if they are fewer than all."""

    takes_any_order = True

    def _postprocess_message(self, msg: Any) -> None:
        self.subsample_size -= 1
        super()._postprocess_message(msg)
        self.subsample_size += 1


class _AllFound(Exception):
    """Ends a run of a model."""
