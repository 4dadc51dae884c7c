# SPDX-License-Identifier: Apache-2.0
"""Which layers and latents of a model have its examples in their rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pyro_dvi.core.autograd_graph import graph_of
from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.per_example import Use
from pyro_dvi.curvature.per_example.proof import Finding, Proofs, layout_of
from pyro_dvi.curvature.per_example.uses import with_examples_first
from pyro_dvi.curvature.rows import mixed_rows
from pyro_dvi.curvature.squared_gradients import SquaredGradients

Served = dict[int, list[Use]]


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


class RowCheck(Proofs):
    """Proves for every layout of a model's minibatches which layers, and which latents, keep examples apart."""

    def served(self, run: Run, uses: Served, view: View, outputs: Tensor) -> Served:
        """Keep the latents of whose uses the rules give the gradients of single examples, the entries of ``outputs``.

        Raises:
            ModelError: what was proved before is no longer right.
        """
        served = with_examples_first(uses, len(outputs))

        def look(seed: int) -> Finding:
            with run.recorder.constant_statistics():
                return run.recorder.examined(served, outputs, seed)

        wrong = self._wrong(run, (view, len(outputs), layout_of(served)), look) if served else set()
        return {k: calls for k, calls in served.items() if k not in wrong}

    def own(
        self, run: Run, values: Sequence[Tensor], local: set[int], view: View, outputs: Tensor
    ) -> set[int]:
        """Keep the latents in ``local`` whose rows reach the entry of ``outputs`` in the same place only.

        Raises:
            ModelError: rows of a latent that kept examples apart do so no more.
        """
        ordered = sorted(k for k in local if values[k].shape[:1] == (len(outputs),))

        def look(seed: int) -> Finding:
            with run.recorder.constant_statistics():
                mixed = mixed_rows([values[k] for k in ordered], outputs, seed)
            return Finding({ordered[n] for n in mixed}, set())

        layout = tuple((k, values[k].shape) for k in ordered)
        mixed = self._wrong(run, (view, len(outputs), layout), look) if ordered else set()
        return set(ordered) - mixed

    def _wrong(self, run: Run, key: tuple[View, int, tuple], look: Callable[[int], Finding]) -> set[int]:
        return self.disproved(run.model, key, look, run.sites[key[0].place].name)
