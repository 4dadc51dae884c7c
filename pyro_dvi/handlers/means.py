# SPDX-License-Identifier: Apache-2.0
"""Run a guide with every Gaussian site at its mean."""

from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor
from torch import distributions as td

from pyro_dvi.errors import GuideError

__all__ = ["GaussianSite", "PosteriorMeans", "is_latent", "strip_event_dims"]


def strip_event_dims(fn: Any) -> Any:
    """Return the distribution below ``to_event``, so that its parameters have the value's shape."""
    while hasattr(fn, "reinterpreted_batch_ndims"):
        fn = fn.base_dist
    return fn


def is_latent(msg: Any) -> bool:
    """Whether a sample site of a run is latent, and no matter of Pyro's own."""
    own = msg["infer"].get("_do_not_trace") or type(msg["fn"]).__name__ == "_Subsample"
    return not (msg["is_observed"] or own)


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
class PosteriorMeans(Messenger):
    """Set Gaussian sites of a guide to their mean, tracked for differentiation; sample those in ``sampled``.

    Every mean becomes a node of its own in the autograd graph, so that gradients of the likelihood with respect to it
    do not mix with other uses of the parameters. Delta sites pass. Anything else has no mean that could
    stand for it, or is not a diagonal Gaussian, and is refused by name.

    Args:
        sampled: per guide site True, or a mask of the elements, to draw by reparameterisation.
    """

    sampled: dict[str, Tensor | bool] = field(default_factory=dict)
    gaussians: dict[str, GaussianSite] = field(default_factory=dict, init=False)

    def _pyro_sample(self, msg: Any) -> None:
        if not is_latent(msg):
            return
        base = strip_event_dims(msg["fn"])
        transforms: tuple[Any, ...] = ()
        if isinstance(base, td.TransformedDistribution):
            transforms = tuple(base.transforms)
            base = strip_event_dims(base.base_dist)
            if any(t.domain.event_dim or t.codomain.event_dim for t in transforms):
                self._refuse(msg)
        if isinstance(base, td.Normal):
            self._set_to_mean(msg, base, transforms)
        elif not isinstance(base, dist.Delta):
            self._refuse(msg)

    def _set_to_mean(self, msg: Any, base: td.Normal, transforms: tuple[Any, ...]) -> None:
        name = msg["name"]
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
        msg["value"] = value
        msg["done"] = True

    @staticmethod
    def _refuse(msg: Any) -> None:
        fn = strip_event_dims(msg["fn"])
        kind = type(fn).__name__
        if getattr(fn, "has_enumerate_support", False):
            raise GuideError(
                f"guide site {msg['name']!r} is discrete ({kind}); only Gaussian posteriors can be expanded around "
                "their mean. Sum the variable out of the model (pyro.infer.config_enumerate with TraceEnum_ELBO), "
                "or replace it by a continuous relaxation."
            )
        raise GuideError(
            f"guide site {msg['name']!r} is {kind}, which is not a factorised Gaussian. Use MeanFieldGuide, "
            "Pyro's AutoNormal, AutoDiagonalNormal or AutoDelta, or a hand-written guide of independent Normal sites; "
            "for dependent posteriors use Pyro's Trace_ELBO."
        )
