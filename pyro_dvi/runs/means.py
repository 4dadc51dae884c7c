# SPDX-License-Identifier: Apache-2.0
"""One run of guide and model with every Gaussian site at its mean."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_dvi.runs.latents import GaussianSite
from pyro_dvi.runs.posterior_run import Call, GuideRun, PosteriorRun


def run_at_means(
    call: Call,
    sampled: Mapping[str, Tensor | bool] | None = None,
    recorder: Callable[[list[Tensor | None]], AbstractContextManager[Any]] | None = None,
) -> PosteriorRun:
    """Run the guide at its means, then the model with those values; raises as :meth:`PosteriorRun.of`.

    Args:
        call: of a model and a guide of factorised Gaussians and point masses.
        sampled: see :class:`~pyro_dvi.runs.structure.Structure`.
        recorder: given the values that the model will use, returns the context in which it runs.
    """
    if recorder is None:
        return PosteriorRun.of(call, PosteriorMeans(sampled), lambda _: nullcontext())
    with twice_differentiable():
        return PosteriorRun.of(call, PosteriorMeans(sampled), lambda means: recorder(means.used_values()))


def twice_differentiable() -> AbstractContextManager[Any]:
    """Attention without fused kernels, which have no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


class PosteriorMeans(GuideRun):
    """Set Gaussian sites of a guide to their mean, tracked for differentiation; sample those in ``sampled``.

    Every mean becomes a node of its own in the autograd graph, so that gradients of the likelihood with respect to it
    do not mix with other uses of the parameters.

    Args:
        sampled: per guide site True, or a mask of the elements, to draw by reparameterisation.
    """

    takes_joint = True

    def __init__(self, sampled: Mapping[str, Tensor | bool] | None = None) -> None:
        super().__init__()
        self.sampled = sampled or {}

    def _chosen(self, name: str, base: td.Normal, transforms: tuple[Any, ...]) -> GaussianSite:
        loc = base.loc
        value = mean = loc.view_as(loc) if loc.requires_grad else loc.detach().requires_grad_()
        sampled = self.sampled.get(name, False)
        if sampled is not False:
            draw = loc + base.scale * torch.randn_like(loc)
            value = draw if sampled is True else torch.where(torch.as_tensor(sampled), draw, mean)
        return GaussianSite(name, value, base, transforms, sampled)
