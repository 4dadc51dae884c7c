# SPDX-License-Identifier: Apache-2.0
"""Models with known answers, and the table of guides that every test of an objective runs through."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoNormal
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_dvi.guides import MeanFieldGuide, PerSite, SGDStepSize

Moments = dict[str, tuple[Tensor, Tensor]]


def residual_network(num_classes: int) -> nn.Module:
    """Torchvision's residual network of the widths of ResNet-18, with one block each where that has two."""
    resnet = pytest.importorskip("torchvision.models.resnet")
    return resnet.ResNet(resnet.BasicBlock, [1, 1, 1, 1], num_classes=num_classes)


@dataclass
class LinearRegression:
    """Bayesian linear regression with known noise: everything about it has a closed form.

    The latents are "weight" (one per feature) and "bias", with independent Normal priors.
    """

    num_data: int = 12
    num_features: int = 3
    prior_scale: float = 0.7
    noise: float = 0.5
    dtype: torch.dtype = torch.float64
    device: str = "cpu"
    x: Tensor = field(init=False)
    y: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        x = torch.randn(self.num_data, self.num_features, dtype=torch.float64, generator=generator)
        weight = torch.linspace(-1, 1, self.num_features, dtype=torch.float64)
        noise = torch.randn(self.num_data, dtype=torch.float64, generator=generator)
        self.x = x.to(self.device, self.dtype)
        self.y = (x @ weight + 0.3 + self.noise * noise).to(self.device, self.dtype)

    def model(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        zero = x.new_zeros(())
        weight = pyro.sample("weight", dist.Normal(zero, self.prior_scale).expand([x.shape[1]]).to_event(1))
        bias = pyro.sample("bias", dist.Normal(zero, self.prior_scale))
        with pyro.plate("data", self.num_data, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(x @ weight + bias, self.noise), obs=y)

    def information(self) -> Tensor:
        """Fisher information matrix of (weight, bias)."""
        design = torch.cat([self.x, torch.ones_like(self.x[:, :1])], -1)
        return design.T @ design / self.noise**2

    def loss(self, moments: Moments, kl_weight: float = 1.0) -> Tensor:
        """Closed-form negative ELBO at the given means and standard deviations, differentiable in them."""
        (weight, sw), (bias, sb) = moments["weight"], moments["bias"]
        scale = torch.cat([sw.expand_as(weight), sb.reshape(1)])
        loc = torch.cat([weight, bias.reshape(1)])
        fit = dist.Normal(self.x @ weight + bias, self.noise).log_prob(self.y).sum()
        spread = 0.5 * (scale**2 * self.information().diagonal()).sum()
        ratio = scale / self.prior_scale
        kl = (0.5 * (ratio**2 + (loc / self.prior_scale) ** 2 - 1) - ratio.log()).sum()
        return -fit + spread + kl_weight * kl

    def map_loss(self, moments: Moments) -> Tensor:
        """Minus log joint density at the means."""
        weight, bias = moments["weight"][0], moments["bias"][0]
        prior = dist.Normal(weight.new_zeros(()), self.prior_scale)
        fit = dist.Normal(self.x @ weight + bias, self.noise).log_prob(self.y).sum()
        return -fit - prior.log_prob(weight).sum() - prior.log_prob(bias).sum()


class HandWritten:
    """A guide as a user writes it: parameters and Normal sites."""

    def __call__(self, x: Tensor, y: Tensor | None = None) -> None:
        loc = pyro.param("w_loc", lambda: x.new_zeros(x.shape[1]))
        scale = pyro.param("w_scale", lambda: x.new_full((x.shape[1],), 0.1), constraint=constraints.positive)
        pyro.sample("weight", dist.Normal(loc, scale).to_event(1))
        loc = pyro.param("b_loc", lambda: x.new_zeros(()))
        scale = pyro.param("b_scale", lambda: x.new_full((), 0.1), constraint=constraints.positive)
        pyro.sample("bias", dist.Normal(loc, scale))

    def moments(self) -> Moments:
        return {
            "weight": (pyro.param("w_loc"), pyro.param("w_scale")),
            "bias": (pyro.param("b_loc"), pyro.param("b_scale")),
        }


def _of_modules(guide: Any) -> Moments:
    return {name: (getattr(guide.locs, name), getattr(guide.scales, name)) for name in ("weight", "bias")}


def _of_vector(guide: Any) -> Moments:
    scales = dict((site["name"], s) for site, s in guide._unpack_latent(guide.scale))
    return {site["name"]: (loc, scales[site["name"]]) for site, loc in guide._unpack_latent(guide.loc)}


def _of_fixed_scale(guide: Any) -> Moments:
    family = guide.scale_family
    scale = guide.locs.weight.new_tensor((family.lr / (2 * family.batch_size)) ** 0.5)
    return {name: (getattr(guide.locs, name), scale) for name in ("weight", "bias")}


@dataclass(frozen=True)
class GuideCase:
    """One way to write a posterior for :class:`LinearRegression`.

    Attributes:
        name: test id.
        make: model -> guide.
        moments: guide -> differentiable mean and standard deviation per site.
        learns_scales: whether variances are free.
        shared_scales: whether one variance serves a whole site.
    """

    name: str
    make: Callable[[Callable], Any]
    moments: Callable[[Any], Moments]
    learns_scales: bool = True
    shared_scales: bool = False

    def start(self, problem: LinearRegression) -> Any:
        """Return a guide at a random, non-trivial posterior."""
        guide = self.make(problem.model)
        guide(problem.x, problem.y)
        with torch.no_grad():
            for _, parameter in pyro.get_param_store().named_parameters():
                parameter.add_(0.4 * torch.randn_like(parameter))
        return guide


GUIDES = [
    GuideCase("MeanFieldGuide", MeanFieldGuide, _of_modules),
    GuideCase("PerSite", lambda m: MeanFieldGuide(m, scale=PerSite()), _of_modules, shared_scales=True),
    GuideCase(
        "SGDStepSize",
        lambda m: MeanFieldGuide(m, scale=SGDStepSize(0.1, 4)),
        _of_fixed_scale,
        learns_scales=False,
    ),
    GuideCase("AutoNormal", AutoNormal, _of_modules),
    GuideCase("AutoDiagonalNormal", AutoDiagonalNormal, _of_vector),
    GuideCase("handwritten", lambda _: HandWritten(), HandWritten.moments),
]

# A point mass: TaylorELBO is MAP estimation then.
POINT_GUIDE = GuideCase(
    "AutoDelta",
    AutoDelta,
    lambda g: {n: (getattr(g, n), torch.zeros((), dtype=torch.float64)) for n in ("weight", "bias")},
    learns_scales=False,
)


def gradients() -> dict[str, Tensor]:
    """Gradients of all unconstrained parameters in Pyro's store, which are cleared."""
    found = {}
    for name, parameter in pyro.get_param_store().named_parameters():
        if parameter.grad is not None:
            found[name] = parameter.grad.clone()
            parameter.grad = None
    return found
