# SPDX-License-Identifier: Apache-2.0
"""Run a guide with every Gaussian site at its mean."""

from dataclasses import dataclass, field
from typing import Any, NoReturn

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.errors import GuideError
from pyro_dvi.sites import SetLatents

__all__ = ["GaussianSite", "PosteriorMeans", "strip_event_dims"]


def strip_event_dims(fn: Any) -> Any:
    """Return the distribution below ``to_event``, so that its parameters have the value's shape."""
    while hasattr(fn, "reinterpreted_batch_ndims"):
        fn = fn.base_dist
    return fn


@dataclass
class GaussianSite:
    """A Gaussian sample site of a guide.

    Attributes:
        name: the guide's site name.
        value: what the guide returned: a tracked copy of the mean, or a sample.
        base: the Normal distribution, its parameters attached to those of the guide.
        transforms: maps from the Gaussian to the site's value (``LogNormal`` and its like); usually none.
        sampled: elements of the value that were sampled instead of set to the mean: a mask, or True or False.
    """

    name: str
    value: Tensor
    base: td.Normal
    transforms: tuple[Any, ...] = ()
    sampled: Tensor | bool = False

    @property
    def loc(self) -> Tensor:
        """Mean, attached to the parameters."""
        return self.base.loc

    @property
    def scale(self) -> Tensor:
        """Standard deviation, attached to the parameters."""
        return self.base.scale

    def expanded_scale(self) -> Tensor:
        """Standard deviations of the elements that stand at their mean; zero for those that were sampled."""
        return (
            self.scale
            if self.sampled is False
            else self.scale.masked_fill(torch.as_tensor(self.sampled), 0.0)
        )


@dataclass
class PosteriorMeans(SetLatents):
    """Set Gaussian sites of a guide to their mean, tracked for differentiation; sample those in ``sampled``.

    Every mean becomes a node of its own in the autograd graph, so that gradients of the likelihood with respect to it
    do not mix with other uses of the parameters. Delta sites pass. Anything else has no mean that could
    stand for it, or is not a diagonal Gaussian, and is refused by name.

    Args:
        sampled: per guide site True, or a mask of the elements, to draw by reparameterisation.
    """

    sampled: dict[str, Tensor | bool] = field(default_factory=dict)
    gaussians: dict[str, GaussianSite] = field(default_factory=dict, init=False)

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
