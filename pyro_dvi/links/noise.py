# SPDX-License-Identifier: Apache-2.0
"""From an uncertain mean and an uncertain noise scale to a predictive distribution."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Size, Tensor
from torch import distributions as td

from pyro_dvi.core.arguments import check_count
from pyro_dvi.expectations.gaussian import check_domain, nodes_of
from pyro_dvi.expectations.numerical import aligned
from pyro_dvi.links.joint import Joint
from pyro_dvi.links.mixture import PointMixture
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.value import second_moment_of

Noisy = Callable[[Tensor, Any, Any], Any]


class NoiseLink(ABC):
    """How Gaussian noise of uncertain scale becomes a predictive distribution."""

    @abstractmethod
    def predictive(
        self, noisy: Noisy, loc: Tensor, spread: Any, scale: GaussianMoments, joint: Joint | None = None
    ) -> Any:
        """Return the predictive distribution of Gaussian noise around a Gaussian mean.

        Args:
            noisy: makes a distribution of a mean, its spread, and the variance of the noise.
            loc: mean.
            spread: its variances of the same shape, or covariances ``[*batch, n, n]`` of the n numbers of an event.
            scale: of the noise.
            joint: covariances of mean and scale; None where they are independent, number by number.
        """


@dataclass(frozen=True)
class MomentMatched(NoiseLink):
    r"""One Normal with the right mean and variance, :math:`\mathcal N(\mu, v_\mu + \mathrm E[s^2])`.

    With a scale :math:`s = e^h`, that is a log-variance :math:`c = 2h`, :math:`\mathrm E[s^2] = e^{\bar c + v_c/2}`.
    The variance is right whatever the correlation of mean and scale.

    Source: Schmitt & Roth (2021), Eq. 19.
    """

    def predictive(
        self, noisy: Noisy, loc: Tensor, spread: Any, scale: GaussianMoments, joint: Joint | None = None
    ) -> Any:
        """Return a Normal (LogNormal, MultivariateNormal)."""
        return noisy(loc, spread, _mean_square(scale))


def _mean_square(scale: GaussianMoments) -> Tensor:
    """Exact, also where only the Gaussian behind an exponential is known, and not its own variance."""
    if scale.link is not None and scale.link.name == "exp":
        h = scale.link.inner
        return torch.exp(2 * (h.loc + h.variance))
    square: Tensor = second_moment_of(scale)
    return square


@dataclass(frozen=True)
class GaussHermite(NoiseLink):
    r"""A mixture over nodes of the Gaussian behind the scale, :math:`\sum_k w_k\,\mathcal N(\mu, v_\mu + s_k^2)`.

    It has the same mean and variance as :class:`MomentMatched` and the heavier tails that an uncertain scale gives.
    Where mean and scale are correlated, each node has the mean and variance given its scale; where the scales of one
    event are several Gaussians, Sobol points take the place of the nodes.

    Args:
        num_nodes: components.
    """

    num_nodes: int = 16

    def __post_init__(self) -> None:
        check_count("num_nodes", self.num_nodes)

    def predictive(
        self, noisy: Noisy, loc: Tensor, spread: Any, scale: GaussianMoments, joint: Joint | None = None
    ) -> Any:
        """Return a mixture of Normals (LogNormals, MultivariateNormals)."""
        if joint is not None:
            loc, spread, scales, weights = joint.given_scale(loc, scale, self.num_nodes)
        else:
            scales, weights = nodes_of(scale, self.num_nodes)
            check_domain(td.Normal, "scale", scale, scales)
            scales = aligned(scales, max(loc.dim(), scale.dim()))
        return PointMixture(noisy(loc, spread, scales.square()), weights)


def correlated_normal(loc: Tensor, covariance: Tensor, variance: Any, shape: Size) -> Any:
    """Return Gaussian noise of some variance around vectors, matrices or tensors of full covariance.

    Args:
        loc: mean, ``[*batch, *shape]``.
        covariance: of all numbers of an event, ``[*batch, n, n]``.
        variance: of the noise, broadcastable to ``loc``.
        shape: of an event.
    """
    variance = torch.as_tensor(variance, dtype=loc.dtype, device=loc.device).expand(loc.shape)
    total = covariance + torch.diag_embed(variance.flatten(-len(shape)))
    vectors = td.MultivariateNormal(loc.flatten(-len(shape)), covariance_matrix=total)
    found: Any = vectors if len(shape) == 1 else ShapedNormal(vectors, shape)
    found.function_variance = torch.diagonal(covariance, dim1=-2, dim2=-1).unflatten(-1, shape)
    return found


class Normal(td.Normal):
    """Gaussian noise around a Gaussian mean, which still knows the variance of the mean, ``function_variance``.

    Args:
        loc: mean of the mean.
        function_variance: its variance.
        noise_variance: of the noise.
    """

    def __init__(self, loc: Tensor, function_variance: Any, noise_variance: Any) -> None:
        super().__init__(loc, (function_variance + noise_variance).sqrt())
        self.function_variance = torch.as_tensor(function_variance).to(self.scale).expand(self.batch_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Keep the variance of the mean."""
        found = super().expand(batch_shape, _instance or object.__new__(type(self)))
        found.function_variance = self.function_variance.expand(batch_shape)
        return found


class ShapedNormal(td.TransformedDistribution):
    """Gaussian vectors as matrices or tensors.

    Args:
        vectors: the distribution of the vectors.
        shape: of one observation.
    """

    def __init__(self, vectors: td.Distribution, shape: Size) -> None:
        super().__init__(vectors, [td.ReshapeTransform(vectors.event_shape, shape)], validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean of each element."""
        return self.base_dist.mean.reshape(*self.batch_shape, *self.event_shape)

    @property
    def variance(self) -> Tensor:
        """Variance of each element."""
        return self.base_dist.variance.reshape(*self.batch_shape, *self.event_shape)
