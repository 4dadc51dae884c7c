# SPDX-License-Identifier: Apache-2.0
r"""Draws of every observed site, log densities of the observations, and the inputs, collected batch by batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.analysis.arviz_export.groups import Group, Groups, as_array, plate_names
from pyro_dvi.core.arguments import parameter_names
from pyro_dvi.errors import DataError
from pyro_dvi.predictive.components import Components
from pyro_dvi.predictive.engine.inputs import Batch
from pyro_dvi.predictive.predictive_mixture import ObservationDraws
from pyro_dvi.runs.sites import choose_response, responses

MAX_INPUT_VALUES = 1_000_000  # inputs with more values are not copied


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
        is_scored: True to score observations; the site is then conditioned on the observations of the other sites. If
            one site depends on another, the conditioning follows the order of the sites in the model, so that the
            product of the densities of all sites is the likelihood.
    """

    def __init__(
        self, name: str, components: Components, count: int, seed: int, *, is_scored: bool = False
    ) -> None:
        self.name, self.dims = name, list[str | None]()
        self._components, self._count, self._is_scored = components, count, is_scored
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
        given = [name for name in responses(nodes, latents) if nodes[name]["is_observed"] and self._is_scored]
        if self._is_scored and batch.observed is not None and self.name not in given:
            raise DataError(
                f"site {self.name!r} is not observed when the model is called with these data. Name the argument that "
                "contains the observations with observed=..., or choose another site with site=..."
            )
        node = nodes[self.name]
        observed = node if self.name in given else None
        draws = ObservationDraws(self._count, self._components.count, self._seeds, observed)
        others = {name: nodes[name]["value"] for name in given if name != self.name}
        self._components.read(draws, batch, self.name, others)
        fn, axis = draws.first.distribution, draws.first.axis
        axis_of_value = axis - len(fn.event_shape)
        self._drawn.append(as_array(draws.values))
        self.dims = plate_names(node, fn.batch_shape + fn.event_shape)
        self.dims.insert(0, self.dims.pop(axis_of_value))
        if observed is not None:
            value = observed["value"]
            counts = torch.ones_like(value, dtype=torch.bool) if draws.counts is None else draws.counts
            observations, kept = (as_array(each.movedim(axis_of_value, 0)) for each in (value, counts))
            self._scores.append((as_array(draws.log_prob), observations, kept))

    def put_into(self, groups: Groups, predictive: str) -> None:
        """Add the draws to the group ``predictive``, and log densities and observed values to theirs."""
        groups[predictive].add(self.name, np.concatenate(self._drawn, 1), self.dims)
        if not self._scores:
            return
        log_probs, values, counts = zip(*self._scores, strict=True)
        log_prob, kept = np.concatenate(log_probs, 1), np.concatenate(counts) > 0
        if len(log_prob) > 1:  # ArviZ cannot use a log-likelihood that is the same for every draw
            log_prob = log_prob.repeat(self._count // len(log_prob), 0)
            scored = np.asarray(kept.any(tuple(range(log_prob.ndim - 1, kept.ndim))))
            groups["log_likelihood"].add(self.name, log_prob, self.dims, scored)
        groups["observed_data"].add(self.name, np.concatenate(values), self.dims, kept)


def add_inputs(
    group: Group, model: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], rows: str | None
) -> list[str]:
    """Join the inputs of all batches, and return the names of inputs that are too big to copy or are not tensors.

    Args:
        group: the group of the inputs.
        model: the Pyro model.
        inputs: the model's arguments in every batch.
        rows: name of the dimension of examples, if known.
    """
    names, left_out = parameter_names(model, len(inputs[0])), []
    for name, values in zip(names, zip(*inputs, strict=False), strict=False):
        are_rows = all(torch.is_tensor(value) and value.dim() for value in values)
        if are_rows and sum(value.numel() for value in values) <= MAX_INPUT_VALUES:
            group.add(
                name, np.concatenate([as_array(value) for value in values]), [None if rows in names else rows]
            )
        elif values[0] is not None:
            left_out.append(name)
    return left_out
