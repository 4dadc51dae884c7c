# SPDX-License-Identifier: Apache-2.0
"""Runs of guide and model that draw the weights and measure the curvature for the optimizer."""

from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributions as td
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.core.autograd_graph import enters, graph_of, leaves_of
from pyro_dvi.core.distributions import unexpanded
from pyro_dvi.curvature.linearisation import ObservedSite, sum_of
from pyro_dvi.curvature.per_example.example_rules import with_rows_of_examples
from pyro_dvi.curvature.per_example.proof import Proofs, Served
from pyro_dvi.curvature.squared_gradients import SquaredGradients, squares_without_rules
from pyro_dvi.errors import GuideError, ModelError, UnsupportedError, warn
from pyro_dvi.gaussians.normals import MatrixNormal
from pyro_dvi.natural_gradients.estimates import Estimate, NaturalSite
from pyro_dvi.runs.divergences import normal_prior, refuse_not_normal
from pyro_dvi.runs.latents import GaussianSite, Latent
from pyro_dvi.runs.posterior_run import Call, GuideRun, PosteriorRun

_MANY_PASSES = 32


@dataclass(eq=False)
class Measurement:
    """The curvature of one site, measured in the backward pass; it becomes the ``grad`` of the site's precisions.

    This object does not refer to the draw, because the draw's graph would then keep itself alive.

    Attributes:
        estimate: the estimate of the curvature.
        shift: deviation of the draw from the mean; None unless the estimate needs it.
        precision: precisions of the posterior; None unless the estimate needs them.
        added: sum of the curvature that the estimate has added so far.
    """

    estimate: Estimate
    shift: Any = None
    precision: Any = None
    added: Tensor | None = None

    def add(self, curvature: Tensor) -> None:
        """Add a tensor to the curvature."""
        self.added = curvature if self.added is None else self.added + curvature


@dataclass
class Drawn(GaussianSite):
    """A Gaussian site of the guide, with one draw from it.

    Attributes:
        leaf: the parameter of the means.
        precision: the parameter of the precisions.
        measurement: the object that collects the curvature.
    """

    leaf: Any = None
    precision: Any = None
    measurement: Any = None


class _Draw(Function):
    """A draw whose noise is a constant of the graph."""

    @staticmethod
    def forward(
        ctx: Any, loc: Tensor, precision: Tensor, base: td.Normal, measurement: Measurement
    ) -> Tensor:
        ctx.measurement = measurement
        if measurement.estimate.at_mean:
            return loc.clone()
        noise = torch.randn_like(loc)
        shift = base.coloured(noise) if isinstance(base, MatrixNormal) else noise.mul_(base.scale)
        if not measurement.estimate.keeps_noise:
            return shift.add_(loc)
        measurement.shift, measurement.precision = shift, precision.detach()
        return loc + shift

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        measurement = ctx.measurement
        return gradient, measurement.estimate.curvature(measurement, gradient), None, None


class _Draws(GuideRun):
    """A run of a guide whose precisions are parameters, with draws of its Gaussian sites."""

    def __init__(self, guide: Any, estimate: Estimate) -> None:
        super().__init__()
        self.guide, self.estimate = guide, estimate

    def _chosen(self, name: str, base: td.Normal, transforms: tuple[Any, ...]) -> Drawn:
        leaves = [base.loc] if base.loc.is_leaf else leaves_of([base.loc])
        if len(leaves) != 1 or not base.loc.requires_grad:
            raise GuideError(
                f"the mean of guide site {name!r} is not a parameter that requires gradients: use "
                "NaturalGradientGuide, and do not freeze its parameters"
            )
        precision = self.guide.precision_parameter(name.removesuffix("_unconstrained"))
        measurement, constant = Measurement(self.estimate), copy(base)
        constant.loc = base.loc.detach()  # the divergence has gradients only for parameters of priors
        value = _Draw.apply(base.loc, precision, constant, measurement)
        return Drawn(name, value, constant, transforms, False, leaves[0], precision, measurement)


@dataclass(frozen=True)
class DrawnRun(PosteriorRun):
    """The traces of one run, with a record of where each drawn value was used.

    Attributes:
        guide: the run of the guide; its ``gaussians`` are :class:`Drawn` sites by name.
        recorder: recorder of the uses of the draws.
    """

    guide: _Draws
    recorder: SquaredGradients

    @property
    def drawn(self) -> list[Any]:
        """The guide's :class:`Drawn` sites."""
        return list(self.guide.gaussians.values())

    @classmethod
    def measuring(cls, estimate: Estimate, call: Call) -> "DrawnRun":
        """Run the guide, then the model with the guide's draws, to measure a curvature."""
        draws = _Draws(call.guide, estimate)
        return cls.of(call, draws, lambda draws: SquaredGradients(draws.used_values()))

    def with_idle_draws(self, log_likelihood: Tensor, graph: set[Any]) -> Tensor:
        """Give a zero gradient to latents without effect on observations, so that their posterior becomes the prior."""
        idle = [one.value.sum() * 0 for one in self.drawn if one.value.grad_fn not in graph]
        return log_likelihood + sum_of(idle) if idle else log_likelihood

    def sites(self) -> list[NaturalSite]:
        """Return the guide's sites with their priors.

        Raises:
            ModelError: a prior is not Normal, depends on another latent, or is scaled or masked.
        """
        latents: list[Any] = [latent for latent in self.latents if latent.source is not None]
        priors = [self._checked_prior(latent) for latent in latents]
        with torch.no_grad():
            precisions = torch._foreach_pow([unexpanded(prior.scale) for prior in priors], -2)
        return [
            NaturalSite(
                latent.source.leaf, latent.source.precision, unexpanded(prior.loc).detach(), precision
            )
            for latent, prior, precision in zip(latents, priors, precisions, strict=True)
        ]

    def _checked_prior(self, latent: Latent) -> td.Normal:
        if (prior := normal_prior(latent)) is None:
            refuse_not_normal(latent.name, latent.prior)
        if prior.loc.requires_grad or prior.scale.requires_grad:
            parents = enters([one.value for one in self.drawn], [prior.loc, prior.scale])
            if any(parents):
                raise ModelError(
                    f"natural gradients need priors with fixed parameters, but the prior of site {latent.name!r} "
                    f"depends on site {self.drawn[parents.index(True)].name!r}. Replace the latter by a learned "
                    "parameter (LearnedScale), or train with TaylorELBO"
                )
        whole = latent.mask is None or latent.mask is True
        if torch.is_tensor(latent.plate_scale) or latent.plate_scale != 1 or not whole:
            raise ModelError(
                f"latent site {latent.name!r} is scaled or masked, for example by a subsampled plate, but natural "
                "gradients update every element in every step. Use the whole data set in each step, or train with "
                "TaylorELBO"
            )
        return prior


# Squared gradients of examples -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Term:
    """An observed site or factor of a run.

    Attributes:
        run: the run of guide and model.
        site: the site.
        log_prob: the log-probabilities of the site.
    """

    run: DrawnRun
    site: ObservedSite
    log_prob: Tensor

    @property
    def root(self) -> Tensor:
        """Square root of the scale of each entry."""
        return (self.log_prob.new_ones(()) * self.site.scale**0.5).expand_as(self.log_prob)

    def columns(self, values: Tensor, axis: int) -> Tensor:
        """Arrange values by the entries of a batch dimension, which are treated as examples."""
        return values.movedim(axis, 0).reshape(values.shape[axis], -1)


class SquareMeasurement:
    """Measures squared gradients, and records which layers keep examples separate and which warnings were issued.

    For a single observed site whose examples form one dimension, the squares are computed in the backward pass of the
    loss. If there are several sites, or if examples have different weights, each site needs a backward pass of its own.
    If a site has further batch dimensions, each index of these dimensions needs its own pass. If a latent is also used
    outside the layers that have a rule, its squares need one pass for each example, or for each element of the latent.

    Args:
        num_particles: K, the number of draws. Squares are averaged over the draws, and gradients of the loss contain a
            factor 1/K.
    """

    def __init__(self, num_particles: int) -> None:
        self.num_particles = num_particles
        self._proofs = Proofs()
        self._warned: set[str] = set()

    def measure(self, run: DrawnRun, sites: Sequence[ObservedSite], without: Collection[int] = ()) -> None:
        """Add the squares for one draw to its measurements, now or in the next backward pass of the loss.

        Args:
            run: the run of guide and model.
            sites: observed sites and factors.
            without: indices of draws whose curvature is measured in another way.

        Raises:
            UnsupportedError: the model uses reentrant checkpointing.
            ModelError: the model mixes examples now but did not in an earlier step.
        """
        drawn = run.drawn
        terms = [_Term(run, site, site.log_prob(site.value)) for site in sites]
        graphs = [graph_of([term.log_prob]) for term in terms]
        if any(type(node).__name__ == "CheckpointFunctionBackward" for node in set().union(*graphs)):
            raise UnsupportedError(
                "the model uses torch.utils.checkpoint.checkpoint(..., use_reentrant=True), which hides how the "
                "function uses its weights: pass use_reentrant=False"
            )
        wanted = {k: drawn[k] for k in range(len(drawn)) if k not in without}
        for one in wanted.values():
            if not any(one.value.grad_fn in graph for graph in graphs):  # it has no effect on observations
                one.measurement.add(torch.zeros_like(one.value))
        (site, *others) = sites
        # Squares follow from the gradients of the loss if examples form one dimension and have equal weights.
        plain = len(site.fn.batch_shape) == 1 and not torch.is_tensor(site.scale) and site.scale > 0
        for term, graph in zip(terms, graphs, strict=True):
            reached = {k for k, one in wanted.items() if one.value.grad_fn in graph}
            found = [(self._served(term, reached, graph, n), n) for n in range(term.log_prob.dim())]
            served, axis = max(found, key=lambda pair: len(pair[0]), default=({}, 0))
            if served and (others or not plain):
                self._by_passes(term, served, axis)
            self._without_rules(term, reached - served.keys())
        if others or not plain:
            return
        # Gradients of the loss have the factor scale/K. Squares must contain the scale once, and be averaged over K
        # draws.
        weight = self.num_particles / float(site.scale)
        # Hooks that refer to the draws would keep their graph alive.
        measurements = [one.measurement for one in drawn]

        def arrived(k: int, squares: Tensor) -> None:
            measurements[k].add(squares if weight == 1 else squares.mul_(weight))

        run.recorder.watch(served, arrived)

    def _by_passes(self, term: _Term, served: Served, axis: int) -> None:
        """Measure the squares for a site with separate backward passes."""
        columns = [term.columns(values, axis).unbind(1) for values in (term.log_prob, term.root)]
        advice = f"If a row, such as an image, is one example, write .to_event({term.log_prob.dim() - 1})"
        self._warn_of_passes(term, len(columns[0]), advice)
        for log_prob, root in zip(*columns, strict=True):
            for k, squares in term.run.recorder.measured(served, log_prob, root).items():
                term.run.drawn[k].measurement.add(squares / self.num_particles)

    def _served(self, term: _Term, reached: set[int], graph: set[Any], axis: int) -> Served:
        """Return the uses of latents whose rules give the gradients of single examples along a batch dimension."""
        recorder, outputs = term.run.recorder, term.columns(term.log_prob, axis).sum(1)
        uses = {k: calls for k, calls in recorder.uses().items() if k in reached}
        uses = {k: [use for use in calls if use.output.node in graph] for k, calls in uses.items()}
        served = with_rows_of_examples(uses, len(outputs))
        if not served:
            return served
        key, look = (term.site.name, axis, len(outputs)), partial(recorder.examined, served, outputs)
        return self._proofs.proved(term.run.call.model, key, served, look, term.site.name)

    def _without_rules(self, term: _Term, rest: set[int]) -> None:
        if not rest:
            return
        ordered, drawn = sorted(rest), term.run.drawn
        # Latents with few elements need a pass per element instead, so they are not slow.
        slow = [k for k in ordered if 8 * drawn[k].value.numel() > term.log_prob.numel()]
        if slow and term.log_prob.requires_grad:
            advice = "Use layers such as F.linear, write a per_example_rule, use smaller minibatches"
            reason = f"{drawn[slow[0]].name.removesuffix('_unconstrained')!r} {term.run.recorder.obstacle(slow[0])}"
            self._warn_of_passes(term, term.log_prob.numel(), f"Site {reason}. {advice}")
        values = [drawn[k].value for k in ordered]
        for k, total in zip(ordered, squares_without_rules(term.log_prob, term.root, values), strict=True):
            drawn[k].measurement.add(total / self.num_particles)

    def _warn_of_passes(self, term: _Term, passes: int, advice: str) -> None:
        """Warn of many backward passes, once for each site."""
        site = term.site.name
        if passes > _MANY_PASSES and site not in self._warned:
            self._warned.add(site)
            warn(
                f"observed site {site!r}: squared gradients take {passes} backward passes in each step (with IVON, "
                f"only before the first step), which is exact but slow. {advice}, or train with IVON"
            )
