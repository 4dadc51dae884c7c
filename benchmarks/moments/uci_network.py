# SPDX-License-Identifier: Apache-2.0
"""Many networks of one hidden layer as one Pyro model: the leading dimension of every weight counts networks."""

from typing import Any

import pyro
import pyro.distributions as dist
import torch
import torch.nn.functional as F
from pyro import poutine
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_dvi.gaussians.optimal_scale import OptimalScaleNormal
from pyro_dvi.moment_propagation.elbo import VarianceWeighted

HIDDEN = 50
INPUT_AXIS = {site: (0, 1) for site in ("hidden", "mean", "noise")}  # noise per network and input unit


class Networks(PyroModule):
    r"""K heteroscedastic regressions, :math:`y \sim \mathcal N(f(x), e^{c(x)})`.

    f and c are linear in the same 50 rectified hidden units. Weights have Normal priors; biases have none. The loss is
    the sum of the networks' own, so that they share nothing but the arithmetic.

    Args:
        num_inputs: d.
        sizes: number of training rows of each network.
        prior_scale: standard deviation of all weights.
        alpha: where given, the prior variance of each weight tensor is optimal under an inverse-Gamma prior with this
            alpha, whose mode is the square of ``prior_scale``.
        kl_weights: of each network, on top of the ELBO's own.
        weighting: of observations, for objectives that have none of their own.

    Attributes:
        step: training steps done, for ``weighting``.
        warm_up: factor of ``kl_weights``, for objectives that have none.
    """

    def __init__(
        self,
        num_inputs: int,
        sizes: Tensor,
        *,
        prior_scale: float = 1.0,
        alpha: float | None = None,
        kl_weights: Tensor | float = 1.0,
        weighting: VarianceWeighted | None = None,
    ) -> None:
        super().__init__()
        count = len(sizes)
        self.shapes = {"hidden": (num_inputs, HIDDEN), "mean": (HIDDEN, 1), "noise": (HIDDEN, 1)}
        self.sizes = sizes.float()
        self.prior_scale, self.alpha = prior_scale, alpha
        self.kl_weights = torch.as_tensor(kl_weights).expand(count)
        self.weighting = weighting
        self.step, self.warm_up = 0, 1.0
        self.hidden_bias = nn.Parameter(torch.zeros(count, 1, HIDDEN))
        self.mean_bias = nn.Parameter(torch.zeros(count, 1, 1))
        self.noise_bias = nn.Parameter(torch.zeros(count, 1, 1))

    def initial_weights(self, seed: int) -> dict[str, Tensor]:
        """Xavier-normal weights."""
        generator = torch.Generator().manual_seed(seed)
        return {
            site: torch.randn(len(self.sizes), *shape, generator=generator) * (2 / sum(shape)) ** 0.5
            for site, shape in self.shapes.items()
        }

    def weights(self) -> list[Tensor]:
        """Sample the weights from their prior, under the KL weight of their network."""
        with (
            pyro.plate("networks", len(self.sizes), dim=-1),
            poutine.scale(scale=self.kl_weights * self.warm_up),
        ):
            return [pyro.sample(site, self.prior(shape)) for site, shape in self.shapes.items()]

    def prior(self, shape: tuple[int, int]) -> Any:
        """Return the prior of a weight tensor of one network."""
        if self.alpha is None:
            return dist.Normal(0.0, self.prior_scale).expand(shape).to_event(2)
        alpha = torch.tensor(self.alpha)
        return OptimalScaleNormal(alpha, (alpha + 1) * self.prior_scale**2, shape)

    def forward(self, x: Tensor, y: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Observe ``y`` at inputs ``x``: example by network by feature, ``[m, K]`` at ``[m, K, d]``."""
        hidden, to_mean, to_noise = self.weights()
        units = F.relu(x.transpose(0, 1) @ hidden + self.hidden_bias)
        mean = (units @ to_mean + self.mean_bias).squeeze(-1).t()
        log_variance = (units @ to_noise + self.noise_bias).squeeze(-1).t()
        noise = dist.Normal(mean, (0.5 * log_variance).exp())
        scale = self.sizes / (len(x) if mask is None else mask.sum(0))
        if self.weighting is not None and y is not None and self.training:
            scale = scale * self.weighting.weights(noise, self.step)
        with (
            pyro.plate("networks of examples", len(self.sizes), dim=-1),
            pyro.plate("examples", len(x), dim=-2),
            poutine.scale(scale=scale),
            poutine.mask(mask=True if mask is None else mask),
        ):
            return pyro.sample("y", noise, obs=y)
