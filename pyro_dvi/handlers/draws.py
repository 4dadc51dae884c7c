# SPDX-License-Identifier: Apache-2.0
"""Run a guide of Gaussians so that each draw keeps its noise, and gradients with respect to it reach the mean."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.errors import GuideError
from pyro_dvi.handlers.distributions import strip_event_dims
from pyro_dvi.handlers.latents import GaussianSite
from pyro_dvi.natural_state import Statistics, leaf_of, wanted_of
from pyro_dvi.sites import SetLatents

__all__ = ["TrackedDraws"]


@dataclass
class TrackedDraws(SetLatents):
    """Draw the Gaussian sites of a guide as ``loc + noise``, where the noise is a constant of the graph.

    Args:
        wanted: what the optimizer wants measured for a parameter of means.

    Attributes:
        gaussians: the sites by name, with the drawn value.
        leaves: the parameter of the means of each.
        noise: standard Gaussian noise of each; zeros where the optimizer wants gradients at the mean.
        asked: what it wants of each.
    """

    wanted: Callable[[Tensor], Statistics] = wanted_of
    gaussians: dict[str, GaussianSite] = field(default_factory=dict, init=False)
    leaves: dict[str, Tensor] = field(default_factory=dict, init=False)
    noise: dict[str, Tensor] = field(default_factory=dict, init=False)
    asked: dict[str, Statistics] = field(default_factory=dict, init=False)

    def _value_of(self, site: Any) -> Tensor | None:
        name, base = site["name"], strip_event_dims(site["fn"])
        if not isinstance(base, td.Normal):
            if isinstance(base, dist.Delta):
                return None
            raise GuideError(
                f"guide site {name!r} is {type(base).__name__}: a NaturalGradientGuide has Normal sites only"
            )
        try:
            leaf = leaf_of(base.loc)
        except LookupError:
            raise GuideError(
                f"the mean of guide site {name!r} is no parameter, so a natural-gradient optimizer cannot move it: use "
                "NaturalGradientGuide"
            ) from None
        asked = self.wanted(leaf)
        noise = torch.zeros_like(base.loc) if asked.at_mean else torch.randn_like(base.loc)
        with torch.no_grad():
            shift = noise * base.scale
        value = base.loc + shift
        self.gaussians[name] = GaussianSite(name, value, base)
        self.leaves[name], self.noise[name], self.asked[name] = leaf, noise, asked
        return value
