# SPDX-License-Identifier: Apache-2.0
"""Draws of the latent sites: which sites, and what stands for those that are too big to keep."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from pyro_dvi.errors import ArgumentError, DviWarning
from pyro_dvi.inference_data.arrays import as_array
from pyro_dvi.inference_data.group import Group
from pyro_dvi.inference_data.names import close_names, plate_names

__all__ = ["Selection", "Summaries", "drawn_group"]

Summaries = Mapping[str, Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Selection:
    """Which latent sites to keep.

    Attributes:
        kept: their names.
        left_out: names of the others.
        summaries: functions of a draw that stand for the values of sites left out.
    """

    kept: Sequence[str]
    left_out: Sequence[str]
    summaries: Summaries

    @classmethod
    def of(
        cls,
        latents: Mapping[str, Tensor],
        sites: str | Sequence[str] | None,
        max_size: int,
        summaries: Summaries | None,
        *,
        stacklevel: int,
    ) -> "Selection":
        """Choose by name, else by size.

        Raises:
            ArgumentError: a name that the guide does not have, or summaries that are no functions.
        """
        functions = {} if summaries is None else summaries
        if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
            raise ArgumentError(
                f"summarise must map names to functions of a draw, as {{'norm': torch.norm}}, not {summaries!r}"
            )
        if sites is not None:
            kept = [sites] if isinstance(sites, str) else list(sites)
            for name in kept:
                if name not in latents:
                    raise ArgumentError(
                        f"the guide has no site {name!r}; close names: {close_names(name, latents)}"
                    )
            return cls(kept, [name for name in latents if name not in kept], functions)
        left_out = [name for name, value in latents.items() if value.numel() > max_size]
        if left_out and not functions:
            sizes = ", ".join(f"{name!r} ({latents[name].numel():,})" for name in left_out)
            warnings.warn(
                f"the exported posterior leaves out sites of more than {max_size:,} values: {sizes}. Name those to "
                "keep, as in sites=['...'], raise max_site_size, or keep numbers that sum them up, as in "
                "summarise={'norm': torch.norm}.",
                DviWarning,
                stacklevel=stacklevel,
            )
        return cls([name for name in latents if name not in left_out], left_out, functions)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is wanted of the draws."""
        return not self.kept and not (self.left_out and self.summaries)

    def values(self, latents: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what to keep of one draw."""
        values = {name: latents[name] for name in self.kept}
        for name in self.left_out:
            for label, function in self.summaries.items():
                values[f"{name}_{label}"] = function(latents[name])
        return values


def drawn_group(
    draws: Iterable[Mapping[str, Tensor]], count: int, selection: Selection, nodes: Mapping[str, Any]
) -> Group:
    """Collect ``count`` draws of the sites that are kept.

    Args:
        draws: values by site name, one draw after the other.
        count: their number.
        selection: what to keep of them.
        nodes: the sites in a trace of the model, for the plates that they are in.
    """
    arrays: dict[str, np.ndarray] = {}
    for k, latents in enumerate(draws):
        for name, value in selection.values(latents).items():
            row = as_array(value)
            if k == 0:
                arrays[name] = np.empty((count, *row.shape), row.dtype)
            arrays[name][k] = row
    group = Group()
    for name, array in arrays.items():
        group.add(name, array, plate_names(nodes[name], array.shape[1:]) if name in nodes else ())
    return group
