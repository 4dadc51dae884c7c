# SPDX-License-Identifier: Apache-2.0
r"""Draws that came from elsewhere, in the place of a guide: of MCMC, of ``Predictive``, of another program.

Draws of the latent sites: which sites, and what stands for those that are too big to keep.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.analysis.arviz_export.groups import Group, as_array, close_names, listed, plate_names
from pyro_dvi.core.distributions import broadcasts_to
from pyro_dvi.errors import ArgumentError, DataError, warn
from pyro_dvi.predictive.engine.inputs import Batch
from pyro_dvi.predictive.engine.model_runs import Latents, observed_run, sites_at
from pyro_dvi.predictive.engine.posterior_values import example_latents
from pyro_dvi.predictive.engine.vectorised import ManyDraws
from pyro_dvi.predictive.rules.rule import FromDraws
from pyro_dvi.runs.sites import is_data, is_deterministic, is_latent


class GivenSamples(FromDraws):
    """Average the predictions of draws that are given.

    Args:
        samples: ``[num_samples, ...]`` by site name, as of ``MCMC.get_samples()``.
        device: where the model is; None leaves them where they are.

    Raises:
        ArgumentError: no sites, no draws, or unequal numbers of them.
    """

    def __init__(self, samples: Mapping[str, Any], device: torch.device | None = None) -> None:
        self.samples = {name: torch.as_tensor(values, device=device) for name, values in samples.items()}
        lengths = {name: len(v) if v.dim() else 0 for name, v in self.samples.items()}
        if not lengths or 0 in lengths.values():
            raise ArgumentError(
                f"the samples hold no draws: {lengths or 'no sites'}; give tensors [num_samples, ...] by site name"
            )
        if len(set(lengths.values())) > 1:
            raise ArgumentError(
                f"the sites have unequal numbers of draws, {lengths}: the draws of one index belong together"
            )
        self.num_samples = next(iter(lengths.values()))

    def __repr__(self) -> str:
        return f"GivenSamples({self.num_samples})"

    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Give the latent values of one draw after the other."""
        for k in range(self.num_samples):
            yield {name: values[k] for name, values in self.samples.items()}

    def first(self) -> dict[str, Tensor]:
        """Return the first draw."""
        return {name: values[0] for name, values in self.samples.items()}

    def guide(self, *args: Any, **kwargs: Any) -> None:
        """Stand for the guide where one draw is enough: the first."""
        for name, value in self.first().items():
            pyro.sample(name, dist.Delta(value, event_dim=value.dim()))

    def fit_to(self, nodes: Mapping[str, Any], *, is_complete: bool) -> None:
        """Compare with the sites of a run of the model, and take off leading dimensions of length 1 that it has not.

        ``Predictive`` leaves such dimensions where plates could have been.

        Args:
            nodes: the sites.
            is_complete: whether the model saw its observation, so that all that it drew is latent.

        Raises:
            ArgumentError: draws of what the model does not draw, none of what it does, or of another shape.
        """
        latent = [name for name, node in nodes.items() if is_latent(node)]
        for name in self.samples:
            if name not in nodes:
                raise ArgumentError(
                    f"the samples have a site {name!r} that the model has not; close names: "
                    f"{close_names(name, latent)}"
                )
            if is_data(nodes[name]):
                raise ArgumentError(
                    f"the samples have a site {name!r} that the model observes: leave it out, predictions are made "
                    "from the latent sites"
                )
        for name in latent if is_complete else ():
            if name not in self.samples:
                raise ArgumentError(
                    f"the samples have no draws of site {name!r}, which the model draws; they have "
                    f"{list(self.samples)}, close to it {close_names(name, self.samples)}"
                )
        for name, values in self.samples.items():
            fn = nodes[name]["fn"]
            self.samples[name] = _shaped(name, values, tuple(fn.batch_shape + fn.event_shape))


def _shaped(name: str, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return draws of a site without leading dimensions of length 1 that one value does not have."""
    while values.dim() - 1 > len(shape) and values.shape[1] == 1:
        values = values.squeeze(1)
    own = tuple(values.shape[1:])
    if not broadcasts_to(own, shape):
        raise ArgumentError(
            f"a draw of site {name!r} has the shape {own}, its value in the model {shape}. Give [num_samples, ...]: "
            "draws of several chains one after the other (MCMC.get_samples() without group_by_chain); and where a "
            "site has a value for each example, the data of the training, in one batch"
        )
    return values


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
