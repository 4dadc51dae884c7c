# SPDX-License-Identifier: Apache-2.0
r"""Log densities of posterior draws: under the prior, with the data, and under the posterior that drew them."""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to

from pyro_dvi.analysis.arviz_export.groups import Group, as_array, plate_names
from pyro_dvi.core.undisturbed import seeder
from pyro_dvi.predictive.engine.inputs import Batch
from pyro_dvi.predictive.engine.model_runs import Latents, sites_at
from pyro_dvi.predictive.engine.posterior_values import traced_draws
from pyro_dvi.predictive.engine.vectorised import ManyDraws
from pyro_dvi.runs.sites import is_latent


def log_prior(
    model: Callable[..., Any], batch: Batch, nodes: Mapping[str, Any], draws: Iterator[Latents]
) -> Group:
    r"""Return :math:`\log p(\theta_s \mid \mathrm{parents})` of every latent site s and draw, in its own space.

    Args:
        model: the Pyro model.
        batch: arguments of the model.
        nodes: its sites in a run with this batch.
        draws: of the latent sites.
    """
    first = next(draws)
    names = [name for name, node in nodes.items() if is_latent(node) and name in first]
    run = sites_at(model, *batch.whole, names)

    def read(latents: Latents) -> dict[str, Tensor]:
        return {name: site["fn"].log_prob(site["value"]) for name, site in run(latents).items()}

    rows = [read(first)]
    for chunk, found in ManyDraws().chunks(first, draws, read):
        rows += [
            read(latents) if found is None else {name: found[name][k] for name in names}
            for k, latents in enumerate(chunk)
        ]
    group = Group()
    for name in names:
        values = torch.stack([row[name] for row in rows])
        event_dim = len(nodes[name]["fn"].event_shape)
        plates = plate_names(nodes[name], tuple(values.shape[1:]) + (1,) * event_dim)
        group.add(name, as_array(values), plates[: values.dim() - 1])
    return group


def sample_stats(prior: Group, likelihood: Group, log_q: Tensor | None) -> Group:
    r"""Return :math:`\log p(y, \theta)` as ``lp`` and :math:`\log q(\theta)` as ``log_q`` of every draw, where known.

    Args:
        prior: log densities of the draws under it.
        likelihood: of all data given the draws; ``lp`` is left out where it is empty.
        log_q: of :func:`log_posterior`.
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
    """Return the log density of every draw under the guide, in the space of the sites; None where there is none.

    Args:
        guide: the posterior.
        batch: arguments of the model.
        nodes: its sites in a run with this batch.
        drawn: the draws, by which it is made sure that the densities are theirs.
        seed: of the draws.
    """
    latent = {name: node for name, node in nodes.items() if is_latent(node)}
    try:
        free = sum(_num_free(node) for node in latent.values())
    except NotImplementedError:  # values on a sphere, say, which no Gaussian on real numbers reaches
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
        if sum(spread) < free or not all(same):  # a point mass in some sites; draws that came in another way
            return None
        try:
            logs = [node["fn"].log_prob(node["value"]).double().sum() for node in sites]
        except NotImplementedError:  # of a method that knows draws alone
            return None
        densities.append(torch.stack(logs).sum())
    return torch.stack(densities) if densities else None


def _num_free(node: Any) -> int:
    """Return how many free numbers a value of a site has: one less than entries on a simplex, none if discrete."""
    support = node["fn"].support
    return 0 if support.is_discrete else math.prod(biject_to(support).inverse_shape(node["value"].shape))
