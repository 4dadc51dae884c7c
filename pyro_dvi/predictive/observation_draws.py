# SPDX-License-Identifier: Apache-2.0
"""Draws of observations from the predictive distributions of one batch, and the densities of what was observed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.distributions import tensors_of, with_tensors
from pyro_dvi.core.undisturbed import seeder
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.predictive.batch_prediction import as_drawn, both_masks, check_events, checked_log_prob
from pyro_dvi.predictive.engine.model_runs import Response
from pyro_dvi.runs.sites import counted


@dataclass(frozen=True)
class Observation:
    """Observed values of one site in one batch.

    Attributes:
        value: of the shape of one draw.
        counts: which of them the model does not mask, of the same shape; None if all count.
    """

    value: Tensor
    counts: Tensor | None


class ObservationDraws:
    """Reads the components of one batch: the same number of draws from each, on the CPU.

    A component of a vectorised run is put together again from its parameters, and draws with the seed that it would
    have in a loop.

    Args:
        count: draws in all.
        num_components: distributions that they come from, in equal shares.
        seeds: gives the seed of each component's draws.
        observed: what to score; None where there is nothing.

    Attributes:
        values: the draws, ``[count, N, ...]``.
        log_prob: log density of what was observed by component, ``[num_components, N, ...]``.
        counts: which of the observed values count, of the shape of one draw; None if all do.
        first: the first component.
    """

    first: Response
    values: Tensor
    log_prob: Tensor

    def __init__(
        self, count: int, num_components: int, seeds: torch.Generator, observed: Observation | None = None
    ) -> None:
        self.observed = observed
        self.counts = None if observed is None else observed.counts
        self._count, self._num_components, self._seeds = count, num_components, seeds
        self._seed_all = seeder()
        self._added = 0
        self._draw: Tensor  # the first of a component
        self._made: Any  # a component of a run without checks, for its structure

    def add(self, response: Response) -> None:
        """Add a component.

        Raises:
            DataError: what was observed has another shape than the draws, or is impossible.
            UnsupportedError: a mask that depends on the draw, or cuts observations that are scored as a whole.
        """
        fn = response.distribution
        if self._added == 0:
            self.first = response
            self.counts = both_masks(self.counts, response.mask)
            if self.observed is not None:
                check_events(fn, self.counts, response.site)
        self.sample(fn)
        if self.observed is not None:
            self._check_mask(self._whole(response.mask, fn))
            self._score(checked_log_prob(fn, self._scored(), response.site)[None])
        self._added += 1

    def statistics(self, node: Any) -> dict[str, Tensor]:
        """Return the parameters of a component, and its mask and the log density of what was observed."""
        fn = self._made = node["fn"]
        found = {}
        if self.observed is not None:
            found["mask"] = self._whole(counted(node), fn)
            found["log_prob"] = fn.log_prob(as_drawn(fn, self._scored()))
        # At last: a density may leave further tensors in its distribution.
        return found | {str(i): tensor for i, tensor in enumerate(tensors_of(fn, strict=True))}

    def add_statistics(self, many: Mapping[str, Tensor], count: int) -> None:
        """Add components by what :meth:`statistics` gives for them."""
        if self.observed is not None:
            self._check_mask(many["mask"])
            self._score(many["log_prob"])
        tensors = [value for name, value in many.items() if name.isdigit()]
        for k in range(count):
            self.sample(with_tensors(self._made, [tensor[k] for tensor in tensors]))
            self._added += 1

    def sample(self, fn: Any) -> None:
        """Draw from a component."""
        self._seed_all(int(torch.randint(2**31 - 1, (), generator=self._seeds)))
        share = self._count // self._num_components
        drawn = fn.sample((share,))
        self._draw = drawn[0]
        rows = drawn.movedim(self.first.axis - len(fn.event_shape), 1)
        if self._added == 0:
            self.values = torch.empty((self._count, *rows.shape[1:]), dtype=rows.dtype)
        self.values[self._added * share : (self._added + 1) * share] = rows

    def _scored(self) -> Tensor:
        """Return what was observed; what stands in a masked place need not be possible, and a draw takes it."""
        assert self.observed is not None, "there is something to score"
        value = self.observed.value
        return value if self.counts is None else torch.where(self.counts, value, self._draw.to(value))

    def _score(self, log_prob: Tensor) -> None:
        rows = log_prob.movedim(self.first.axis, 1)
        if self._added == 0:
            self.log_prob = torch.empty((self._num_components, *rows.shape[1:]), dtype=rows.dtype)
        self.log_prob[self._added : self._added + len(rows)] = rows

    def _whole(self, mask: Tensor | None, fn: Any) -> Tensor:
        assert self.observed is not None, "there is something to mask"
        shape, device = fn.batch_shape + fn.event_shape, self.observed.value.device
        return torch.ones(shape, dtype=torch.bool, device=device) if mask is None else mask

    def _check_mask(self, masks: Tensor) -> None:
        if not bool((masks == self._whole(self.first.mask, self.first.distribution)).all()):
            raise UnsupportedError(
                f"the mask of site {self.first.site!r} depends on the latent values: which observations count then "
                "differs between draws, and log_likelihood has no common length. Export inputs alone"
            )
