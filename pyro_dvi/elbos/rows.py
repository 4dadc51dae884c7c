# SPDX-License-Identifier: Apache-2.0
"""Which layers of a model have its examples in their rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.per_example import Use
from pyro_dvi.curvature.per_example.uses import with_examples_first
from pyro_dvi.curvature.squared_gradients import SquaredGradients, graph_of

__all__ = ["RowCheck", "Run", "Served", "View"]

Served = dict[int, list[Use]]


@dataclass(frozen=True)
class Run:
    """What a run of the model left.

    Attributes:
        recorder: the uses of the latents.
        sites: the observed sites and factors.
        uncoupled: runs the model again in such a way that batch normalisation lets examples alone.
    """

    recorder: SquaredGradients
    sites: Sequence[ObservedSite]
    uncoupled: Callable[[], "Run"]

    def log_prob(self, place: int) -> Tensor:
        """Log-probabilities of a site."""
        site = self.sites[place]
        return site.log_prob(site.value)

    def uses(self, wanted: set[int], log_prob: Tensor) -> Served:
        """Uses of the wanted latents that ``log_prob`` depends on."""
        graph = graph_of([log_prob])
        uses = {k: calls for k, calls in self.recorder.uses().items() if k in wanted}
        return {k: [use for use in calls if use.output.node in graph] for k, calls in uses.items()}


@dataclass(frozen=True)
class View:
    """A batch dimension of an observed site, whose entries are taken as examples.

    Attributes:
        place: number of the site in the run.
        axis: the dimension.
    """

    place: int
    axis: int

    def outputs(self, log_prob: Tensor) -> Tensor:
        """Sum over all other batch dimensions."""
        return log_prob.movedim(self.axis, 0).reshape(log_prob.shape[self.axis], -1).sum(1)


class RowCheck:
    """Looks once at every layout of a minibatch, and remembers which rows were no examples."""

    def __init__(self) -> None:
        self._mixed: dict[tuple, set[int]] = {}

    def served(self, run: Run, uses: Served, view: View, outputs: Tensor) -> Served:
        """Keep the latents whose layers have the entries of ``outputs``, and nothing else, in their rows."""
        served = with_examples_first(uses, len(outputs))
        key = (view, len(outputs), _layout(served))
        if key not in self._mixed:
            self._mixed[key] = self._found_mixed(run, served, view, outputs)
        return {k: calls for k, calls in served.items() if k not in self._mixed[key]}

    def _found_mixed(self, run: Run, served: Served, view: View, outputs: Tensor) -> set[int]:
        if not run.recorder.couples_rows:
            return run.recorder.mixed(served, outputs)
        run = run.uncoupled()
        log_prob = run.log_prob(view.place)
        return run.recorder.mixed(run.uses(set(served), log_prob), view.outputs(log_prob))


def _layout(uses: Served) -> tuple:
    """What a minibatch with the same graph has in common."""
    return tuple((k, use.function, use.shape) for k, calls in uses.items() for use in calls)
