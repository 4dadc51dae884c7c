# SPDX-License-Identifier: Apache-2.0
"""One run of guide and model at the posterior mean, with everything an ELBO reads from it."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_dvi.handlers.explained import explained_errors
from pyro_dvi.handlers.latents import Latent, match_latents
from pyro_dvi.handlers.means import GaussianSite, PosteriorMeans
from pyro_dvi.undisturbed import preserve_buffers

__all__ = ["MeanRun", "run_at_means", "run_guide"]


@dataclass
class MeanRun:
    """The traces of one run at the means.

    Attributes:
        model_trace: the model's trace; its observed sites carry the likelihood.
        latents: every latent site with its posterior marginal.
        gaussians: the guide's Gaussian sites that stand at their mean, wholly or in part.
        recorder: the context in which the model ran.
    """

    guide_trace: Any
    model_trace: Any
    latents: list[Latent]
    gaussians: list[GaussianSite]
    recorder: Any


def run_at_means(
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: dict,
    sampled: dict[str, Tensor | bool] | None = None,
    recorder: Callable[[list[Tensor | None]], AbstractContextManager[Any]] | None = None,
) -> MeanRun:
    """Run the guide at its means, then the model with those values.

    Args:
        model: a Pyro model.
        guide: a guide of factorised Gaussians and point masses.
        args: positional arguments of both.
        kwargs: keyword arguments of both.
        sampled: see :class:`~pyro_dvi.handlers.structure.Structure`.
        recorder: given the values that the model will use, returns the context in which it runs.

    Raises:
        GuideError: the guide is not a factorised Gaussian.
        ModelError: a latent site is missing in the guide.
        DeviceError: data and parameters live on different devices.
        DataError: the model fails on data that hold NaN.
    """
    guide_trace, gaussians = run_guide(model, guide, args, kwargs, sampled)
    expanded = [g for g in gaussians.values() if g.sampled is not True]
    context = nullcontext() if recorder is None else recorder([_used_value(g, guide_trace) for g in expanded])
    attention = nullcontext() if recorder is None else twice_differentiable()
    values = [g.value for g in gaussians.values()]
    with explained_errors(model, values, args, kwargs), attention, context:
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
    latents = match_latents(model_trace, guide_trace, gaussians, guide)
    return MeanRun(guide_trace, model_trace, latents, expanded, context)


def run_guide(
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: dict,
    sampled: dict[str, Tensor | bool] | None = None,
) -> tuple[Any, dict[str, GaussianSite]]:
    """Run the guide at its means; return its trace and its Gaussian sites by name."""
    means = PosteriorMeans(sampled=sampled or {})
    # A guide that has not seen the model yet runs it to look at its sites.
    fresh = getattr(guide, "prototype_trace", 0) is None
    with explained_errors(model, [], args, kwargs), preserve_buffers() if fresh else nullcontext(), means:
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    return guide_trace, means.gaussians


def twice_differentiable() -> AbstractContextManager[Any]:
    """Attention without fused kernels, which have no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def _used_value(gaussian: GaussianSite, guide_trace: Any) -> Tensor | None:
    """The tensor object that the model will compute with, if it is the mean itself or a plain view of it."""
    site = guide_trace.nodes.get(gaussian.name.removesuffix("_unconstrained"))
    value = None if site is None else site["value"]
    if torch.is_tensor(value) and value.shape == gaussian.value.shape:
        return value if value.data_ptr() == gaussian.value.data_ptr() else None
    return None
