# SPDX-License-Identifier: Apache-2.0
"""Predictive draws and pointwise log densities of one observed site, batch after batch."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pyro_dvi.errors import DataError, UnsupportedError
from pyro_dvi.inference_data.arrays import as_array, joined
from pyro_dvi.inference_data.group import Group
from pyro_dvi.inference_data.names import plate_names
from pyro_dvi.inference_data.observations import Observation
from pyro_dvi.predictive.engine.run import Response
from pyro_dvi.predictive.prediction.component import both_masks, checked_log_prob, whole_events
from pyro_dvi.predictive.rules.rule import seed_all

__all__ = ["SiteExport"]


class SiteExport:
    """Fills one array a batch, component by component; examples come after the dimension of draws.

    Args:
        site: the observed site.
        count: draws in all.
        num_components: distributions that they come from, in equal shares.
        seed: of the noise. It has its own, since batches share the draws of the weights but not the noise.
    """

    def __init__(self, site: str, count: int, num_components: int, seed: int) -> None:
        self.site = site
        self._count, self._share = count, count // num_components
        self._seeds = torch.Generator().manual_seed(seed)
        self._drawn: list[np.ndarray] = []
        self._log_probs: list[np.ndarray] = []
        self._observed: list[np.ndarray] = []
        self._cells: list[np.ndarray] = []
        self._dims: list[str | None] = []
        self._batch_dims = 0

    def add(self, components: Iterable[Response], observation: Observation | None, node: Any) -> None:
        """Add a batch.

        Args:
            components: predictive distributions, one for each draw of the weights.
            observation: observed values; None where there are none.
            node: the site in a trace of the model.

        Raises:
            DataError: observations only in some batches, of another shape, or impossible.
            UnsupportedError: a mask that depends on the draw, or cuts events.
        """
        if self._drawn and bool(self._log_probs) != (observation is not None):
            raise DataError(
                f"some batches hold observations of site {self.site!r} and some do not: give all of them, or inputs "
                "alone"
            )
        first: Response | None = None
        counts: Tensor | None = None
        for k, response in enumerate(components):
            fn, axis = response.distribution, response.axis
            value_axis = axis - len(fn.event_shape)
            seed_all(int(torch.randint(2**31 - 1, (), generator=self._seeds)))
            values = fn.sample((self._share,))
            place = slice(k * self._share, (k + 1) * self._share)
            rows = as_array(values.movedim(value_axis, 1))
            if first is None:
                first = response
                self._drawn.append(np.empty((self._count, *rows.shape[1:]), rows.dtype))
                self._name_dims(node, response)
                if observation is not None:
                    counts = both_masks(observation.counts, response.mask)
            elif observation is not None and not _same(first.mask, response.mask):
                raise UnsupportedError(
                    f"the mask of site {self.site!r} depends on the latent values: which observations count then "
                    "differs between draws, and log_likelihood has no common length. Export inputs alone"
                )
            self._drawn[-1][place] = rows
            if observation is None:
                continue
            observed = observation.value
            if counts is not None:  # what fills a masked place need not be possible
                observed = torch.where(counts, observed, values[0].to(observed))
            log_prob = as_array(checked_log_prob(fn, observed, self.site).movedim(axis, 0))
            if k == 0:
                self._log_probs.append(np.empty((self._count, *log_prob.shape), log_prob.dtype))
                self._add_observed(observation.value, counts, response)
            self._log_probs[-1][place] = log_prob

    def predictive(self, group: Group) -> None:
        """Add the draws to a group."""
        group.add(self.site, joined(self._drawn, 1), self._dims)

    def log_likelihood(self, densities: Group, observed: Group) -> None:
        """Add the log densities and the observed values to their groups; nothing where nothing was observed.

        Where a mask leaves something out, both have one dimension of what is left, ``<site>_observed``, with the
        places in the (flattened) predictions as its coordinates.
        """
        if not self._log_probs:
            return
        log_probs, values = joined(self._log_probs, 1), joined(self._observed, 0)
        cells = joined(self._cells, 0)
        dims: Sequence[str | None] = self._dims
        if not cells.all():
            places = np.flatnonzero(cells)
            log_probs, values = log_probs[:, cells], values[cells]
            dims = [f"{self.site.replace('/', '.')}_observed", *self._dims[self._batch_dims :]]
            for group in (densities, observed):
                group.coords[str(dims[0])] = places
        if self._share < self._count:  # else the same for every draw, of which ArviZ can make nothing
            densities.add(self.site, log_probs, dims)
        observed.add(self.site, values, dims)

    def rows(self) -> str | None:
        """Return the name of the dimension of examples, if a plate gives one."""
        return self._dims[0]

    def _name_dims(self, node: Any, response: Response) -> None:
        fn = response.distribution
        shape = fn.batch_shape + fn.event_shape
        self._dims = plate_names(node, shape)
        self._dims.insert(0, self._dims.pop(response.axis - len(fn.event_shape)))
        self._batch_dims = len(fn.batch_shape)

    def _add_observed(self, value: Tensor, counts: Tensor | None, response: Response) -> None:
        fn, axis = response.distribution, response.axis
        event_dim = len(fn.event_shape)
        self._observed.append(as_array(value.movedim(axis - event_dim, 0)))
        if counts is None:
            cells = torch.ones(fn.batch_shape, dtype=torch.bool)
        else:
            cells = whole_events(counts, event_dim, self.site)
        self._cells.append(cells.movedim(axis, 0).cpu().numpy())


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first, second)
