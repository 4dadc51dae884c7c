# SPDX-License-Identifier: Apache-2.0
r"""Draws of every observed site, log densities of the observations, and the inputs, collected batch by batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.analysis.arviz_export.groups import Group, as_array, joined, plate_names
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


def _observations(batch: Batch, sites: Sequence[str], nodes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sites that are observed in a run of :func:`~pyro_dvi.predictive.engine.model_runs.observed_run`.

    Raises:
        DataError: if the data contain an observation, but a site is not observed.
    """
    found = {}
    for name in sites:
        node = nodes[name]
        if node["is_observed"]:
            found[name] = node
        elif batch.observed is not None:
            raise DataError(
                f"site {name!r} is not observed when the model is called with these data. Name the argument that "
                "contains the observations with observed=..., or choose another site with site=..."
            )
    return found


class Predictions:
    r"""Predictions of every observed site with one rule, batch by batch.

    Args:
        sites: the observed sites.
        components: yields the predictive distributions of the sites.
        count: total number of draws.
        noise_seed: seed of the noise of the first site; the other sites use the following integers.
        are_scored: True to score observations; each site is then conditioned on the observations of the others. If one
            site depends on another, the conditioning follows the order of the sites in the model, so that the product
            of the densities of all sites is the likelihood.
    """

    def __init__(
        self, sites: Sequence[str], components: Components, count: int, noise_seed: int, *, are_scored: bool
    ) -> None:
        self._sites = [_Site(name, components, count, noise_seed + s) for s, name in enumerate(sites)]
        self._are_scored = are_scored

    def add(self, batch: Batch, nodes: Mapping[str, Any], latents: Mapping[str, Tensor]) -> None:
        """Add a batch.

        Args:
            batch: arguments of the model.
            nodes: the sites of a run of :func:`~pyro_dvi.predictive.engine.model_runs.observed_run`.
            latents: the latent values of this run.

        Raises:
            DataError: if only some batches contain observations, or if observations have the wrong shape or lie outside
                the support.
            UnsupportedError: if a mask depends on the draw, or excludes parts of events.
        """
        names = [own.name for own in self._sites]
        found = _observations(batch, names, nodes) if self._are_scored else {}
        observed = {name for name in responses(nodes, latents) if nodes[name]["is_observed"]}
        for own in self._sites:
            given = observed - {own.name} if self._are_scored else ()
            others = {name: nodes[name]["value"] for name in given}
            own.add(batch, nodes[own.name], found.get(own.name), others)

    def groups(self) -> tuple[Group, Group, Group]:
        """Return draws of the observations, log densities of the observed values, and the observed values."""
        drawn, densities, observed = Group(), Group(), Group(sampled=False)
        for own in self._sites:
            own.predictive(drawn)
            own.log_likelihood(densities, observed)
        return drawn, densities, observed

    @property
    def rows(self) -> str | None:
        """Name of the dimension of examples, if it belongs to a plate."""
        return self._sites[0].dims[0]


class _Site:
    """Predictions of one site; the dimension of draws comes first, and the dimension of examples second.

    The noise has its own seed, because batches share the draws of the weights but not the noise.
    """

    def __init__(self, name: str, components: Components, count: int, seed: int) -> None:
        self.name = name
        self.dims: list[str | None] = []
        self._components, self._count = components, count
        self._seeds = torch.Generator().manual_seed(seed)
        self._drawn: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []
        self._observed: list[np.ndarray] = []
        self._cells: list[np.ndarray] = []

    def add(self, batch: Batch, node: Any, observed: Any, others: Mapping[str, Tensor]) -> None:
        if self._drawn and bool(self._log_probs) != (observed is not None):
            raise DataError(
                f"only some batches contain observations of site {self.name!r}: pass all observations, or inputs alone"
            )
        draws = ObservationDraws(self._count, self._components.count, self._seeds, observed)
        self._components.read(draws, batch, self.name, others)
        fn, axis = draws.first.distribution, draws.first.axis
        event_dim = len(fn.event_shape)
        self._drawn.append(as_array(draws.values))
        self.dims = plate_names(node, fn.batch_shape + fn.event_shape)
        self.dims.insert(0, self.dims.pop(axis - event_dim))
        if observed is not None:
            value = observed["value"]
            counts = torch.ones_like(value, dtype=torch.bool) if draws.counts is None else draws.counts
            self._log_probs.append(as_array(draws.log_prob))
            self._observed.append(as_array(value.movedim(axis - event_dim, 0)))
            self._cells.append(as_array(counts.movedim(axis - event_dim, 0)) > 0)

    def predictive(self, group: Group) -> None:
        group.add(self.name, joined(self._drawn, 1), self.dims)

    def log_likelihood(self, densities: Group, observed: Group) -> None:
        """Add the log densities and the observed values, if there are any."""
        if not self._log_probs:
            return
        log_probs, cells = joined(self._log_probs, 1), joined(self._cells, 0)
        if len(log_probs) > 1:  # ArviZ cannot use a log-likelihood that is the same for every draw
            share = self._count // len(log_probs)
            log_probs = log_probs if share == 1 else log_probs.repeat(share, 0)
            scored = np.asarray(cells.any(tuple(range(log_probs.ndim - 1, cells.ndim))))
            densities.add(self.name, log_probs, self.dims, scored)
        observed.add(self.name, joined(self._observed, 0), self.dims, cells)


def inputs_of(
    model: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], rows: str | None
) -> tuple[Group, list[str]]:
    """Join the inputs of all batches.

    Args:
        model: the Pyro model.
        inputs: the model's arguments in every batch; a nested argument is named by its path, such as ``image.left``.
        rows: name of the dimension of examples, if known.

    Returns:
        The group, and the names of inputs that are too big to copy.
    """
    names = parameter_names(model, len(inputs[0]))
    pieces: dict[str, list[Tensor]] = {}
    for arguments in inputs:
        for name, argument in zip(names, arguments, strict=False):
            for path, tensor in _tensors(name, argument):
                pieces.setdefault(path, []).append(tensor)
    group, left_out = Group(sampled=False), []
    for path, tensors in pieces.items():
        if sum(t.numel() for t in tensors) > MAX_INPUT_VALUES:
            left_out.append(path)
        elif len(tensors) == len(inputs):
            group.add(path, joined([as_array(t) for t in tensors], 0), [rows])
    return group, left_out


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    if torch.is_tensor(value):
        if value.dim() > 0:
            yield name, value
    elif isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(f"{name}.{key}", part)
    elif isinstance(value, (tuple, list)):
        for i, part in enumerate(value):
            yield from _tensors(f"{name}.{i}", part)
