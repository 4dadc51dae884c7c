# SPDX-License-Identifier: Apache-2.0
"""Which layers and latents of a model have its examples in their rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from pyro_dvi.core.autograd_graph import graph_of
from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.per_example.proof import Finding, Proofs, layout_of, mixed_rows
from pyro_dvi.curvature.per_example.uses import Use, with_rows_of_examples
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
        served = with_rows_of_examples(uses, len(outputs))

        def look(seed: int) -> Finding:
            with run.recorder.constant_statistics():
                return run.recorder.examined(served, outputs, seed)

        key, site = (view, len(outputs), layout_of(served)), run.sites[view.place].name
        return self.proved(run.model, key, served, look, site) if served else {}

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
        key, site = (view, len(outputs), layout), run.sites[view.place].name
        return set(ordered) - (self.disproved(run.model, key, look, site) if ordered else set())
