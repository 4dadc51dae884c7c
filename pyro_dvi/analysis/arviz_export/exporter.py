# SPDX-License-Identifier: Apache-2.0
r"""Export of a model with its posterior to ArviZ."""

import re
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import torch

from pyro_dvi.analysis.arviz_export.draws import (
    GivenSamples,
    ObservedSite,
    add_inputs,
    add_latents,
    add_sample_stats,
    choose_responses,
    chosen_sites,
    log_posterior,
)
from pyro_dvi.analysis.arviz_export.groups import Groups, assemble
from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.core.undisturbed import device_of
from pyro_dvi.errors import ArgumentError, DataError, DviWarning, warn
from pyro_dvi.laplace.approximation import DRAWN_WEIGHTS
from pyro_dvi.predictive import PredictionRule
from pyro_dvi.predictive.components import Components
from pyro_dvi.predictive.engine.inputs import Batch, batches
from pyro_dvi.predictive.engine.model_runs import evaluation_mode, observed_run, seeded
from pyro_dvi.predictive.engine.posterior_values import check_posterior, example_latents, predicted_model
from pyro_dvi.predictive.predict import names_of_sites, rule_of
from pyro_dvi.predictive.rules.analytic import Linearised, LinearisedDraws, Moments
from pyro_dvi.predictive.rules.rule import OfMembers, PriorSamples, Samples, draws_weights, with_draws
from pyro_dvi.runs.trained_for import temperature_of


def to_arviz(
    model: Callable[..., Any],
    guide: Callable[..., Any] | Mapping[str, Any],
    data: Any,
    num_samples: int | None = None,
    *,
    sites: str | Sequence[str] | None = None,
    max_site_size: int = 1000,
    method: PredictionRule | None = None,
    site: str | Sequence[str] | None = None,
    observed: str | Sequence[str] | None = None,
    prior: int | None = None,
    log_prior: bool = False,
    predictions: Any = None,
    batch_size: int = 1000,
    seed: int | None = None,
    coords: Mapping[Any, Any] | None = None,
    dims: Mapping[Any, Sequence[Hashable]] | None = None,  # Any: the key of a Mapping is invariant
    progress: bool = True,
) -> Any:
    r"""Export posterior draws, predictions and data as one ArviZ object.

    Arrays of draws begin with the dimensions ``chain`` (of length 1) and ``draw``. The object has these groups:

    ``posterior``
        draws of the latent sites from the guide, in constrained space. For an ensemble, the draws of the members are
        concatenated, and ``member`` is the index of the member.
    ``posterior_predictive``
        draws of every observed site from the predictive distribution of ``method``.
    ``log_likelihood``
        log density of each observation, :math:`\log p(y_i \mid x_i, \theta_k)`, if the data contain observations. With
        ``Moments()``, :math:`\theta_k` are the draws of ``posterior``; with ``Linearised()``, they are outputs of the
        linearised model, drawn for each example. With ``AtMean()``, all draws have the same log-likelihood.
    ``log_prior``, ``sample_stats``
        with ``log_prior=True``, which requires the complete training data. ``log_prior`` contains
        :math:`\log p(\theta_k)` by site. ``sample_stats`` contains ``lp``, which is :math:`\log p(y, \theta_k)` up to
        terms of ``pyro.factor``, if there is a ``log_likelihood``; and ``log_q``, which is :math:`\log q(\theta_k)`, if
        the guide has a density. ``lp`` and ``log_q`` are densities in the constrained space of the sites, so the Pareto
        k of ``lp - log_q`` measures the quality of the posterior (Yao et al., 2018, "Yes, but did it work?").
    ``observed_data``, ``constant_data``
        the observations, and the inputs under the names of the model's arguments; nested inputs and inputs with more
        than a million values are omitted.
    ``prior``, ``prior_predictive``
        with ``prior=n``: n draws of latent and observed sites from the model's prior.
    ``predictions``, ``predictions_constant_data``
        with ``predictions=``: draws of the observed sites for other inputs, and these inputs.

    Dimensions are named after plates. Observations that the model masks are NaN in ``observed_data``, so labels and
    counts become floating-point numbers in this group and in the predictive groups. ``log_likelihood`` omits masked
    observations: its values have one dimension ``<site>_observed``, whose coordinates are the positions of the values
    in the flattened predictions. If there are several observed sites, each is predicted and scored while the other
    sites are set to their observed values, if the data contain them. If a site b depends on a site a, the density of b
    is thus :math:`p(b \mid a, x, \theta)`.

    With ``AtMean()``, the default after ``TaylorELBO``, every draw of ``posterior_predictive`` comes from
    :math:`p(y \mid x, \mathrm{E}_q\theta)`, because a variational Laplace posterior predicts poorly with drawn weights.
    ``log_likelihood`` is then the same for every draw, as for a point estimate, whereas leave-one-out cross-validation
    with importance sampling (``az.loo``) needs draws with different likelihoods; a warning says so. For ``az.loo``,
    export with ``method=Samples(500)``, which scores the drawn weights. Alternatively, compare methods on held-out data
    with :func:`~pyro_dvi.analysis.diagnostics.compare_held_out`. A warning also says if the scored weights are drawn
    from a Laplace posterior.

    Args:
        model: the Pyro model.
        guide: its trained guide: a guide of this library or of Pyro, or a function. Alternatively, draws
            ``[num_samples, ...]`` by site name, as returned by ``MCMC.get_samples()``.
        data: as in :func:`~pyro_dvi.predict`: ``(x, y)``, inputs alone, or a loader of either.
        num_samples: number of draws. By default, it is the number of draws of ``method``, if a method with draws is
            given, and 500 otherwise (for an ensemble, rounded down to a multiple of the number of members).
        sites: latent sites and ``pyro.deterministic`` sites to export; the model computes the latter for each draw. By
            default, all latent sites with at most ``max_site_size`` values are exported, and a warning names the
            others. With an empty list, only predictions are exported; this is required if the method of a LaplaceGuide
            has no draws.
        max_site_size: number of values above which a site is omitted by default.
        method: prediction rule; by default the guide's, as in :func:`~pyro_dvi.predict`.
        site: observed site or sites to export; by default all. If there are several, the data must contain an
            observation of each.
        observed: name or names of the model's arguments that are observations. By default, it is the argument whose
            default value is None; if there are several such arguments, those with the names of observed sites are used.
        prior: number of draws from the prior.
        log_prior: True to add the log densities of the draws.
        predictions: other inputs, in any form that ``data`` may have; observations in them are not used.
        batch_size: examples per batch; ignored for a loader, which has its own batch size.
        seed: seed of all draws; by default drawn from the global generator, whose state does not change otherwise.
        coords: coordinate values by dimension, as in ArviZ, for all groups except ``predictions``.
        dims: names of the dimensions by variable, as in ArviZ.
        progress: show a progress bar over batches.

    Returns:
        ``arviz.InferenceData`` or ``xarray.DataTree``; ``.to_netcdf(path)`` writes either, and further groups and
        attributes can be added. The attributes record the guide, its temperature, the method and seed, the version of
        this library, and the names of omitted sites. ArviZ adds the time and its version to each group.

    Raises:
        KeyError: if a site is unknown.
        ArgumentError: if there are no draws, if ``num_samples`` and ``method`` disagree, if given draws have wrong
            shapes, or if several arguments may be the observation.
        DataError: if the data are invalid, as in :func:`~pyro_dvi.predict`, or if there are several batches and the
            posterior depends on the inputs.
        GuideError: if the guide was never run, or has no mean.
        ModelError: if the model has no observed site; or if it has several, the data contain no observations and
            ``site`` is not given.
        UnsupportedError: if a mask depends on the draw, if a prior cannot be sampled, if the method of a LaplaceGuide
            has no draws, or if an observed site depends on sites that are neither in the guide nor observed and the
            rule does not average over draws of these sites.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro.infer.autoguide import AutoNormal
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("obs", dist.Normal(slope * x, 0.5), obs=y)
        >>> guide = AutoNormal(model)
        >>> x = torch.linspace(-1, 1, 5)
        >>> _ = guide(x, x)
        >>> posterior = to_arviz(
        ...     model, guide, data=(x, x), num_samples=100, predictions=torch.ones(2), seed=0
        ... )
        >>> dict(posterior["posterior_predictive"]["obs"].sizes)
        {'chain': 1, 'draw': 100, 'data': 5}
        >>> dict(posterior["predictions"]["obs"].sizes)
        {'chain': 1, 'draw': 100, 'data': 2}
        >>> draws = {"slope": torch.randn(30)}
        >>> to_arviz(model, draws, data=x, seed=0)["posterior"]["slope"].shape
        (1, 30)
    """
    device = device_of(model, guide)
    given: GivenSamples | None = None
    if isinstance(guide, Mapping):
        given = GivenSamples(guide, device)
        guide = given.guide
    rule, count = _rule_and_count(given, method, guide, num_samples)
    if prior is not None:
        check_count("prior", prior)
    options: Any = {"observed": observed, "batch_size": batch_size, "device": device}
    options["sites"] = names_of_sites(model, guide)
    groups = Groups()
    with evaluation_mode(model, guide), seeded(seed, device) as used_seed:
        remaining = batches(model, data, **options)
        first = next(remaining)
        check_posterior(model, guide, first.inputs)
        if given is not None:
            given.fit_to(model, first)
        latents = example_latents(guide, first.inputs)
        nodes = observed_run(model, first, latents)
        kept = chosen_sites(latents, sites, max_site_size)
        responses = choose_responses(site, nodes, latents)
        tuned = predicted_model(guide, model)

        def observed_sites(
            components: Components, draws: int, number: int, **scored: Components
        ) -> list[ObservedSite]:
            # The seed differs from that of the weights; otherwise the noise would repeat their random numbers.
            noise_seed = used_seed + 1 + number * len(responses)
            return [
                ObservedSite(name, components, draws, noise_seed + s, **scored)
                for s, name in enumerate(responses)
            ]

        own = Components(model, guide, rule, used_seed)
        of_weights = rule if draws_weights(rule) else with_draws(rule, count)
        weights = own if of_weights is rule else Components(model, guide, of_weights, used_seed)
        with warnings.catch_warnings():  # the draws of a LaplaceGuide are exported here, and predict nothing
            warnings.filterwarnings("ignore", message=re.escape(DRAWN_WEIGHTS), category=DviWarning)
            add_latents(groups["posterior"], tuned, first, nodes, kept, weights.draws(first.inputs))
        scores = _scored_by(rule, count)
        known = own if scores == rule else weights if scores == of_weights else None
        scored = Components(model, guide, scores, used_seed) if known is None else known
        if hasattr(guide, "linearised") and draws_weights(rule) and first.observed is not None:
            warn(f"{DRAWN_WEIGHTS} az.loo and az.compare would misread their log_likelihood")
        predicted = {"posterior_predictive": observed_sites(own, count, 0, scored=scored)}
        if prior is not None:
            from_prior = PriorSamples(prior, tuned, first.inputs, tuple(latents))
            of_prior = Components(model, guide, from_prior, used_seed)
            add_latents(groups["prior"], tuned, first, nodes, kept, of_prior.draws(first.inputs))
            predicted["prior_predictive"] = observed_sites(of_prior, prior, 1)
        every = progress_bar(progress, unit="batch", label="export", of=chain([first], remaining))
        _predict(groups, "constant_data", model, guide, every, predicted, kept, used_seed)
        _warn_of_few_scores(groups, rule)
        if log_prior:
            draws = weights.draws(first.inputs)
            add_latents(groups["log_prior"], tuned, first, nodes, list(latents), draws, log_prior=True)
            is_own = isinstance(of_weights, Samples)  # not given, and not of the members of an ensemble
            log_q = log_posterior(guide, first, nodes, count, used_seed) if is_own else None
            # If the rule does not draw weights, the log-likelihood is not the one of the weights that were drawn.
            add_sample_stats(groups, log_q, are_scored=scored is weights)
        if predictions is not None:
            others = (replace(batch, observed=None) for batch in batches(model, predictions, **options))
            ahead = observed_sites(Components(model, guide, rule, used_seed), count, 2)
            parts = {"predictions": ahead}
            _predict(groups, "predictions_constant_data", model, guide, others, parts, (), used_seed)

    of_first = next((member.guide for member in getattr(guide, "members", ())), guide)
    attributes = {
        "guide": "samples" if given is not None else getattr(guide, "__name__", type(guide).__name__),
        "method": repr(rule),
        "temperature": getattr(of_first, "temperature", temperature_of(of_first)),
        "seed": used_seed,
        "sites_left_out": ", ".join(name for name in latents if name not in kept),
    }
    return assemble(groups, attributes, coords or {}, dims or {})


def _scored_by(rule: PredictionRule, count: int) -> PredictionRule:
    """Return the rule whose distributions score the observations: draws, if the rule's distribution averages them."""
    if isinstance(rule, OfMembers):
        return OfMembers(tuple(_scored_by(own, count // len(rule.rules)) for own in rule.rules))
    if isinstance(rule, Linearised):  # drawn weights lie where the Gaussian is not accurate
        return LinearisedDraws(rule.link, rule.noise, rule.num_points, count)
    return Samples(count) if isinstance(rule, Moments) else rule


def _warn_of_few_scores(groups: Groups, rule: PredictionRule) -> None:
    """Warn if equal draws leave ArviZ too few log-likelihoods: it fits a tail of five values, a fifth of the draws."""
    for name, scores in groups["log_likelihood"].arrays.items():
        draws = scores[0].reshape(scores.shape[1], -1)
        if (distinct := len(np.unique(draws.sum(1)))) < min(len(draws), 25):
            only = "a point estimate" if distinct == 1 else f"{distinct} point estimates"
            warn(
                f"{rule} scores {name!r} with {only}, for which leave-one-out by importance sampling (az.loo, "
                "az.compare) fails or is only the training log-likelihood: compare methods with "
                "diagnostics.compare_held_out, or export posterior draws with method=Samples(500)"
            )
            return


def _predict(
    groups: Groups,
    of_inputs: str,
    model: Callable[..., Any],
    guide: Callable[..., Any],
    data: Iterable[Batch],
    predicted: Mapping[str, Sequence[ObservedSite]],
    kept: Sequence[str],
    seed: int,
) -> None:
    """Predict all batches, and add predictions and inputs to their groups.

    Raises:
        DataError: if draws of the sites ``kept`` depend on the inputs, so that each batch has its own posterior.
    """
    inputs = []
    first: dict[str, Any] = {}
    for batch in data:
        torch.manual_seed(seed)
        latents = example_latents(guide, batch.inputs)
        nodes = observed_run(model, batch, latents)
        for own in chain(*predicted.values()):
            own.add(batch, nodes, latents)
        drawn = {name: latents[name] if name in latents else nodes[name]["value"] for name in kept}
        first = first or drawn
        changed = [name for name in kept if not torch.equal(first[name], drawn[name])]
        if changed:
            raise DataError(
                f"the posterior of sites {changed} depends on the inputs, so it differs between batches. Pass all data "
                "in one batch (a tuple, with a large batch_size), or sites=[] to export only predictions"
            )
        inputs.append(batch.inputs)
    for group, sites in predicted.items():
        for own in sites:
            own.put_into(groups, group)
    add_inputs(groups[of_inputs], model, inputs, own.dims[0])


def _rule_and_count(
    given: GivenSamples | None, method: Any, guide: Any, num_samples: int | None
) -> tuple[PredictionRule, int]:
    """Return the prediction rule, and the number of draws of each site."""
    if num_samples is not None:
        check_count("num_samples", num_samples)
    if given is not None and method is not None:
        raise ArgumentError(
            f"given draws are used for predictions directly, without a prediction rule: omit method={method!r}"
        )
    rule = rule_of(method, guide) if given is None else given
    of_weights = draws_weights(rule)
    if method is None and given is None and of_weights:  # as many draws as requested
        rule = with_draws(rule, num_samples or 500)
    components = rule.num_components
    several = of_weights or (components > 1 and not rule.keeps_components)
    count = num_samples or (components if several else 500 // components * components)
    if count % components or (of_weights and count != components):
        raise ArgumentError(
            f"num_samples={num_samples} does not suit method={rule}, which takes from {components} distributions "
            f"{'one draw' if of_weights else 'the same number of draws'} each: omit num_samples"
        )
    return rule, count
