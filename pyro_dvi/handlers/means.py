# SPDX-License-Identifier: Apache-2.0
"""One run of guide and model with every Gaussian site at its mean, and what an ELBO reads from it."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pyro.distributions as dist
import torch
from pyro.poutine.replay_messenger import ReplayMessenger
from torch import Tensor
from torch import distributions as td
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_dvi.errors import GuideError
from pyro_dvi.handlers.distributions import strip_event_dims
from pyro_dvi.handlers.explained import explained_errors
from pyro_dvi.handlers.latents import GaussianSite, Latent, Marginals, match_latents
from pyro_dvi.sites import SampleTrace, SetLatents
from pyro_dvi.undisturbed import preserve_buffers

__all__ = [
    "Call",
    "MeanRun",
    "PosteriorMeans",
    "run_at_means",
    "run_guide",
    "twice_differentiable",
    "used_value",
]


@dataclass(frozen=True)
class Call:
    """A model and its guide, both called with the same arguments.

    Attributes:
        model: a Pyro model.
        guide: its guide.
        args: positional arguments of both.
        kwargs: keyword arguments of both.
    """

    model: Callable
    guide: Any
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def explained(self, posterior: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        """Explain what goes wrong with these arguments, see :func:`~pyro_dvi.handlers.explained.explained_errors`."""
        return explained_errors(self.model, posterior, self.args, self.kwargs)

    def trace_model(self, guide_trace: Any) -> Any:
        """Run the model with the values of a run of the guide."""
        with Replayed(guide_trace) as run:
            self.model(*self.args, **self.kwargs)
        return run.trace


class Replayed(SampleTrace):
    """Record a run with the values of another one: Pyro's ``trace`` and ``replay`` in one messenger."""

    def __init__(self, trace: Any) -> None:
        super().__init__()
        self._pyro_sample = ReplayMessenger(trace)._pyro_sample


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
    call: Call,
    sampled: dict[str, Tensor | bool] | None = None,
    recorder: Callable[[list[Tensor | None]], AbstractContextManager[Any]] | None = None,
) -> MeanRun:
    """Run the guide at its means, then the model with those values.

    Args:
        call: of a model and a guide of factorised Gaussians and point masses.
        sampled: see :class:`~pyro_dvi.handlers.structure.Structure`.
        recorder: given the values that the model will use, returns the context in which it runs.

    Raises:
        GuideError: the guide is not a factorised Gaussian.
        ModelError: a latent site is missing in the guide.
        DeviceError: data and parameters live on different devices.
        DataError: the model fails on data that hold NaN.
    """
    means = run_guide(call, sampled)
    expanded = [g for g in means.gaussians.values() if g.sampled is not True]
    context = nullcontext() if recorder is None else recorder([used_value(g, means.trace) for g in expanded])
    attention = nullcontext() if recorder is None else twice_differentiable()
    values = [g.value for g in means.gaussians.values()]
    with call.explained(values), attention, context:
        model_trace = call.trace_model(means.trace)
    latents = match_latents(model_trace, means.trace, Marginals(call.guide, means.gaussians))
    return MeanRun(means.trace, model_trace, latents, expanded, context)


def run_guide(call: Call, sampled: dict[str, Tensor | bool] | None = None) -> "PosteriorMeans":
    """Run the guide at its means."""
    means = PosteriorMeans(sampled)
    # A guide that has not seen the model yet runs it to look at its sites.
    fresh = getattr(call.guide, "prototype_trace", 0) is None
    with call.explained(), preserve_buffers() if fresh else nullcontext(), means:
        call.guide(*call.args, **call.kwargs)
    return means


def twice_differentiable() -> AbstractContextManager[Any]:
    """Attention without fused kernels, which have no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def used_value(gaussian: GaussianSite, guide_trace: Any) -> Tensor | None:
    """Return the tensor that the model computes with, if it is that of the guide's Gaussian or a plain view of it."""
    site = guide_trace.nodes.get(gaussian.name.removesuffix("_unconstrained"))
    value = None if site is None else site["value"]
    if torch.is_tensor(value) and value.shape == gaussian.value.shape:
        return value if value.data_ptr() == gaussian.value.data_ptr() else None
    return None


class PosteriorMeans(SetLatents, SampleTrace):
    """Set Gaussian sites of a guide to their mean, tracked for differentiation; sample those in ``sampled``.

    Every mean becomes a node of its own in the autograd graph, so that gradients of the likelihood with respect to it
    do not mix with other uses of the parameters. Delta sites pass. Anything else has no mean that could
    stand for it, or is not a diagonal Gaussian, and is refused by name.

    Args:
        sampled: per guide site True, or a mask of the elements, to draw by reparameterisation.

    Attributes:
        trace: the run.
        gaussians: its Gaussian sites by name.
    """

    def __init__(self, sampled: Mapping[str, Tensor | bool] | None = None) -> None:
        super().__init__()
        self.sampled = sampled or {}
        self.gaussians: dict[str, GaussianSite] = {}

    def _value_of(self, site: Any) -> Tensor | None:
        base = strip_event_dims(site["fn"])
        transforms: tuple[Any, ...] = ()
        if isinstance(base, td.TransformedDistribution):
            transforms = tuple(base.transforms)
            base = strip_event_dims(base.base_dist)
            if any(t.domain.event_dim or t.codomain.event_dim for t in transforms):
                _refuse(site)
        if isinstance(base, td.Normal):
            return self._mean(site["name"], base, transforms)
        if not isinstance(base, dist.Delta):
            _refuse(site)
        return None

    def _mean(self, name: str, base: td.Normal, transforms: tuple[Any, ...]) -> Tensor:
        loc = base.loc
        mean = loc.view_as(loc) if loc.requires_grad else loc.detach().requires_grad_()
        sampled = self.sampled.get(name, False)
        value = mean
        if sampled is not False:
            draw = loc + base.scale * torch.randn_like(loc)
            value = draw if sampled is True else torch.where(torch.as_tensor(sampled), draw, mean)
        self.gaussians[name] = GaussianSite(name, value, base, transforms, sampled)
        for transform in transforms:
            value = transform(value)
        return value


def _refuse(site: Any) -> NoReturn:
    fn = strip_event_dims(site["fn"])
    kind = type(fn).__name__
    if getattr(fn, "has_enumerate_support", False):
        raise GuideError(
            f"guide site {site['name']!r} is discrete ({kind}); only Gaussian posteriors can be expanded around "
            "their mean. Sum the variable out of the model (pyro.infer.config_enumerate with TraceEnum_ELBO), "
            "or replace it by a continuous relaxation."
        )
    raise GuideError(
        f"guide site {site['name']!r} is {kind}, which is not a factorised Gaussian. Use MeanFieldGuide, "
        "Pyro's AutoNormal, AutoDiagonalNormal or AutoDelta, or a hand-written guide of independent Normal sites; "
        "for dependent posteriors use Pyro's Trace_ELBO."
    )
