# SPDX-License-Identifier: Apache-2.0
"""One run of guide and model in which every Gaussian latent is its mean and variance."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.handlers.latents import GaussianSite, Latent, Marginals, elementary, match_latents
from pyro_dvi.handlers.means import Call, run_guide
from pyro_dvi.moments import GaussianMoments, Link, MultiplicativeMoments
from pyro_dvi.moments.through_link import through_link
from pyro_dvi.multiplicative_normal import MultiplicativeNormal
from pyro_dvi.sites import SetLatents

__all__ = ["PosteriorMoments", "median", "propagated", "reparameterised", "run_with_moments"]

Around = Callable[[Mapping[str, GaussianMoments]], AbstractContextManager[Any]]


def run_with_moments(
    call: Call,
    sampled: Mapping[str, Tensor | bool] | None = None,
    around: Around = nullcontext,
) -> tuple[Any, list[Latent]]:
    """Run the guide, then the model with the moments of the guide's Gaussians in place of values.

    Args:
        call: of a model and a guide of factorised Gaussians and point masses.
        sampled: guide sites to sample, see :class:`~pyro_dvi.handlers.structure.Structure`.
        around: given the moments that the model will use, by name and filled while it runs, returns the context in
            which it runs: :func:`~pyro_dvi.handlers.uncertain.uncertain_likelihoods`, which lets distributions take
            moments, and what is to watch.

    Returns:
        the model's trace, and every latent site with its posterior marginal.

    Raises:
        GuideError: the guide is not a factorised Gaussian.
        ModelError: a latent site is missing in the guide.
        UnsupportedError: the model uses a function or distribution without a rule.
        DeviceError, DataError: as :func:`~pyro_dvi.handlers.means.run_at_means`.
    """
    means = run_guide(call)
    moments = PosteriorMoments(means.gaussians, call.guide, sampled or {})
    with call.explained(g.loc for g in means.gaussians.values()), moments, around(moments.given):
        model_trace = call.trace_model(means.trace)
    return model_trace, match_latents(model_trace, means.trace, moments.marginals)


StandIn = Callable[[Tensor, Tensor, Any], Any]


def reparameterised(loc: Tensor, scale: Tensor, transform: Any) -> Tensor:
    """Draw the value of a transformed Gaussian so that it can be differentiated."""
    return median(loc + scale * torch.randn_like(loc), scale, transform)


def median(loc: Tensor, scale: Tensor, transform: Any) -> Tensor:
    """Return the median of a transformed Gaussian."""
    return loc if transform is None else transform(loc)


def propagated(loc: Tensor, scale: Tensor, transform: Any) -> Any:
    """Return the moments of a transformed Gaussian, linked to it; the median where elements are mixed (a simplex)."""
    if transform is None:
        return GaussianMoments(loc, scale.square())
    parts = elementary(transform)
    if any(part.domain.event_dim or part.codomain.event_dim for part in parts):
        return transform(loc)
    name = "exp" if len(parts) == 1 and isinstance(parts[0], td.ExpTransform) else None
    link = Link(GaussianMoments(loc, scale.square()), transform, name)
    moments = through_link(GaussianMoments(loc, scale.square(), link), lambda value: value)
    assert moments is not None
    return moments.linked(link)


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
        self.stand_in = stand_in
        self.given: dict[str, GaussianMoments] = {}
        self.marginals = Marginals(guide, gaussians)
        self.sampled = {name for name in sampled if sampled[name] is True}
        for site, part in self.marginals.joint.items():
            mask = sampled.get(part.source.name, False)
            if mask is not False and bool((torch.as_tensor(mask) & part.elements).any()):
                self.sampled.add(site)

    def _value_of(self, site: Any) -> Any:
        name = site["name"]
        part = self.marginals.of(name, site["fn"])
        if part is None:
            return None
        owner = name if name in self.marginals.joint else part.source.name
        if part.transform is not None or owner in self.sampled:
            return self.stand_in(part.loc, part.scale, part.transform)
        base = part.source.base
        if isinstance(base, MultiplicativeNormal):
            self.given[name] = MultiplicativeMoments(part.loc, base.alpha)
        else:
            self.given[name] = GaussianMoments(part.loc, part.scale.square())
        return self.given[name]
