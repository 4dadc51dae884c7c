# SPDX-License-Identifier: Apache-2.0
r"""Draws of latent and observed sites, the log densities of these draws and of the observations, and the inputs."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to

from pyro_dvi.analysis.arviz_export.groups import Group, Groups, as_array, plate_names
from pyro_dvi.core.arguments import parameter_names
from pyro_dvi.core.distributions import broadcasts_to
from pyro_dvi.core.undisturbed import seeder
from pyro_dvi.errors import ArgumentError, DataError, warn
from pyro_dvi.predictive.components import Components
from pyro_dvi.predictive.engine.inputs import Batch
from pyro_dvi.predictive.engine.model_runs import Latents, observed_run, sites_at
from pyro_dvi.predictive.engine.posterior_values import traced_draws
from pyro_dvi.predictive.predictive_mixture import ObservationDraws
from pyro_dvi.predictive.rules.rule import FromDraws
from pyro_dvi.runs.sites import choose_response, is_deterministic, is_latent, responses, sites_of

MAX_INPUT_VALUES = 1_000_000  # inputs with more values are not copied


class GivenSamples(FromDraws):
    """Average the predictions of draws that are given, for example from MCMC, ``Predictive``, or another program.

    Args:
        samples: ``[num_samples, ...]`` by site name, as returned by ``MCMC.get_samples()``.
        device: device of the model; None leaves the draws where they are.
    """

    def __init__(self, samples: Mapping[str, Any], device: torch.device | None = None) -> None:
        self.samples = {name: torch.as_tensor(values, device=device) for name, values in samples.items()}
        self.num_samples = min(map(len, self.samples.values()))

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

    def fit_to(self, model: Callable[..., Any], batch: Batch) -> None:
        """Compare the shapes of the draws with the model, and drop leading dimensions of length 1 that its sites lack.

        ``Predictive`` adds such dimensions for plates that a model may have.

        Raises:
            ArgumentError: if draws have the wrong shape.
        """
        try:
            nodes = observed_run(model, batch, {})
        except NotImplementedError:  # an improper prior
            nodes = observed_run(model, batch, next(self.draws(model, ())))
        for name in self.samples.keys() & nodes.keys():
            values, shape = self.samples[name], tuple(nodes[name]["fn"].shape())
            while values.dim() - 1 > len(shape) and values.shape[1] == 1:
                values = values.squeeze(1)
            if not broadcasts_to(tuple(values.shape[1:]), shape):
                raise ArgumentError(
                    f"a draw of site {name!r} has the shape {tuple(values.shape[1:])}, but its value in the model has "
                    f"the shape {shape}. Pass draws as [num_samples, ...], chains concatenated (MCMC.get_samples() "
                    "without group_by_chain), and data for a site with one value per example in one batch"
                )
            self.samples[name] = values


def chosen_sites(
    latents: Mapping[str, Tensor], sites: str | Sequence[str] | None, max_size: int
) -> list[str]:
    """Return the given names of latent and deterministic sites; without names, the latent sites of small size."""
    if sites is None:
        left_out = {name: value.numel() for name, value in latents.items() if value.numel() > max_size}
        if left_out:
            warn(
                f"the exported posterior omits sites with more than {max_size:,} values (name them in sites=[...]): "
                f"{', '.join(f'{name!r} ({size:,})' for name, size in left_out.items())}"
            )
        return [name for name in latents if name not in left_out]
    return [sites] if isinstance(sites, str) else list(sites)


def add_latents(
    group: Group,
    model: Callable[..., Any],
    batch: Batch,
    nodes: Mapping[str, Any],
    names: Sequence[str],
    draws: Iterable[Latents],
    *,
    log_prior: bool = False,
) -> None:
    r"""Add draws of latent sites, and of deterministic sites, which the model computes for each draw.

    Args:
        group: the group of the draws.
        model: the Pyro model.
        batch: arguments of the model.
        nodes: the sites of a run of the model with this batch, from which the names of plates are read.
        names: sites to export; if empty, nothing is drawn.
        draws: draws of all latent sites.
        log_prior: True to add :math:`\log p(\theta_s \mid \mathrm{parents})` of the latent sites in place of the draws.
    """
    wanted = is_latent if log_prior else is_deterministic
    computed = [name for name, node in nodes.items() if name in names and wanted(node)]
    run = sites_at(model, *batch.whole, computed)
    pieces: dict[str, list[np.ndarray]] = {name: [] for name in (computed if log_prior else names)}
    for latents in draws if pieces else ():
        sites = run(latents) if computed else {}
        found = {n: s["fn"].log_prob(s["value"]) if log_prior else s["value"] for n, s in sites.items()}
        for name, own in pieces.items():
            own.append(as_array({**latents, **found}[name]))
    for name, own in pieces.items():
        array = np.stack(own)
        events = nodes[name]["fn"].event_shape if log_prior else ()
        group.add(name, array, plate_names(nodes[name], array.shape[1:] + events) if name in nodes else ())


def add_sample_stats(groups: Groups, log_q: Tensor | None, *, are_scored: bool) -> None:
    r"""Add, if known, :math:`\log p(y, \theta)` of every draw as ``lp`` and :math:`\log q(\theta)` as ``log_q``.

    Args:
        groups: all groups, with the log prior.
        log_q: the result of :func:`log_posterior`.
        are_scored: True if the log-likelihoods are those of the draws of the posterior.
    """
    likelihoods = groups["log_likelihood"].arrays.values()
    if likelihoods and are_scored:
        terms = [array[0] for array in (*groups["log_prior"].arrays.values(), *likelihoods)]
        lp = np.sum([term.reshape(len(term), -1).sum(1, dtype=float) for term in terms], 0)
        groups["sample_stats"].add("lp", lp)
    if log_q is not None:
        groups["sample_stats"].add("log_q", as_array(log_q))


def log_posterior(
    guide: Callable[..., Any], batch: Batch, nodes: Mapping[str, Any], count: int, seed: int
) -> Tensor | None:
    """Return the log density of every draw under the guide, in constrained space; None if the guide has no density.

    Args:
        guide: the posterior.
        batch: arguments of the model.
        nodes: the sites of a run of the model with this batch.
        count: number of draws.
        seed: seed of the draws.
    """
    seeder()(seed)
    densities = []
    try:
        free = sum(_num_free(node) for node in nodes.values() if is_latent(node))
        for trace in traced_draws(guide, batch.inputs, count):
            drawn = sites_of(trace, is_latent)
            spread = [node["value"].numel() for node in drawn if not isinstance(node["fn"], dist.Delta)]
            if sum(spread) < free:  # some sites are point masses
                return None
            logs = [node["fn"].log_prob(node["value"]).double().sum() for node in drawn]
            densities.append(torch.stack(logs).sum())
    except NotImplementedError:  # values on a sphere, or a Laplace method without densities
        return None
    return torch.stack(densities)


def _num_free(node: Any) -> int:
    """Return the number of free values of a site: on a simplex, one less than the entries; zero for a discrete site."""
    support = node["fn"].support
    return 0 if support.is_discrete else math.prod(biject_to(support).inverse_shape(node["value"].shape))


def choose_responses(
    site: str | Sequence[str] | None, nodes: Mapping[str, Any], latents: Mapping[str, Tensor]
) -> list[str]:
    """Return the sites to export: those named by ``site``, or else all that the model observes.

    Raises:
        ModelError: if a named site is not observed, if the model has no observed site, or if the model has several and
            some of them observe nothing.
    """
    names = responses(nodes, latents)
    if site:
        return [choose_response(name, names) for name in ([site] if isinstance(site, str) else site)]
    if len(names) > 1 and all(nodes[name]["is_observed"] for name in names):
        return names
    return [choose_response(None, names)]


class ObservedSite:
    r"""Draws of one observed site with one rule, and the log densities of its observations, batch by batch.

    The dimension of draws comes first, and the dimension of examples second. The noise has its own seed, because
    batches share the draws of the weights but not the noise.

    Args:
        name: name of the site.
        components: yields the predictive distributions of the site.
        count: total number of draws.
        seed: seed of the noise.
        scored: yields the distributions whose densities of the observations are stored, with equally many draws of
            each; None to score no observations. If observations are scored, the site is conditioned on the observations
            of the other sites. If one site depends on another, the conditioning follows the order of the sites in the
            model, so that the product of the densities of all sites is the likelihood.
    """

    def __init__(
        self, name: str, components: Components, count: int, seed: int, *, scored: Components | None = None
    ) -> None:
        self.name, self.dims = name, list[str | None]()
        self._components, self._count, self._scored = components, count, scored
        self._seeds = torch.Generator().manual_seed(seed)
        self._drawn: list[np.ndarray] = []
        self._scores: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []  # log densities, values, and masks

    def add(self, batch: Batch, nodes: Mapping[str, Any], latents: Mapping[str, Tensor]) -> None:
        """Add a batch.

        Args:
            batch: arguments of the model.
            nodes: the sites of a run of :func:`~pyro_dvi.predictive.engine.model_runs.observed_run`.
            latents: the latent values of this run.

        Raises:
            DataError: if the data contain an observation, but not of this site, or if observations have the wrong shape
                or lie outside the support.
            UnsupportedError: if a mask depends on the draw, or excludes parts of events.
        """
        given = [name for name in responses(nodes, latents) if nodes[name]["is_observed"] and self._scored]
        if self._scored and batch.observed is not None and self.name not in given:
            raise DataError(
                f"site {self.name!r} is not observed when the model is called with these data. Name the argument that "
                "contains the observations with observed=..., or choose another site with site=..."
            )
        node = nodes[self.name]
        observed = node if self.name in given else None
        draws = ObservationDraws(self._count, self._components.count, self._seeds, observed)
        others = {name: nodes[name]["value"] for name in given if name != self.name}
        self._components.read(draws, batch, self.name, others)
        scores = draws
        if observed is not None and self._scored not in (None, self._components):
            scores = ObservationDraws(self._scored.count, self._scored.count, self._seeds, observed)
            self._scored.read(scores, batch, self.name, others)
        fn, axis = draws.first.distribution, draws.first.axis
        axis_of_value = axis - len(fn.event_shape)
        self._drawn.append(as_array(draws.values))
        self.dims = plate_names(node, fn.batch_shape + fn.event_shape)
        self.dims.insert(0, self.dims.pop(axis_of_value))
        if observed is not None:
            value = observed["value"]
            counts = torch.ones_like(value, dtype=torch.bool) if scores.counts is None else scores.counts
            observations, kept = (as_array(each.movedim(axis_of_value, 0)) for each in (value, counts))
            self._scores.append((as_array(scores.log_prob), observations, kept))

    def put_into(self, groups: Groups, predictive: str) -> None:
        """Add the draws to the group ``predictive``, and log densities and observed values to theirs."""
        groups[predictive].add(self.name, np.concatenate(self._drawn, 1), self.dims)
        if not self._scores:
            return
        log_probs, values, counts = zip(*self._scores, strict=True)
        log_prob, kept = np.concatenate(log_probs, 1), np.concatenate(counts) > 0
        log_prob = log_prob.repeat(self._count // len(log_prob), 0)
        scored = np.asarray(kept.any(tuple(range(log_prob.ndim - 1, kept.ndim))))
        groups["log_likelihood"].add(self.name, log_prob, self.dims, scored)
        groups["observed_data"].add(self.name, np.concatenate(values), self.dims, kept)


def add_inputs(
    group: Group, model: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], rows: str | None
) -> None:
    """Join the inputs of all batches; inputs that are too big to copy or are not tensors are left out.

    Args:
        group: the group of the inputs.
        model: the Pyro model.
        inputs: the model's arguments in every batch.
        rows: name of the dimension of examples, if known.
    """
    names = parameter_names(model, len(inputs[0]))
    for name, values in zip(names, zip(*inputs, strict=False), strict=False):
        are_rows = all(torch.is_tensor(value) and value.dim() for value in values)
        if are_rows and sum(value.numel() for value in values) <= MAX_INPUT_VALUES:
            group.add(
                name, np.concatenate([as_array(value) for value in values]), [None if rows in names else rows]
            )
