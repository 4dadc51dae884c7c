# SPDX-License-Identifier: Apache-2.0
"""One pass over data: predictions of every observed site, by the posterior and by the prior."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.inference_data.group import Group
from pyro_dvi.inference_data.inputs import constant_data
from pyro_dvi.inference_data.observations import given_others, observations
from pyro_dvi.inference_data.predictive import SiteExport
from pyro_dvi.inference_data.prior import PriorSamples
from pyro_dvi.predictive import PredictionRule
from pyro_dvi.predictive.engine.batches import Batch
from pyro_dvi.predictive.engine.run import Response, distribution_at, observed_run, respond
from pyro_dvi.predictive.engine.unseen import refuse_unseen
from pyro_dvi.predictive.predict import at_tuned_scales
from pyro_dvi.predictive.rules.rule import example_latents, first_arguments

__all__ = ["Pass", "Posterior", "pass_over"]


@dataclass(frozen=True)
class Posterior:
    """A model with its posterior.

    Attributes:
        model: the Pyro model.
        guide: its guide.
        rule: how to predict with them.
        count: draws of the observations.
        sites: observed sites.
    """

    model: Callable[..., Any]
    guide: Callable[..., Any]
    rule: PredictionRule
    count: int
    sites: Sequence[str]


@dataclass
class Pass:
    """Groups that one pass fills."""

    predictive: Group = field(default_factory=Group)
    prior_predictive: Group = field(default_factory=Group)
    log_likelihood: Group = field(default_factory=Group)
    observed: Group = field(default_factory=lambda: Group(sampled=False))
    inputs: Group = field(default_factory=lambda: Group(sampled=False))
    inputs_left_out: list[str] = field(default_factory=list)


def pass_over(
    batches: Iterable[Batch],
    posterior: Posterior,
    seed: int,
    noise_seed: int,
    prior: PriorSamples | None = None,
) -> Pass:
    """Predict all batches, site by site; every site and batch has the same draws of the weights.

    Args:
        batches: the data.
        posterior: what to predict with.
        seed: of the draws of the weights.
        noise_seed: of the noise of the observations; the sites of this pass take the numbers from here on.
        prior: draws of the prior to predict with as well.
    """
    model, guide = posterior.model, posterior.guide
    rules = [(posterior.rule, posterior.count)] + ([(prior, prior.num_samples)] if prior is not None else [])
    exports = [
        [
            SiteExport(site, count, rule.num_components, noise_seed + len(posterior.sites) * r + s)
            for s, site in enumerate(posterior.sites)
        ]
        for r, (rule, count) in enumerate(rules)
    ]
    inputs: list[tuple[Any, ...]] = []
    learnt_for = first_arguments(guide)
    for batch in batches:
        latents = example_latents(guide, batch.inputs)
        nodes = observed_run(model, batch, latents)
        observed = observations(batch, posterior.sites, nodes)
        for s, site in enumerate(posterior.sites):
            run = at_tuned_scales(guide, partial(respond, model, batch, site=site, learnt_for=learnt_for))
            torch.manual_seed(seed)
            scored = given_others(run, site, nodes, latents)
            components = posterior.rule.components(guide, batch.inputs, scored)
            again = given_others(distribution_at(model, batch.inputs, site), site, nodes, latents)
            components = _without_unseen(components, posterior.rule, again, latents)
            exports[0][s].add(components, observed.get(site), nodes[site])
            if prior is not None:
                torch.manual_seed(seed)
                exports[1][s].add(prior.components(guide, batch.inputs, run), None, nodes[site])
        inputs.append(batch.inputs)
    found = Pass()
    rows = exports[0][0].rows()
    found.inputs, found.inputs_left_out = constant_data(model, inputs, rows)
    for export in exports[0]:
        export.predictive(found.predictive)
        export.log_likelihood(found.log_likelihood, found.observed)
    for export in exports[1] if prior is not None else ():
        export.predictive(found.prior_predictive)
    return found


def _without_unseen(
    components: Iterable[Response],
    rule: PredictionRule,
    again: Callable[[Mapping[str, Tensor]], Any],
    latents: Mapping[str, Tensor],
) -> Iterator[Response]:
    """Pass components on, unless one draw of a site that is neither latent nor observed decides them."""
    for k, response in enumerate(components):
        if k == 0 and response.drawn and not rule.averages_draws:
            refuse_unseen(response, again, latents, type(rule).__name__)
        yield response
