# SPDX-License-Identifier: Apache-2.0
"""Which layers and latents of a model have its examples in their rows."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_dvi.autograd_graph import graph_of
from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.per_example import Use
from pyro_dvi.curvature.per_example.uses import with_examples_first
from pyro_dvi.curvature.rows import mixed_rows
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.errors import ModelError

__all__ = ["RowCheck", "Run", "Served", "View"]

Served = dict[int, list[Use]]
_INTERVAL = 1000  # looks between two of a long training


@dataclass(frozen=True)
class Run:
    """What a run of the model left.

    Attributes:
        model: what was run.
        recorder: the uses of the latents.
        sites: the observed sites and factors.
    """

    model: Callable
    recorder: SquaredGradients
    sites: Sequence[ObservedSite]

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
    """Looks at every layout of a model's minibatches, and remembers which rows were no examples.

    A look costs two backward passes. Later ones, in calls 2, 4, 8, ..., 1000, 2000, ..., see whether that has changed.
    """

    def __init__(self) -> None:
        self._models: dict[int, tuple[Callable[[], Any], dict[tuple, _Verdict]]] = {}

    def __reduce__(self) -> tuple:
        return RowCheck, ()  # a copy looks anew

    def served(self, run: Run, uses: Served, view: View, outputs: Tensor) -> Served:
        """Keep the latents whose layers have the entries of ``outputs``, and nothing else, in their rows.

        Raises:
            ModelError: a layer that kept examples apart does so no more.
        """
        served = with_examples_first(uses, len(outputs))

        def look(seed: int) -> set[int]:
            return run.recorder.mixed(served, outputs, seed)

        mixed = self._mixed(run, (view, len(outputs), _layout(served)), look) if served else set()
        return {k: calls for k, calls in served.items() if k not in mixed}

    def own(
        self, run: Run, values: Sequence[Tensor], local: set[int], view: View, outputs: Tensor
    ) -> set[int]:
        """Keep the latents in ``local`` whose rows reach the entry of ``outputs`` in the same place only.

        Raises:
            ModelError: rows of a latent that kept examples apart do so no more.
        """
        ordered = sorted(k for k in local if values[k].shape[:1] == (len(outputs),))

        def look(seed: int) -> set[int]:
            return {ordered[n] for n in mixed_rows([values[k] for k in ordered], outputs, seed)}

        layout = tuple((k, values[k].shape) for k in ordered)
        mixed = self._mixed(run, (view, len(outputs), layout), look) if ordered else set()
        return set(ordered) - mixed

    def _mixed(self, run: Run, key: tuple[View, int, tuple], look: Callable[[int], set[int]]) -> set[int]:
        verdicts = self._verdicts_on(run.model)
        verdict = verdicts.get(key)
        if verdict is None or verdict.is_due():
            with run.recorder.constant_statistics():
                if verdict is None:
                    verdict = verdicts[key] = _Verdict(look(0))
                else:
                    verdict.renew(look(1 + verdict.looks), run.sites[key[0].place].name)
        return verdict.mixed

    def _verdicts_on(self, model: Callable) -> "dict[tuple, _Verdict]":
        owner = getattr(model, "__self__", model)  # a bound method is a new object at every access
        reference, verdicts = self._models.get(id(owner), (None, {}))
        if reference is None or reference() is not owner:  # new, or in the place of one that is gone
            verdicts = {}
            self._models = {n: entry for n, entry in self._models.items() if entry[0]() is not None}
            self._models[id(owner)] = (weakref.ref(owner), verdicts)
        return verdicts


@dataclass
class _Verdict:
    """Which latents have rows that are no examples.

    Attributes:
        mixed: these latents.
        calls: how often the question was asked.
        looks: how often it was looked at again.
    """

    mixed: set[int]
    calls: int = 1
    looks: int = 0

    def is_due(self) -> bool:
        """Count a call, and say whether to look again."""
        self.calls += 1
        return self.calls & (self.calls - 1) == 0 or self.calls % _INTERVAL == 0

    def renew(self, mixed: set[int], site: str) -> None:
        """Compare with another look."""
        self.looks += 1
        if not mixed <= self.mixed:
            self.mixed |= mixed
            raise ModelError(
                f"examples of observed site {site!r} depend on rows of other examples, which they did not in an "
                "earlier step with a minibatch of the same shape. Squared gradients since then were those of the rows, "
                "not of the examples. Train a model that mixes examples at times with IVON, which needs no gradients "
                "of examples; if the model was changed on purpose, go on with a new NaturalGradientELBO."
            )


def _layout(uses: Served) -> tuple:
    """What a minibatch with the same graph has in common."""
    return tuple((k, use.function, use.shape) for k, calls in uses.items() for use in calls)
