# SPDX-License-Identifier: Apache-2.0
"""A guide of multiplicative noise that has started, how its noise is laid out, and a functional model for it."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.gaussians.normals import MultiplicativeNormal
from pyro_dvi.moment_propagation.multiplicative_noise import MultiplicativeNoiseGuide

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1)
ALPHA_0 = 0.04858735157374206  # log(1 + exp(-3))


def started(model: Any, *args: Any, **options: Any) -> MultiplicativeNoiseGuide:
    guide = MultiplicativeNoiseGuide(model, **options)
    guide.initialize(*args)
    return guide


def kinds(guide: MultiplicativeNoiseGuide) -> dict[str, str]:
    """Class of the posterior of each site, in unconstrained space."""
    return {name: type(strip_event_dims(q)).__name__ for name, q in guide._marginals().items()}


def noise_shapes(guide: MultiplicativeNoiseGuide) -> dict[str, tuple[int, ...]]:
    posteriors = {name: strip_event_dims(q) for name, q in guide._marginals().items()}
    return {k: tuple(p.alpha.shape) for k, p in posteriors.items() if isinstance(p, MultiplicativeNormal)}


def functional(x: Tensor, y: Tensor | None = None) -> None:
    zero = x.new_zeros(())
    noise = pyro.sample("noise", dist.LogNormal(zero, 0.3))
    w1 = pyro.sample("w1", dist.Normal(zero, 1.0).expand([5, 3]).to_event(2))
    b1 = pyro.sample("b1", dist.Normal(zero, 1.0).expand([5]).to_event(1))
    w2 = pyro.sample("w2", dist.Normal(zero, 1.0).expand([5]).to_event(1))
    shift = pyro.sample("shift", dist.Normal(zero, 1.0))
    f = torch.tanh(F.linear(x, w1, b1)) @ w2 + shift
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, noise), obs=y)
