# SPDX-License-Identifier: Apache-2.0
"""One run of guide and model in which every Gaussian latent is its mean and variance."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.expectations import LogitEstimator
from pyro_dvi.handlers.explained import explained_errors
from pyro_dvi.handlers.latents import (
    GaussianSite,
    Latent,
    is_identity,
    match_latents,
    unconstraining_transform,
    vector_parts,
)
from pyro_dvi.handlers.means import run_guide
from pyro_dvi.handlers.uncertain import uncertain_likelihoods
from pyro_dvi.moments import GaussianMoments, Link, MultiplicativeMoments
from pyro_dvi.moments.through_link import through_link
from pyro_dvi.multiplicative_normal import MultiplicativeNormal
from pyro_dvi.sites import SetLatents

__all__ = ["MomentRun", "PosteriorMoments", "median", "propagated", "reparameterised", "run_with_moments"]

Recorder = Callable[[Mapping[str, GaussianMoments]], AbstractContextManager[Any]]


@dataclass
class MomentRun:
    """The model's trace of one run with moments, and every latent site with its posterior marginal."""

    model_trace: Any
    latents: list[Latent]


def run_with_moments(
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: dict,
    sampled: Mapping[str, Tensor | bool] | None = None,
    estimator: LogitEstimator | None = None,
    recorder: Recorder = nullcontext,
) -> MomentRun:
    """Run the guide, then the model with the moments of the guide's Gaussians in place of values.

    Args:
        model: a Pyro model.
        guide: a guide of factorised Gaussians and point masses.
        args: positional arguments of both.
        kwargs: keyword arguments of both.
        sampled: guide sites to sample, see :class:`~pyro_dvi.handlers.structure.Structure`.
        estimator: for likelihoods by logits.
        recorder: given the moments that the model will use, by name and filled while it runs, returns the context in
            which it runs.

    Raises:
        GuideError: the guide is not a factorised Gaussian.
        ModelError: a latent site is missing in the guide.
        UnsupportedError: the model uses a function or distribution without a rule.
        DeviceError, DataError: as :func:`~pyro_dvi.handlers.means.run_at_means`.
    """
    guide_trace, gaussians = run_guide(model, guide, args, kwargs)
    moments = PosteriorMoments(gaussians, guide, sampled or {})
    with (
        explained_errors(model, [g.loc for g in gaussians.values()], args, kwargs),
        poutine.trace() as trace,
        uncertain_likelihoods(estimator),
        moments,
        recorder(moments.given),
        poutine.replay(trace=guide_trace),
    ):
        model(*args, **kwargs)
    return MomentRun(trace.trace, match_latents(trace.trace, guide_trace, gaussians, guide))


StandIn = Callable[[Tensor, Tensor, tuple[Any, ...]], Any]


def reparameterised(loc: Tensor, scale: Tensor, transforms: tuple[Any, ...]) -> Tensor:
    """Draw the value of a transformed Gaussian so that it can be differentiated."""
    return _composed(transforms)(loc + scale * torch.randn_like(loc))


def median(loc: Tensor, scale: Tensor, transforms: tuple[Any, ...]) -> Tensor:
    """Return the median of a transformed Gaussian."""
    return _composed(transforms)(loc)


def propagated(loc: Tensor, scale: Tensor, transforms: tuple[Any, ...]) -> Any:
    """Return the moments of a transformed Gaussian, linked to it; the median where elements are mixed (a simplex)."""
    function = _composed(transforms)
    if any(t.domain.event_dim or t.codomain.event_dim for t in transforms):
        return function(loc)
    parts = [t for t in _flat(transforms) if not is_identity(t)]
    name = "exp" if len(parts) == 1 and isinstance(parts[0], td.ExpTransform) else None
    link = Link(GaussianMoments(loc, scale.square()), function, name)
    moments = through_link(GaussianMoments(loc, scale.square(), link), lambda value: value)
    assert moments is not None
    return moments.linked(link)


def _composed(transforms: tuple[Any, ...]) -> Callable[[Tensor], Tensor]:
    def function(value: Tensor) -> Tensor:
        for transform in transforms:
            value = transform(value)
        return value

    return function


def _flat(transforms: tuple[Any, ...]) -> Iterator[Any]:
    for transform in transforms:
        if isinstance(transform, td.IndependentTransform):
            yield from _flat((transform.base_transform,))
        elif isinstance(transform, td.ComposeTransform):
            yield from _flat(tuple(transform.parts))
        else:
            yield transform


class PosteriorMoments(SetLatents):
    """Give each latent site of a model the moments of its posterior marginal.

    A Gaussian in the site's own space becomes :class:`~pyro_dvi.moments.GaussianMoments`. One that a transform takes
    to the site's space (a positive scale, say), or that sets the prior of another latent, is sampled by
    reparameterisation. Point masses are left to Pyro's replay, which has to be the inner of the two handlers.

    Args:
        gaussians: the guide's Gaussian sites.
        guide: the guide.
        sampled: guide sites that set the prior of another latent.
        stand_in: gives the value of a site that is sampled or transformed, from mean and standard deviation of its
            Gaussian and the transforms.

    Attributes:
        given: the moments of Gaussian sites that the model was given so far, by name.
    """

    def __init__(
        self,
        gaussians: dict[str, GaussianSite],
        guide: Callable,
        sampled: Mapping[str, Tensor | bool],
        stand_in: StandIn = reparameterised,
    ) -> None:
        super().__init__()
        self.gaussians = gaussians
        self.stand_in = stand_in
        self.given: dict[str, GaussianMoments] = {}
        self.vectors = dict(vector_parts(guide, gaussians))
        self.sampled = {name for name in sampled if sampled[name] is True}
        for site, part in self.vectors.items():
            mask = sampled.get(part.source.name, False)
            if mask is not False and bool((torch.as_tensor(mask) & part.elements).any()):
                self.sampled.add(site)

    def _value_of(self, site: Any) -> Any:
        name = site["name"]
        if name in self.gaussians:
            source = self.gaussians[name]
            value = self._value(source, source.transforms)
        elif f"{name}_unconstrained" in self.gaussians:
            value = self._value(self.gaussians[f"{name}_unconstrained"], _transforms_to(site["fn"]))
        elif name in self.vectors:
            part = self.vectors[name]
            value = self._moments(part.loc, part.scale, _transforms_to(site["fn"]), name in self.sampled)
        else:
            return None
        if isinstance(value, GaussianMoments) and value.link is None:
            self.given[name] = value
        return value

    def _value(self, source: GaussianSite, transforms: tuple[Any, ...]) -> Any:
        sampled = source.name in self.sampled
        if not transforms and not sampled and isinstance(source.base, MultiplicativeNormal):
            return MultiplicativeMoments(source.loc, source.base.alpha)
        return self._moments(source.loc, source.scale, transforms, sampled)

    def _moments(self, loc: Tensor, scale: Tensor, transforms: tuple[Any, ...], sampled: bool) -> Any:
        if not transforms and not sampled:
            return GaussianMoments(loc, scale.square())
        return self.stand_in(loc, scale, transforms)


def _transforms_to(prior: Any) -> tuple[Any, ...]:
    transform = unconstraining_transform(prior.support)
    return () if transform is None else (transform,)
