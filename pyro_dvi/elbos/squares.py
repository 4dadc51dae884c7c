# SPDX-License-Identifier: Apache-2.0
r"""Measure :math:`\sum_s \mathrm{scale}_s \sum_i g_{si}^2` for the latents of a model."""

import math
import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.per_example import Use
from pyro_dvi.curvature.squared_gradients import SquaredGradients, passes_of, squares_without_rules
from pyro_dvi.errors import DviWarning

__all__ = ["SquareMeasurement"]

_MANY_PASSES = 32
Served = dict[int, list[Use]]
Add = Callable[[int, Tensor], None]


class SquareMeasurement:
    """Knows which layers keep examples apart, and which latents the user was warned about.

    With one observed site whose examples form one dimension, squares come out of the backward pass of the loss. With
    several sites, or weights for single examples, every site gets a backward pass of its own; with more batch
    dimensions, every index of the others does. What no layer with a rule uses gets a pass per example, or per element.
    """

    def __init__(self) -> None:
        self._mixed: dict[tuple, set[int]] = {}
        self._warned: set[str] = set()

    def measure(
        self,
        recorder: SquaredGradients,
        names: Sequence[str],
        values: Sequence[Tensor],
        wanted: set[int],
        local: set[int],
        sites: Sequence[ObservedSite],
        num_particles: int,
        add: Add,
    ) -> None:
        """Add the squares of one draw, now or in the next backward pass of the loss.

        Args:
            recorder: watched the model's run.
            names: latent sites, for warnings.
            values: the draws.
            wanted: indices of the latents to measure.
            local: indices of those whose elements belong to one example each.
            sites: the observed sites and factors.
            num_particles: K; squares are averaged over the draws, and gradients of the loss carry 1/K.
            add: called with an index and squares.
        """
        if len(sites) > 1 or len(sites[0].fn.batch_shape) != 1 or torch.is_tensor(sites[0].scale):
            for site in sites:
                self._site_by_itself(recorder, names, values, wanted, site, num_particles, add)
            return
        # The gradients that come by carry scale/K. Squares shall carry the scale once, and be a mean over K draws.
        (site,), weight = sites, num_particles / float(sites[0].scale)
        alone = wanted & local
        log_prob = site.log_prob(site.value)
        served = self._served(recorder, wanted - alone, log_prob)
        rest = wanted - alone - served.keys()
        self._without_rules(recorder, names, values, rest, site, log_prob, num_particles, add)
        recorder.watch(served, lambda k, squares: add(k, weight * squares))
        for k in alone:
            values[k].register_hook(lambda gradient, k=k: add(k, weight * gradient.square()))

    def _site_by_itself(
        self,
        recorder: SquaredGradients,
        names: Sequence[str],
        values: Sequence[Tensor],
        wanted: set[int],
        site: ObservedSite,
        num_particles: int,
        add: Add,
    ) -> None:
        log_prob = site.log_prob(site.value)
        axis = 0
        served: Served = {}
        for n in range(log_prob.dim()):
            candidate = self._served(recorder, wanted, log_prob.movedim(n, 0).flatten(1).sum(1))
            if len(candidate) > len(served):
                axis, served = n, candidate
        if served:
            root = _root(site, log_prob).movedim(axis, 0).flatten(1)
            columns = log_prob.movedim(axis, 0).flatten(1)
            for n in range(columns.shape[1]):
                found = recorder.measured(served, columns[:, n], root[:, n])
                for k, squares in found.items():
                    add(k, squares / num_particles)
        self._without_rules(
            recorder, names, values, wanted - served.keys(), site, log_prob, num_particles, add
        )

    def _without_rules(
        self,
        recorder: SquaredGradients,
        names: Sequence[str],
        values: Sequence[Tensor],
        rest: set[int],
        site: ObservedSite,
        log_prob: Tensor,
        num_particles: int,
        add: Add,
    ) -> None:
        if not rest:
            return
        ordered = sorted(rest)
        slow = [values[k] for k in ordered]
        if log_prob.requires_grad:
            several = [k for k in ordered if passes_of(log_prob, [values[k]]) > _MANY_PASSES]
            self._warn(recorder, names, several, site, log_prob.numel())
        squares = squares_without_rules(log_prob, _root(site, log_prob), slow)
        for k, total in zip(ordered, squares, strict=True):
            add(k, total / num_particles)

    def _served(self, recorder: SquaredGradients, wanted: set[int], outputs: Tensor) -> Served:
        """Return the uses of the latents whose layers keep the entries of ``outputs`` apart in their rows."""
        served = {k: uses for k, uses in recorder.served(len(outputs)).items() if k in wanted}
        calls = tuple((k, use.function, use.shape) for k, uses in served.items() for use in uses)
        key = (len(outputs), calls)
        if key not in self._mixed:  # examined once for every layout of a minibatch
            self._mixed[key] = recorder.mixed(served, outputs)
        return {k: uses for k, uses in served.items() if k not in self._mixed[key]}

    def _warn(
        self,
        recorder: SquaredGradients,
        names: Sequence[str],
        rest: Sequence[int],
        site: ObservedSite,
        passes: int,
    ) -> None:
        for k in rest:
            if names[k] not in self._warned:
                self._warned.add(names[k])
                warnings.warn(
                    f"latent site {names[k]!r} {recorder.obstacle(k)}, so its squared gradients take one backward pass "
                    f"per example: {passes} in each step for observed site {site.name!r}. That is exact but slow. Use "
                    "the weight in a layer such as F.linear as it is, register a rule with "
                    "pyro_dvi.curvature.per_example.per_example_rule, take smaller minibatches, or use IVON, which "
                    "needs no gradients of examples.",
                    DviWarning,
                    stacklevel=2,
                )


def _root(site: ObservedSite, log_prob: Tensor) -> Tensor:
    """Square root of the scale of each entry."""
    if torch.is_tensor(site.scale):
        return site.scale.sqrt().to(log_prob).expand_as(log_prob)
    return log_prob.new_full((), math.sqrt(site.scale)).expand_as(log_prob)
