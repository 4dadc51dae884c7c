# SPDX-License-Identifier: Apache-2.0
"""Draws of the latent sites: which sites, and what stands for those that are too big to keep."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.analysis.inference_data.group import Group, as_array, close_names, listed, plate_names
from pyro_dvi.errors import ArgumentError, DataError, warn
from pyro_dvi.predictive.engine.inputs import Batch
from pyro_dvi.predictive.engine.model_runs import Latents, observed_run, sites_at
from pyro_dvi.predictive.engine.posterior_values import example_latents
from pyro_dvi.predictive.engine.vectorised import ManyDraws
from pyro_dvi.runs.sites import is_deterministic

CHUNK = 64  # draws that are copied together
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
        if sites is None:
            kept = [name for name, value in latents.items() if value.numel() <= max_size]
        else:
            computed = [name for name, node in nodes.items() if is_deterministic(node)]
            kept = _known(listed("sites", sites), [*latents, *computed])
        left_out = [name for name in latents if name not in kept]
        if sites is None and left_out and not functions:
            sizes = ", ".join(f"{name!r} ({latents[name].numel():,})" for name in left_out)
            warn(
                f"the exported posterior leaves out sites of more than {max_size:,} values: {sizes}. Name those to "
                "keep, as in sites=['...'], raise max_site_size, or keep numbers that sum them up, as in "
                "summarise={'norm': torch.norm}."
            )
        return cls(kept, left_out, functions)

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


@dataclass(frozen=True)
class LatentDraws:
    """Draws of the latent sites, and of what the model computes from them, as groups.

    Args:
        model: the Pyro model.
        guide: its posterior.
        selection: the sites to keep; with none of them there is nothing to draw.
        batch: the first one, for whose inputs they are drawn.
        nodes: the sites in a run of the model with it, for the plates that they are in.
        seed: of the draws.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    selection: Selection
    batch: Batch
    nodes: Mapping[str, Any]
    seed: int

    def group(self, draws: Iterator[Latents], count: int) -> Group:
        """Return ``count`` draws for the first batch."""
        group = Group()
        if self.selection.is_empty:
            return group
        arrays: dict[str, np.ndarray] = {}
        kept = map(self.selection.values, self._computed(self.batch, draws))
        for start in range(0, count, CHUNK):  # one copy from an accelerator for several draws
            chunk = list(islice(kept, CHUNK))
            for name in chunk[0]:
                rows = as_array(torch.stack([values[name] for values in chunk]))
                if start == 0:
                    arrays[name] = np.empty((count, *rows.shape[1:]), rows.dtype)
                arrays[name][start : start + len(rows)] = rows
        for name, array in arrays.items():
            node = self.nodes.get(name)
            group.add(name, array, () if node is None else plate_names(node, array.shape[1:]))
        return group

    def unchanged(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on, and make sure that the sites have the same draws for all of them.

        Raises:
            DataError: some depend on the inputs, so that each batch has a posterior of its own.
        """
        first: Mapping[str, Tensor] | None = None
        for batch in batches:
            yield batch  # before the comparison: latents of single examples are refused where the batch is predicted
            if self.selection.is_empty:
                continue
            torch.manual_seed(self.seed)
            drawn = next(self._computed(batch, iter([example_latents(self.guide, batch.inputs)])))
            first = drawn if first is None else first
            changed = [n for n in first if n not in drawn or not torch.equal(first[n], drawn[n])]
            if changed:
                raise DataError(
                    f"the posterior draws sites {changed} according to its inputs, so that each batch has one of its "
                    "own, of which the export would hold the first alone: give the data in one batch (a tuple with a "
                    "batch_size of at least their number), or export predictions alone by sites=[]"
                )

    def _computed(self, batch: Batch, draws: Iterator[Latents]) -> Iterator[Latents]:
        """Add the sites that the model computes, for many draws at a time where it can be run so."""
        first = next(draws)
        names = [name for name in self.selection.kept if name not in first]
        if not names:
            yield from chain([first], draws)
            return

        def plain(latents: Latents) -> Latents:
            nodes = observed_run(self.model, batch, latents)
            return {**latents, **{name: nodes[name]["value"] for name in names}}

        run = sites_at(self.model, *batch.whole, names)

        def read(latents: Latents) -> dict[str, Tensor]:
            return {name: site["value"] for name, site in run(latents).items()}

        yield plain(first)
        for chunk, found in ManyDraws().chunks(first, draws, read):
            for k, latents in enumerate(chunk):
                yield (
                    plain(latents) if found is None else {**latents, **{n: v[k] for n, v in found.items()}}
                )


def _known(sites: list[str], known: list[str]) -> list[str]:
    for name in sites:
        if name not in known:
            raise ArgumentError(f"the guide has no site {name!r}; close names: {close_names(name, known)}")
    return sites


def _summary(label: str, function: Callable[[Tensor], Any], site: str, value: Tensor) -> Tensor:
    """Return what a summary gives for one draw of a site, as a tensor."""
    try:
        return torch.as_tensor(function(value))
    except Exception as error:
        raise ArgumentError(
            f"summarise[{label!r}] failed for a draw of site {site!r}, of shape {tuple(value.shape)}: it has to give a "
            f"tensor or a number, such as torch.norm ({type(error).__name__}: {error})"
        ) from error
