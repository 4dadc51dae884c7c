# SPDX-License-Identifier: Apache-2.0
r"""One run of guide and model at draws of the weights, and its measurements for the optimizer.

The backward pass leaves :math:`\partial\,\mathrm{loss}/\partial\mu` as the ``grad`` of the means, and the measured
curvature, such as

.. math:: \sum_i g_i^2 \quad\text{or}\quad g\,\frac{\epsilon}{\sigma},

as the ``grad`` of the precisions, summed over the data set. So ``zero_grad`` and sums over processes treat it as they
treat all gradients, and measurements that no optimizer has used are precisions with a gradient. Everything else is one
:class:`NaturalStep`, which the guide owns.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.core.autograd_graph import enters, leaves_of
from pyro_dvi.core.distributions import unexpanded
from pyro_dvi.curvature.linearisation import sum_of
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.errors import GuideError, ModelError
from pyro_dvi.runs.divergences import normal_prior, refuse_not_normal
from pyro_dvi.runs.latents import GaussianSite, Latent
from pyro_dvi.runs.posterior_run import Call, GuideRun, PosteriorRun

if TYPE_CHECKING:
    from pyro_dvi.natural_gradients.estimates import Estimate

# Between objective and optimizer ------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class NaturalSite:
    r"""The parameters of a site, and its Normal prior.

    Attributes:
        loc: parameter of the means.
        precision: parameter of the precisions, which the optimizer writes.
        prior_loc: mean of the prior, of the shape of the means or expandable to it.
        prior_precision: its precision :math:`\delta`, likewise.
    """

    loc: Tensor
    precision: Tensor
    prior_loc: Tensor
    prior_precision: Tensor


@dataclass(eq=False)
class NaturalStep:
    r"""The last step of a guide; parameters that its loss depends on have it as their attribute ``natural_step``.

    Attributes:
        wanted: the curvature to measure in the next step; the optimizer says so in its own step.
        measured: the curvature that the gradients of the precisions are.
        num_data: N.
        temperature: :math:`\beta`, the weight of the KL divergence.
        sites: the sites with their priors; empty before the first step.
    """

    wanted: "Estimate"
    measured: "Estimate" = field(init=False)
    num_data: float = 1.0
    temperature: float = 1.0
    sites: list[NaturalSite] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.measured = self.wanted

    def __reduce__(self) -> tuple:
        """Copies and files hold no measurements."""
        return type(self), (self.wanted,)

    def begin(self) -> None:
        """Begin a step.

        Raises:
            GuideError: no optimizer has used the measurements of the last one.
        """
        if any(site.precision.grad is not None for site in self.sites):
            raise GuideError(
                "the gradients of the last step were not used by a natural-gradient optimizer: train with "
                "pyro_dvi.natural_gradients.VOGN, OGN or IVON, and take a step after each backward pass. To go on "
                "after a backward pass without a step, set gradients to None, or call elbo.prepare(guide, optimizer)."
            )
        self.measured = self.wanted

    def drop(self) -> None:
        """Forget the measurements."""
        for site in self.sites:
            site.precision.grad = None


def steps_of(parameters: Iterable[Tensor]) -> list[NaturalStep]:
    """Return the last steps that have given any of the parameters a gradient."""
    steps = {id(step): step for p in parameters if (step := getattr(p, "natural_step", None)) is not None}
    return list(steps.values())


# Draws of the guide ----------------------------------------------------------------------------------------------


@dataclass(eq=False)
class Measurement:
    """The curvature that the backward pass of a draw gives to the precisions of its site.

    It holds no draw, whose graph would otherwise hold itself.

    Attributes:
        estimate: of the curvature.
        shift: deviation of the draw from the mean, where the estimate needs it.
        precision: precisions of the draw, likewise.
        added: the sum of what the estimate has found so far.
    """

    estimate: "Estimate"
    shift: Any = None
    precision: Any = None
    added: Tensor | None = None

    def add(self, curvature: Tensor) -> None:
        """Add curvature."""
        self.added = curvature if self.added is None else self.added + curvature


@dataclass
class Drawn(GaussianSite):
    """A Gaussian site with a draw of it.

    Attributes:
        leaf: the parameter of the means.
        precision: the parameter of the precisions.
        measurement: collects the curvature.
    """

    leaf: Any = None
    precision: Any = None
    measurement: Any = None


class _Draw(Function):
    """A draw, whose noise is a constant of the graph."""

    @staticmethod
    def forward(ctx: Any, loc: Tensor, precision: Tensor, scale: Tensor, measurement: Measurement) -> Tensor:
        ctx.measurement = measurement
        if measurement.estimate.at_mean:
            return loc.clone()
        shift = torch.randn_like(loc).mul_(scale)
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
    """Draw the Gaussian sites of a guide whose precisions are parameters."""

    def __init__(self, guide: Any, estimate: "Estimate") -> None:
        super().__init__()
        self.guide, self.estimate = guide, estimate
        self.gaussians: dict[str, Any] = {}

    def _chosen(self, name: str, base: td.Normal, transforms: tuple[Any, ...]) -> Drawn:
        leaves = [base.loc] if base.loc.is_leaf else leaves_of([base.loc])
        if len(leaves) != 1 or not base.loc.requires_grad:
            raise GuideError(
                f"the mean of guide site {name!r} is no parameter that requires gradients, so a natural-gradient "
                "optimizer cannot move it: use NaturalGradientGuide, with parameters that are not frozen"
            )
        precision = self.guide.precision_parameter(name.removesuffix("_unconstrained"))
        measurement = Measurement(self.estimate)
        value = _Draw.apply(base.loc, precision, base.scale, measurement)
        return Drawn(
            name, value, base, transforms, leaf=leaves[0], precision=precision, measurement=measurement
        )


@dataclass(frozen=True)
class DrawnRun(PosteriorRun):
    """The traces of one run, with the uses of the draws.

    Attributes:
        guide: the guide's run; its ``gaussians`` are :class:`Drawn` sites by name.
        recorder: the uses of the draws.
    """

    guide: _Draws
    recorder: SquaredGradients

    @classmethod
    def measuring(cls, estimate: "Estimate", call: Call) -> "DrawnRun":
        """Run the guide, then the model with what the guide drew, to measure a curvature."""
        draws = _Draws(call.guide, estimate)
        return cls.of(call, draws, lambda draws: SquaredGradients(draws.used_values()))

    def with_idle_draws(self, log_likelihood: Tensor, graph: set[Any]) -> Tensor:
        """Give latents that no observation depends on a gradient too, zero: their posterior becomes the prior."""
        idle = [g.value.sum() * 0 for g in self.guide.gaussians.values() if g.value.grad_fn not in graph]
        return log_likelihood + sum_of(idle) if idle else log_likelihood

    def has_learned_priors(self) -> bool:
        """Whether the divergence from the priors has gradients of its own."""
        priors = [normal_prior(latent) for latent in self.latents]
        return any(p is None or p.loc.requires_grad or p.scale.requires_grad for p in priors)

    def sites(self) -> list[NaturalSite]:
        """Return the guide's sites with their priors.

        Raises:
            ModelError: a prior is not Normal, another latent sets it, or it is scaled or masked.
        """
        found = [latent for latent in self.latents if latent.source is not None]
        drawn: list[Any] = [latent.source for latent in found]
        priors = [self._prior_of(latent) for latent in found]
        with torch.no_grad():
            precisions = torch._foreach_pow([unexpanded(prior.scale) for prior in priors], -2)
            locs = [unexpanded(prior.loc) for prior in priors]
        return [
            NaturalSite(one.leaf, one.precision, loc, precision)
            for one, loc, precision in zip(drawn, locs, precisions, strict=True)
        ]

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
        scaled = torch.is_tensor(latent.plate_scale) or latent.plate_scale != 1
        masked = latent.mask is not None and latent.mask is not True
        if scaled or masked:
            raise ModelError(
                f"latent site {latent.name!r} is scaled or masked, as by a subsampled plate around it; "
                "natural-gradient updates move every element in every step under its whole prior. Use the whole "
                "data set in each step, or TaylorELBO or MomentPropagationELBO for this model."
            )
        return prior
