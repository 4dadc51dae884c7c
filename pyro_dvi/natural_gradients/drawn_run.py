# SPDX-License-Identifier: Apache-2.0
"""One run of guide and model at draws that keep their noise."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.autograd_graph import enters
from pyro_dvi.core.distributions import unexpanded
from pyro_dvi.core.natural_step import NaturalSite, NaturalStep
from pyro_dvi.curvature.base import sum_of
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.errors import ModelError
from pyro_dvi.natural_gradients.rows import Run
from pyro_dvi.runs.divergences import normal_prior, refuse_not_normal
from pyro_dvi.runs.draws import TrackedDraws
from pyro_dvi.runs.latents import Latent
from pyro_dvi.runs.observed import Observed
from pyro_dvi.runs.posterior_run import Call, PosteriorRun
from pyro_dvi.runs.sites import is_data, is_factor


@dataclass(frozen=True)
class DrawnRun(PosteriorRun):
    """The traces of one run, and what was recorded on the way.

    Attributes:
        guide: the guide's run, its Gaussian sites drawn.
        recorder: the uses of the draws.
    """

    guide: TrackedDraws
    recorder: SquaredGradients

    @classmethod
    def measuring(cls, step: NaturalStep, call: Call) -> "DrawnRun":
        """Run the guide, then the model with what the guide drew, to measure what a step needs."""
        draws = TrackedDraws(call.guide, step)
        return cls.of(call, draws, lambda draws: SquaredGradients(draws.used_values()))

    def measured(self, observed: Observed) -> Run:
        """Return what squared gradients are measured in."""
        return Run(self.call.model, self.recorder, observed.terms)

    def with_idle_draws(self, log_likelihood: Tensor, graph: set[Any]) -> Tensor:
        """Give latents that no observation depends on a gradient too, zero: their posterior becomes the prior."""
        idle = [g.value.sum() * 0 for g in self.guide.gaussians.values() if g.value.grad_fn not in graph]
        return log_likelihood + sum_of(idle) if idle else log_likelihood

    def local(self) -> set[str]:
        """Names of the guide's sites whose elements belong to one example each, by the plate of the observations."""
        nodes = self.model_trace.nodes
        observed = [node["cond_indep_stack"] for node in nodes.values() if is_data(node) or is_factor(node)]
        plates = [{frame.name for frame in stack if frame.vectorized} for stack in observed]
        if len(plates) != 1 or len(plates[0]) != 1:
            return set()
        sources = {latent.name: latent.source.name for latent in self.latents if latent.source is not None}
        return {
            source
            for name, source in sources.items()
            if {frame.name for frame in nodes[name]["cond_indep_stack"]} == plates[0]
        }

    def has_learned_priors(self) -> bool:
        """Whether the divergence from the priors has gradients of its own."""
        priors = [normal_prior(latent) for latent in self.latents]
        return any(p is None or p.loc.requires_grad or p.scale.requires_grad for p in priors)

    def sites(self) -> dict[str, NaturalSite]:
        """The guide's sites with their priors.

        Raises:
            ModelError: a prior is not Normal, another latent sets it, or it is scaled or masked.
        """
        found = [latent for latent in self.latents if latent.source is not None]
        drawn: list[Any] = [latent.source for latent in found]
        priors = [self._prior_of(latent) for latent in found]
        with torch.no_grad():
            precisions = torch._foreach_pow([unexpanded(prior.scale) for prior in priors], -2)
            locs = [unexpanded(prior.loc) for prior in priors]
        return {
            one.name: NaturalSite(one.leaf, one.precision, loc, precision)
            for one, loc, precision in zip(drawn, locs, precisions, strict=True)
        }

    def _prior_of(self, latent: Latent) -> td.Normal:
        prior = normal_prior(latent)
        if prior is None:
            refuse_not_normal(latent.name, latent.prior)
        values = [g.value for g in self.guide.gaussians.values()]
        parents = enters(values, [prior.loc, prior.scale])
        for parent, is_parent in zip(self.guide.gaussians, parents, strict=True):
            if is_parent:
                raise ModelError(
                    f"the prior of site {latent.name!r} depends on site {parent!r}; natural-gradient updates need "
                    "priors with fixed parameters. Learn the scale instead (bayesian.LearnedScale), or use TaylorELBO."
                )
        _refuse_scaled(latent)
        return prior


def _refuse_scaled(latent: Latent) -> None:
    """Refuse a prior of which the optimizer does not know all."""
    scaled = torch.is_tensor(latent.plate_scale) or latent.plate_scale != 1
    masked = latent.mask is not None and latent.mask is not True
    if scaled or masked:
        raise ModelError(
            f"latent site {latent.name!r} is scaled or masked, as by a subsampled plate around it; "
            "natural-gradient updates move every element in every step under its whole prior. Use the whole "
            "data set in each step, or TaylorELBO or MomentPropagationELBO for this model."
        )
