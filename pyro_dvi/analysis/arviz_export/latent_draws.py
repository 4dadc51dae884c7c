# SPDX-License-Identifier: Apache-2.0
r"""Draws of the latent sites, from a guide or given by the user, and the log densities of these draws."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import itemgetter
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to

from pyro_dvi.analysis.arviz_export.groups import Group, as_array, joined, plate_names
from pyro_dvi.core.distributions import broadcasts_to
from pyro_dvi.core.undisturbed import seeder
from pyro_dvi.errors import ArgumentError, warn
from pyro_dvi.predictive.engine.inputs import Batch
from pyro_dvi.predictive.engine.model_runs import Latents, sites_at
from pyro_dvi.predictive.engine.posterior_values import traced_draws
from pyro_dvi.predictive.engine.vectorised import ManyDraws
from pyro_dvi.predictive.rules.rule import FromDraws
from pyro_dvi.runs.sites import is_deterministic, is_latent

CHUNK = 64  # number of draws that are copied together


class GivenSamples(FromDraws):
    """Average the predictions of draws that are given, for example from MCMC, ``Predictive``, or another program.

    Args:
        samples: ``[num_samples, ...]`` by site name, as returned by ``MCMC.get_samples()``.
        device: device of the model; None leaves the draws where they are.

    Raises:
        ArgumentError: if there are no sites or no draws, or if the number of draws differs between sites.
    """

    def __init__(self, samples: Mapping[str, Any], device: torch.device | None = None) -> None:
        self.samples = {name: torch.as_tensor(values, device=device) for name, values in samples.items()}
        lengths = {name: len(v) if v.dim() else 0 for name, v in self.samples.items()}
        if len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise ArgumentError(
                f"the numbers of draws are {lengths}: pass tensors [num_samples, ...] by site name, with the same "
                "number of draws for every site"
            )
        self.num_samples = next(iter(lengths.values()))

    def __repr__(self) -> str:
        return f"GivenSamples({self.num_samples})"

    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Yield the latent values of each draw."""
        for k in range(self.num_samples):
            yield {name: values[k] for name, values in self.samples.items()}

    def guide(self, *args: Any, **kwargs: Any) -> None:
        """Sample the first draw; used as the guide where one draw is sufficient."""
        for name, values in self.samples.items():
            pyro.sample(name, dist.Delta(values[0], event_dim=values.dim() - 1))

    def fit_to(self, nodes: Mapping[str, Any], *, is_complete: bool) -> None:
        """Compare the draws with the sites of a model run, and drop leading dimensions of length 1 that the sites lack.

        ``Predictive`` adds such dimensions for plates that a model may have.

        Args:
            nodes: the sites of the model run.
            is_complete: True if the model saw its observation, so that every site that it drew is latent.

        Raises:
            ArgumentError: if there are draws of a site that is not latent, no draws of a latent site, or draws of the
                wrong shape.
        """
        latent = [name for name, node in nodes.items() if is_latent(node)]
        if not set(self.samples) <= set(latent) or (is_complete and len(self.samples) < len(latent)):
            raise ArgumentError(
                f"the draws are for sites {list(self.samples)}, but the latent sites of the model are {latent}: pass "
                "draws for the latent sites"
            )
        for name, values in self.samples.items():
            fn = nodes[name]["fn"]
            shape = tuple(fn.batch_shape + fn.event_shape)
            while values.dim() - 1 > len(shape) and values.shape[1] == 1:
                values = values.squeeze(1)
            if not broadcasts_to(tuple(values.shape[1:]), shape):
                raise ArgumentError(
                    f"a draw of site {name!r} has the shape {tuple(values.shape[1:])}, but its value in the model has "
                    f"the shape {shape}. Pass draws as [num_samples, ...], with several chains concatenated "
                    "(MCMC.get_samples() without group_by_chain). If the site has one value per example, pass the "
                    "training data in one batch"
                )
            self.samples[name] = values


def chosen_sites(
    latents: Mapping[str, Tensor], nodes: Mapping[str, Any], sites: str | Sequence[str] | None, max_size: int
) -> list[str]:
    """Return the latent and deterministic sites with the given names; without names, the latent sites of small size.

    Raises:
        ArgumentError: if neither the guide nor the model has a site with one of the names.
    """
    if sites is None:
        left_out = {name: value.numel() for name, value in latents.items() if value.numel() > max_size}
        if left_out:
            warn(
                f"the exported posterior omits sites with more than {max_size:,} values: "
                f"{', '.join(f'{name!r} ({size:,})' for name, size in left_out.items())}. Name the sites to export, as "
                "in sites=['...'], or raise max_site_size."
            )
        return [name for name in latents if name not in left_out]
    known = [*latents, *(name for name, node in nodes.items() if is_deterministic(node))]
    kept = [sites] if isinstance(sites, str) else list(sites)
    for name in kept:
        if name not in known:
            raise ArgumentError(
                f"there is no site {name!r} to export; the sites of the guide and the model are {known[:20]}"
            )
    return kept


def latent_draws(
    model: Callable[..., Any],
    batch: Batch,
    nodes: Mapping[str, Any],
    names: Sequence[str],
    draws: Iterator[Latents],
) -> Group:
    """Return a group with draws of latent sites, and of deterministic sites that the model computes from them.

    Args:
        model: the Pyro model.
        batch: the first batch; the sites are drawn for its inputs.
        nodes: the sites of a run of the model with this batch, from which the names of plates are read.
        names: sites to export; if empty, nothing is drawn.
        draws: draws of all latent sites.
    """
    group = Group()
    if not names:
        return group
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in names}
    deterministic = [name for name in names if name in nodes and is_deterministic(nodes[name])]
    computed = _computed(model, batch, deterministic, draws)
    while chunk := list(islice(computed, CHUNK)):  # copies several draws from the accelerator at once
        for name, own in pieces.items():
            own.append(as_array(torch.stack([{**latents, **found}[name] for latents, found in chunk])))
    for name, own in pieces.items():
        array = joined(own, 0)
        group.add(name, array, plate_names(nodes[name], array.shape[1:]) if name in nodes else ())
    return group


def _computed(
    model: Callable[..., Any],
    batch: Batch,
    names: Sequence[str],
    draws: Iterator[Latents],
    of: Callable[[Any], Tensor] = itemgetter("value"),
) -> Iterator[tuple[Latents, Mapping[str, Tensor]]]:
    """Yield each draw with ``of`` at the sites ``names`` of the model; if possible, many draws share one run."""
    run = sites_at(model, *batch.whole, names)

    def read(latents: Latents) -> dict[str, Tensor]:
        return {name: of(site) for name, site in run(latents).items()} if names else {}

    first = next(draws)
    yield first, read(first)
    if not names:
        yield from ((latents, {}) for latents in draws)
        return
    for chunk, found in ManyDraws().chunks(first, draws, read):
        for k, latents in enumerate(chunk):
            yield latents, read(latents) if found is None else {name: found[name][k] for name in names}


def log_prior(
    model: Callable[..., Any], batch: Batch, nodes: Mapping[str, Any], draws: Iterator[Latents]
) -> Group:
    r"""Return :math:`\log p(\theta_s \mid \mathrm{parents})` of every latent site s and draw, in constrained space.

    Args:
        model: the Pyro model.
        batch: arguments of the model.
        nodes: the sites of a run of the model with this batch.
        draws: draws of the latent sites.
    """
    first = next(draws)
    names = [name for name, node in nodes.items() if is_latent(node) and name in first]
    every = chain([first], draws)
    densities = _computed(model, batch, names, every, lambda site: site["fn"].log_prob(site["value"]))
    rows = [found for _, found in densities]
    group = Group()
    for name in names:
        values = torch.stack([row[name] for row in rows])
        event_dim = len(nodes[name]["fn"].event_shape)
        plates = plate_names(nodes[name], tuple(values.shape[1:]) + (1,) * event_dim)
        group.add(name, as_array(values), plates[: values.dim() - 1])
    return group


def sample_stats(prior: Group, likelihood: Group, log_q: Tensor | None) -> Group:
    r"""Return, if known, :math:`\log p(y, \theta)` of every draw as ``lp`` and :math:`\log q(\theta)` as ``log_q``.

    Args:
        prior: log densities of the draws under the prior.
        likelihood: log-likelihoods of all data given the draws; if empty, ``lp`` is omitted.
        log_q: the result of :func:`log_posterior`.
    """
    group = Group()
    if likelihood.arrays:
        terms = [array[0] for array in (*prior.arrays.values(), *likelihood.arrays.values())]
        group.add("lp", np.sum([term.reshape(len(term), -1).sum(1, dtype=float) for term in terms], 0))
    if log_q is not None:
        group.add("log_q", as_array(log_q))
    return group


def log_posterior(
    guide: Callable[..., Any], batch: Batch, nodes: Mapping[str, Any], drawn: Group, seed: int
) -> Tensor | None:
    """Return the log density of every draw under the guide, in constrained space; None if the guide has no density.

    Args:
        guide: the posterior.
        batch: arguments of the model.
        nodes: the sites of a run of the model with this batch.
        drawn: the draws, which are compared with those that the guide gives here.
        seed: seed of the draws.
    """
    latent = {name: node for name, node in nodes.items() if is_latent(node)}
    try:
        free = sum(_num_free(node) for node in latent.values())
    except NotImplementedError:  # for example for values on a sphere, which are not transformed Gaussians
        return None
    count = len(next(iter(drawn.arrays.values()))[0]) if drawn.arrays else 0
    seeder()(seed)
    densities = []
    for k, trace in enumerate(traced_draws(guide, batch.inputs, count)):
        sites = [
            node for node in trace.nodes.values() if node["type"] == "sample" and not node["is_observed"]
        ]
        spread = [node["value"].numel() for node in sites if not isinstance(node["fn"], dist.Delta)]
        same = (
            np.array_equal(as_array(trace.nodes[name]["value"]), array[0, k])
            for name, array in drawn.arrays.items()
            if name in trace.nodes
        )
        if sum(spread) < free or not all(
            same
        ):  # some sites are point masses, or the draws are not from this guide
            return None
        try:
            logs = [node["fn"].log_prob(node["value"]).double().sum() for node in sites]
        except NotImplementedError:  # a Laplace method without densities
            return None
        densities.append(torch.stack(logs).sum())
    return torch.stack(densities) if densities else None


def _num_free(node: Any) -> int:
    """Return the number of free values of a site: on a simplex, one less than the entries; zero for a discrete site."""
    support = node["fn"].support
    return 0 if support.is_discrete else math.prod(biject_to(support).inverse_shape(node["value"].shape))
