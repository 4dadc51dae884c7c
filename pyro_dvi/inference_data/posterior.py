# SPDX-License-Identifier: Apache-2.0
"""Draws of the latent sites: which sites, and what stands for those that are too big to keep."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError, DataError, DviWarning
from pyro_dvi.inference_data.arrays import as_array
from pyro_dvi.inference_data.group import Group
from pyro_dvi.inference_data.names import close_names, listed, plate_names
from pyro_dvi.predictive.engine.batches import Batch
from pyro_dvi.sites import is_deterministic

__all__ = ["Selection", "Summaries", "drawn_group", "of_one_posterior"]

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
        nodes: Mapping[str, Any],
        sites: str | Sequence[str] | None,
        max_size: int,
        summaries: Summaries | None,
    ) -> "Selection":
        """Choose by name, of latent sites and those of ``pyro.deterministic`` in a run of the model, else by size.

        Raises:
            ArgumentError: a name that the guide does not have, or summaries that are no functions.
        """
        functions = {} if summaries is None else summaries
        if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
            raise ArgumentError(
                f"summarise must map names to functions of a draw, as {{'norm': torch.norm}}, not {summaries!r}"
            )
        if sites is not None:
            kept = listed("sites", sites)
            known = [
                *latents,
                *(n for n, node in nodes.items() if is_deterministic(node)),
            ]
            for name in kept:
                if name not in known:
                    raise ArgumentError(
                        f"the guide has no site {name!r}; close names: {close_names(name, known)}"
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
                stacklevel=3,  # the caller of to_arviz
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
                values[f"{name}_{label}"] = _summary(label, function, name, latents[name])
        return values


def of_one_posterior(
    batches: Iterable[Batch], draw: Callable[[Batch], Mapping[str, Tensor]], seed: int
) -> Iterator[Batch]:
    """Pass batches on, and make sure that the sites have the same draws for all of them.

    Raises:
        DataError: some depend on the inputs, so that each batch has a posterior of its own.
    """
    first: Mapping[str, Tensor] | None = None
    for batch in batches:
        yield batch  # before the comparison: latents of single examples are refused where the batch is predicted
        torch.manual_seed(seed)
        drawn = draw(batch)
        first = drawn if first is None else first
        changed = [name for name in first if name not in drawn or not torch.equal(first[name], drawn[name])]
        if changed:
            raise DataError(
                f"the posterior draws sites {changed} according to its inputs, so that each batch has one of its own, "
                "of which the export would hold the first alone: give the data in one batch (a tuple with a "
                "batch_size of at least their number), or export predictions alone by sites=[]"
            )


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


def _summary(label: str, function: Callable[[Tensor], Any], site: str, value: Tensor) -> Tensor:
    """Return what a summary gives for one draw of a site, as a tensor."""
    try:
        return torch.as_tensor(function(value))
    except Exception as error:
        raise ArgumentError(
            f"summarise[{label!r}] failed for a draw of site {site!r}, of shape {tuple(value.shape)}: it has to give a "
            f"tensor or a number, such as torch.norm ({type(error).__name__}: {error})"
        ) from error
