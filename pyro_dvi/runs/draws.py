# SPDX-License-Identifier: Apache-2.0
"""Run a guide of Gaussians so that the backward pass gives its means gradients, and its precisions the curvature."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.natural_step import NaturalStep, Statistic
from pyro_dvi.errors import GuideError
from pyro_dvi.runs.latents import GaussianSite
from pyro_dvi.runs.posterior_run import GuideRun


@dataclass
class Drawn(GaussianSite):
    """A Gaussian site with a draw of it.

    Attributes:
        leaf: the parameter of the means.
        precision: that of the precisions.
        curvature: collects what the draw's backward pass gives the precisions.
    """

    leaf: Any = None
    precision: Any = None
    curvature: Any = None


@dataclass
class Curvature:
    """What the backward pass of a draw gives its precisions, gradients times noise or squares that were added.

    Attributes:
        step: which of both, and what the loss is multiplied with.
    """

    step: NaturalStep
    _squares: list[tuple[Tensor, int]] = field(default_factory=list)

    def add(self, squares: Tensor, power: int) -> None:
        """Add squares, and the power of the factor of the loss that is missing there to be one of gradients."""
        self._squares.append((squares, power))

    def gathered(self) -> Tensor | None:
        """Return the sum of the squares, once."""
        factor, total = self.step.loss_factor, None
        for squares, power in self._squares:
            scaled = squares if isinstance(factor, float) else squares * factor**power
            total = scaled if total is None else total + scaled
        self._squares = []
        return total


class _Draw(Function):
    """A draw, whose noise is a constant of the graph."""

    @staticmethod
    def forward(ctx: Any, loc: Tensor, precision: Tensor, scale: Tensor, curvature: Curvature) -> Tensor:
        ctx.curvature = curvature
        if curvature.step.measured.at_mean:
            return loc.clone()
        shift = torch.randn_like(loc).mul_(scale)
        if curvature.step.measured is Statistic.NOISE_PRODUCTS:
            ctx.shift, ctx.precision = shift, precision.detach()
            return loc + shift
        return shift.add_(loc)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.curvature.step.measured is Statistic.NOISE_PRODUCTS:
            return gradient, (ctx.shift * ctx.precision).mul_(gradient), None, None
        return gradient, ctx.curvature.gathered(), None, None


class TrackedDraws(GuideRun):
    """Draw the Gaussian sites of a guide.

    Args:
        guide: a guide whose precisions are parameters.
        step: what is to be measured.
    """

    def __init__(self, guide: Any, step: NaturalStep) -> None:
        super().__init__()
        self.guide, self.step = guide, step
        self.gaussians: dict[str, Any] = {}

    def _chosen(self, name: str, base: td.Normal, transforms: tuple[Any, ...]) -> Drawn:
        leaves = [base.loc] if base.loc.is_leaf else leaves_of([base.loc])
        if len(leaves) != 1 or not base.loc.requires_grad:
            raise GuideError(
                f"the mean of guide site {name!r} is no parameter that requires gradients, so a natural-gradient "
                "optimizer cannot move it: use NaturalGradientGuide, with parameters that are not frozen"
            )
        precision = self.guide.precision_parameter(name.removesuffix("_unconstrained"))
        curvature = Curvature(self.step)
        value = _Draw.apply(base.loc, precision, base.scale, curvature)
        return Drawn(name, value, base, transforms, leaf=leaves[0], precision=precision, curvature=curvature)
