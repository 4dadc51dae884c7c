# SPDX-License-Identifier: Apache-2.0
r"""Measure :math:`\sum_s \mathrm{scale}_s \sum_i g_{si}^2` for the latents of a model."""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.autograd_graph import graph_of
from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.squared_gradients import passes_of, squares_without_rules
from pyro_dvi.errors import UnsupportedError, warn
from pyro_dvi.natural_gradients.rows import RowCheck, Run, Served, View

_MANY_PASSES = 32


@dataclass(frozen=True)
class Draw:
    """What squares are measured of, and where they go.

    Attributes:
        run: of the model, with the drawn latents.
        names: latent sites, for warnings.
        values: what was drawn of each.
        num_particles: K; squares are averaged over the draws, and gradients of the loss carry 1/K.
        add: called with an index, squares, and the power of the factor of the loss that they lack as gradients.
    """

    run: Run
    names: Sequence[str]
    values: Sequence[Tensor]
    num_particles: int
    add: Callable[[int, Tensor, int], None]


class SquareMeasurement:
    """Knows which layers keep examples apart, and which latents and sites the user was warned about.

    With one observed site whose examples form one dimension, squares come out of the backward pass of the loss. With
    several sites, or weights for single examples, every site gets a backward pass of its own; with more batch
    dimensions, every index of the others does. What no layer with a rule uses gets a pass per example, or per element.
    """

    def __init__(self) -> None:
        self._rows = RowCheck()
        self._warned: set[str] = set()

    def measure(self, draw: Draw, local: set[int]) -> None:
        """Add the squares of one draw, now or in the next backward pass of the loss.

        Args:
            draw: of the latents.
            local: indices of those whose elements seem to belong to one example each, by their plate.

        Raises:
            UnsupportedError: the model uses reentrant checkpointing.
        """
        run, values, sites = draw.run, draw.values, draw.run.sites
        wanted = set(range(len(values)))
        graph = graph_of([run.log_prob(place) for place in range(len(sites))])
        _refuse_checkpoints(graph)
        for k in [k for k in wanted if values[k].grad_fn not in graph]:  # no observation depends on it
            draw.add(k, torch.zeros_like(values[k]), 1)
            wanted = wanted - {k}
        if len(sites) > 1 or not _is_plain(sites[0]):
            for place in range(len(sites)):
                self._site_by_itself(draw, wanted, place)
            return
        # The gradients that come by carry scale/K. Squares shall carry the scale once, and be a mean over K draws.
        (site,), weight = sites, draw.num_particles / float(sites[0].scale)
        log_prob, view = site.log_prob(site.value), View(0, 0)
        alone = self._rows.own(run, values, wanted & local, view, log_prob)
        uses = {k: calls for k, calls in run.recorder.uses().items() if k in wanted - alone}
        served = self._rows.served(run, uses, view, log_prob)
        self._without_rules(draw, wanted - alone - served.keys(), site, log_prob)

        add = draw.add  # hooks that held the draw would keep its graph alive

        def arrived(k: int, squares: Tensor) -> None:
            add(k, squares if weight == 1 else squares.mul_(weight), -1)

        run.recorder.watch(served, arrived)
        for k in alone:
            values[k].register_hook(lambda gradient, k=k: arrived(k, gradient.square()))

    def _site_by_itself(self, draw: Draw, wanted: set[int], place: int) -> None:
        run, site, log_prob = draw.run, draw.run.sites[place], draw.run.log_prob(place)
        axis = 0
        served: Served = {}
        # What this site does not depend on may have rows of its own.
        graph = graph_of([log_prob])
        wanted = {k for k in wanted if draw.values[k].grad_fn in graph}
        uses = run.uses(wanted, log_prob)
        for n in range(log_prob.dim()):
            view = View(place, n)
            candidate = self._rows.served(run, uses, view, view.outputs(log_prob))
            if len(candidate) > len(served):
                axis, served = n, candidate
        if served:
            rows = log_prob.shape[axis]
            root = _root(site, log_prob).movedim(axis, 0).reshape(rows, -1)
            columns = log_prob.movedim(axis, 0).reshape(rows, -1)
            self._warn_of_columns(site, log_prob, columns.shape[1])
            for n in range(columns.shape[1]):
                found = run.recorder.measured(served, columns[:, n], root[:, n])
                for k, squares in found.items():
                    draw.add(k, squares / draw.num_particles, 1)
        self._without_rules(draw, wanted - served.keys(), site, log_prob)

    def _without_rules(self, draw: Draw, rest: set[int], site: ObservedSite, log_prob: Tensor) -> None:
        if not rest:
            return
        ordered = sorted(rest)
        slow = [draw.values[k] for k in ordered]
        slow_by: dict[str, dict[str, None]] = {}
        for k in ordered if log_prob.requires_grad else ():
            name = draw.names[k]
            if name not in self._warned and passes_of(log_prob, [draw.values[k]]) > _MANY_PASSES:
                self._warned.add(name)
                alike = repr(re.sub(r"\.\d+(?=\.)", ".*", name))  # layers of one stack
                slow_by.setdefault(draw.run.recorder.obstacle(k), {})[alike] = None
        if slow_by:
            reasons = "; ".join(f"{', '.join(names)} {why}" for why, names in slow_by.items())
            self._warn_once(
                f"observed site {site.name!r}: some latents need one backward pass per example for their squared "
                f"gradients, {log_prob.numel()} in each step, which is exact but slow:",
                f"{reasons}. Use layers such as F.linear, write a per_example_rule, take smaller minibatches, or train "
                "with IVON, which needs no squares.",
            )
        squares = squares_without_rules(log_prob, _root(site, log_prob), slow)
        for k, total in zip(ordered, squares, strict=True):
            draw.add(k, total / draw.num_particles, 1)

    def _warn_of_columns(self, site: ObservedSite, log_prob: Tensor, passes: int) -> None:
        if passes > _MANY_PASSES:
            self._warn_once(
                f"observed site {site.name!r}",
                f"has the batch shape {tuple(log_prob.shape)}, and each entry is an example of its own: squared "
                f"gradients take {passes} backward passes in each step. If a row is one example, as an image is, say "
                f"so with .to_event({log_prob.dim() - 1}) on its distribution; or use IVON, which needs no gradients "
                "of examples.",
            )

    def _warn_once(self, site: str, trouble: str) -> None:
        if site not in self._warned:
            self._warned.add(site)
            warn(f"{site} {trouble}")


def _refuse_checkpoints(graph: set[Any]) -> None:
    if any(type(node).__name__ == "CheckpointFunctionBackward" for node in graph):
        raise UnsupportedError(
            "the model uses torch.utils.checkpoint.checkpoint(..., use_reentrant=True), which hides what its function "
            "does with weights, and allows no backward pass but that of the loss: pass use_reentrant=False"
        )


def _is_plain(site: ObservedSite) -> bool:
    """Whether examples form one dimension and have one weight, so that the loss's gradients tell their squares."""
    return len(site.fn.batch_shape) == 1 and not torch.is_tensor(site.scale) and site.scale > 0


def _root(site: ObservedSite, log_prob: Tensor) -> Tensor:
    """Square root of the scale of each entry."""
    if torch.is_tensor(site.scale):
        return site.scale.sqrt().to(log_prob).expand_as(log_prob)
    return log_prob.new_full((), math.sqrt(site.scale)).expand_as(log_prob)
