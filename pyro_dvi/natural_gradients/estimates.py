# SPDX-License-Identifier: Apache-2.0
r"""Estimates of the curvature from which natural-gradient optimizers make precisions.

Adding one: a subclass of :class:`Estimate`, given to an optimizer as ``VOGN({"estimate": Mine()})``. It overrides
``curvature`` if the gradient of the loss is enough, and ``measure`` if not.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dvi.core.autograd_graph import graph_of
from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.curvature.per_example.example_rules import with_rows_of_examples
from pyro_dvi.curvature.per_example.proof import Proofs, Served
from pyro_dvi.curvature.squared_gradients import passes_of, squares_without_rules
from pyro_dvi.errors import UnsupportedError, warn
from pyro_dvi.natural_gradients.drawn_run import DrawnRun, Measurement

_MANY_PASSES = 32


class Estimate:
    """Curvature that the backward pass of the loss leaves with the precisions; equal ones measure the same.

    Its sum over the data set, averaged over the K draws of a step, takes the place of the precisions' gradient. Divide
    what ``measure`` adds by ``squares.num_particles``. The gradient that ``curvature`` gets carries a factor of 1/K:
    leave what is linear in it as it is, and multiply its square by K.

    Attributes:
        at_mean: gradients are taken at the mean, and not at draws.
        keeps_noise: ``curvature`` needs the noise of the draws.
    """

    at_mean: bool = False
    keeps_noise: ClassVar[bool] = False

    def measure(self, run: DrawnRun, sites: Sequence[ObservedSite], squares: "SquareMeasurement") -> None:
        """Measure before the backward pass of the loss, or let it measure; by default nothing.

        Args:
            run: of the guide and the model; ``run.guide.gaussians[name].measurement`` takes the result.
            sites: observed sites and factors of the run.
            squares: measures sums of squared gradients of examples, of these sites as they are; copies of sites with
                other values are not measured.
        """

    def curvature(self, measurement: Measurement, gradient: Tensor) -> Tensor | None:
        """Return the curvature of a site, in the backward pass of the loss.

        Args:
            measurement: of the site; with its noise and precisions where ``keeps_noise`` says so.
            gradient: of the loss by the draw.

        Returns:
            by default, the sum of what ``measure`` has added.
        """
        added, measurement.added = measurement.added, None
        return added


@dataclass(frozen=True)
class Squares(Estimate):
    r"""Sums of squared gradients of single examples, :math:`\sum_s \mathrm{scale}_s \sum_i g_{si}^2`.

    Args:
        at_mean: take gradients at the mean, and not at draws.

    Source: Osawa et al. (2019), "Practical deep learning with Bayesian principles", Algorithm 1.
    """

    at_mean: bool = False

    def measure(self, run: DrawnRun, sites: Sequence[ObservedSite], squares: "SquareMeasurement") -> None:
        squares.measure(run, sites)


@dataclass(frozen=True)
class NoiseProducts(Estimate):
    r"""Gradients times noise, :math:`g\,\epsilon/\sigma`, whose expectation is the diagonal of the Hessian.

    Source: Shen et al. (2024), "Variational learning is effective for large deep networks", Algorithm 1.
    """

    keeps_noise: ClassVar[bool] = True

    def curvature(self, measurement: Measurement, gradient: Tensor) -> Tensor:
        return (measurement.shift * measurement.precision).mul_(gradient)


# Squared gradients of examples -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Term:
    """An observed site or factor of a run.

    Attributes:
        run: of the guide and the model.
        place: number of the site in the run.
        site: the site.
        log_prob: its log-probabilities.
    """

    run: DrawnRun
    place: int
    site: ObservedSite
    log_prob: Tensor

    def root(self) -> Tensor:
        """Return the square root of the scale of each entry."""
        if torch.is_tensor(self.site.scale):
            return self.site.scale.sqrt().to(self.log_prob).expand_as(self.log_prob)
        return self.log_prob.new_full((), math.sqrt(self.site.scale)).expand_as(self.log_prob)

    def columns(self, values: Tensor, axis: int) -> Tensor:
        """Arrange values by the entries of a batch dimension, which are taken as examples."""
        return values.movedim(axis, 0).reshape(values.shape[axis], -1)


class SquareMeasurement:
    """Measures squared gradients; knows which layers keep examples apart, and about which sites it has warned.

    With one observed site whose examples form one dimension, squares come out of the backward pass of the loss. With
    several sites, or weights for single examples, every site gets a backward pass of its own; with more batch
    dimensions, every index of the others does. Latents that no layer with a rule uses get a pass per example, or per
    element.

    Args:
        num_particles: K; squares are averaged over the draws, and gradients of the loss carry 1/K.
    """

    def __init__(self, num_particles: int) -> None:
        self.num_particles = num_particles
        self._proofs = Proofs()
        self._warned: set[str] = set()

    def measure(self, run: DrawnRun, sites: Sequence[ObservedSite]) -> None:
        """Add the squares of one draw to its measurements, now or in the next backward pass of the loss.

        Raises:
            UnsupportedError: the model uses reentrant checkpointing.
            ModelError: the model mixes examples now, and did not before.
        """
        drawn = list(run.guide.gaussians.values())
        terms = [_Term(run, place, site, site.log_prob(site.value)) for place, site in enumerate(sites)]
        graph = graph_of([term.log_prob for term in terms])
        _refuse_checkpoints(graph)
        wanted = {k for k, one in enumerate(drawn) if one.value.grad_fn in graph}
        for k in set(range(len(drawn))) - wanted:  # no observation depends on it
            drawn[k].measurement.add(torch.zeros_like(drawn[k].value))
        if len(terms) > 1 or not _is_plain(sites[0]):
            for term in terms:
                self._by_itself(term, wanted)
            return
        # The gradients that come by carry scale/K. Squares shall carry the scale once, and be a mean over K draws.
        (term,), weight = terms, self.num_particles / float(sites[0].scale)
        uses = {k: calls for k, calls in run.recorder.uses().items() if k in wanted}
        served = self._served(term, uses, 0, term.log_prob)
        self._without_rules(term, wanted - served.keys())
        measurements = [
            one.measurement for one in drawn
        ]  # hooks that held the draws would keep their graph alive

        def arrived(k: int, squares: Tensor) -> None:
            measurements[k].add(squares if weight == 1 else squares.mul_(weight))

        run.recorder.watch(served, arrived)

    def _by_itself(self, term: _Term, wanted: set[int]) -> None:
        """Measure the squares of a site by backward passes of its own."""
        drawn = list(term.run.guide.gaussians.values())
        graph = graph_of([term.log_prob])
        wanted = {k for k in wanted if drawn[k].value.grad_fn in graph}
        uses = {
            k: [use for use in calls if use.output.node in graph]
            for k, calls in term.run.recorder.uses().items()
            if k in wanted
        }
        candidates = [
            (n, self._served(term, uses, n, term.columns(term.log_prob, n).sum(1)))
            for n in range(term.log_prob.dim())
        ]
        axis, served = max(candidates, key=lambda found: len(found[1]), default=(0, {}))
        if served:
            roots, columns = term.columns(term.root(), axis), term.columns(term.log_prob, axis)
            self._warn_of_columns(term, columns.shape[1])
            for n in range(columns.shape[1]):
                found = term.run.recorder.measured(served, columns[:, n], roots[:, n])
                for k, squares in found.items():
                    drawn[k].measurement.add(squares / self.num_particles)
        self._without_rules(term, wanted - served.keys())

    def _served(self, term: _Term, uses: Served, axis: int, outputs: Tensor) -> Served:
        """Keep the latents whose rules give the gradients of single examples, the entries of ``outputs``."""
        served = with_rows_of_examples(uses, len(outputs))
        if not served:
            return served
        key, look = (term.place, axis, len(outputs)), partial(term.run.recorder.examined, served, outputs)
        return self._proofs.proved(term.run.call.model, key, served, look, term.site.name)

    def _without_rules(self, term: _Term, rest: set[int]) -> None:
        if not rest:
            return
        ordered, drawn = sorted(rest), list(term.run.guide.gaussians.values())
        self._warn_of_passes(term, ordered)
        values = [drawn[k].value for k in ordered]
        for k, total in zip(ordered, squares_without_rules(term.log_prob, term.root(), values), strict=True):
            drawn[k].measurement.add(total / self.num_particles)

    # Warnings, once for each latent or site

    def _warn_of_passes(self, term: _Term, ordered: list[int]) -> None:
        drawn, slow = list(term.run.guide.gaussians.values()), dict[str, dict[str, None]]()
        for k in ordered if term.log_prob.requires_grad else ():
            name = drawn[k].name.removesuffix("_unconstrained")
            if name not in self._warned and passes_of(term.log_prob, [drawn[k].value]) > _MANY_PASSES:
                self._warned.add(name)
                alike = repr(re.sub(r"\.\d+(?=\.)", ".*", name))  # layers of one stack
                slow.setdefault(term.run.recorder.obstacle(k), {})[alike] = None
        if slow:
            reasons = "; ".join(f"{', '.join(names)} {why}" for why, names in slow.items())
            self._warn_once(
                f"observed site {term.site.name!r}: some latents need one backward pass per example for their squared "
                f"gradients, {term.log_prob.numel()} in each step, which is exact but slow:",
                f"{reasons}. Use layers such as F.linear, write a per_example_rule, take smaller minibatches, or train "
                "with IVON, which needs no squares.",
            )

    def _warn_of_columns(self, term: _Term, passes: int) -> None:
        if passes > _MANY_PASSES:
            self._warn_once(
                f"observed site {term.site.name!r}",
                f"has the batch shape {tuple(term.log_prob.shape)}, and each entry is an example of its own: squared "
                f"gradients take {passes} backward passes in each step. If a row is one example, as an image is, say "
                f"so with .to_event({term.log_prob.dim() - 1}) on its distribution; or use IVON, which needs no "
                "gradients of examples.",
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
    """Return whether examples form one dimension and have one weight: squares then follow from the loss's gradients."""
    return len(site.fn.batch_shape) == 1 and not torch.is_tensor(site.scale) and site.scale > 0
