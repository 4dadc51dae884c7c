# SPDX-License-Identifier: Apache-2.0
"""From an uncertain mean and an uncertain noise scale to a predictive distribution."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.choice import check_count
from pyro_dvi.expectations.gaussian import check_domain, nodes_of
from pyro_dvi.expectations.scales import power_of
from pyro_dvi.links.mixture import weighted_mixture
from pyro_dvi.moments import GaussianMoments

__all__ = ["GaussHermite", "MomentMatched", "NoiseLink"]


class NoiseLink(ABC):
    """How Gaussian noise of uncertain scale becomes a predictive distribution."""

    @abstractmethod
    def predictive(
        self, loc: Tensor, variance: Tensor | float, scale: GaussianMoments, cls: Any
    ) -> td.Distribution:
        """Return the predictive distribution.

        Args:
            loc: mean.
            variance: of the mean.
            scale: of the noise.
            cls: class of the components, ``Normal`` or ``LogNormal``.
        """


@dataclass(frozen=True)
class MomentMatched(NoiseLink):
    r"""One Normal with the right mean and variance, :math:`\mathcal N(\mu, v_\mu + \mathrm E[s^2])`.

    With a scale :math:`s = e^h`, that is a log-variance :math:`c = 2h`, :math:`\mathrm E[s^2] = e^{\bar c + v_c/2}`.

    Source: Schmitt & Roth (2021), Eq. 19.
    """

    def predictive(
        self, loc: Tensor, variance: Tensor | float, scale: GaussianMoments, cls: Any
    ) -> td.Distribution:
        """Return a Normal (LogNormal)."""
        return cls(loc, (variance + power_of(td.Normal, "scale", scale, 2)).sqrt())


@dataclass(frozen=True)
class GaussHermite(NoiseLink):
    r"""A mixture over nodes of the Gaussian behind the scale, :math:`\sum_k w_k\,\mathcal N(\mu, v_\mu + s_k^2)`.

    It has the same mean and variance as :class:`MomentMatched` and the heavier tails that an uncertain scale gives.

    Args:
        num_nodes: components.
    """

    num_nodes: int = 16

    def __post_init__(self) -> None:
        check_count("num_nodes", self.num_nodes)

    def predictive(
        self, loc: Tensor, variance: Tensor | float, scale: GaussianMoments, cls: Any
    ) -> td.Distribution:
        """Return a mixture of Normals (LogNormals)."""
        scales, weights = nodes_of(scale, self.num_nodes)
        check_domain(cls, "scale", scale, scales)
        spread = torch.as_tensor(variance, dtype=scales.dtype, device=scales.device)
        total = (spread.unsqueeze(-1) + scales.movedim(0, -1).square()).sqrt()
        return weighted_mixture(weights, cls(loc.unsqueeze(-1), total))
