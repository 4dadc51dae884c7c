# SPDX-License-Identifier: Apache-2.0
r"""Mixtures over points of uncertain parameters, and predictive distributions for Gaussian noise of uncertain scale."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Size, Tensor, distributions as td
from torch.distributions import constraints

from pyro_dvi.core.arguments import check_count
from pyro_dvi.core.densities import untransformed
from pyro_dvi.expectations.expectation import aligned
from pyro_dvi.expectations.points import check_domain, nodes_of
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.value import second_moment_of

if TYPE_CHECKING:
    from pyro_dvi.links.families import Joint

_CHUNK = 2**22  # largest number of elements of draws at once


class PointMixture(td.Distribution):
    r"""The mixture :math:`\sum_s w_s\,p(y \mid \theta_s)` of distributions of any kind.

    The dimension of the points is to the left of the batch, so anything that a distribution does to its last dimensions
    (``to_event``, reshaping, selecting elements of a vector) acts only on the components.

    Args:
        components: the distributions at the points, of batch shape ``[S, *batch]``.
        weights: :math:`w_s`, ``[S]``, which sum to one.
        rank: number of batch dimensions to the right of the points; :meth:`expand` adds dimensions to the left of the
            points.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (as in torch)

    def __init__(self, components: Any, weights: Tensor, rank: int | None = None) -> None:
        self.components, self.weights = components, weights
        self.rank = len(components.batch_shape) - 1 if rank is None else rank
        batch_shape = list(components.batch_shape)
        del batch_shape[-1 - self.rank]
        super().__init__(torch.Size(batch_shape), components.event_shape, validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Return the mixture for more observations of the same distribution."""
        left = len(batch_shape) - self.rank
        shape = (*batch_shape[:left], len(self.weights), *batch_shape[left:])
        return type(self)(self.components.expand(shape), self.weights, self.rank)

    @property
    def support(self) -> Any:
        """The union of the supports of the components."""
        return _InAny(self.components.support, self.rank)

    @property
    def mean(self) -> Tensor:
        """The average of the components' means."""
        return self._average(self.components.mean, len(self.event_shape))

    @property
    def variance(self) -> Tensor:
        """Sum of the variances within components and between their means."""
        return self._with_between(self.components.variance)

    @property
    def function_variance(self) -> Tensor | None:
        """The part of the variance that is not noise; None if the components do not provide theirs."""
        within = getattr(untransformed(self.components), "function_variance", None)
        return None if within is None else self._with_between(within.expand_as(self.components.mean))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, whose shape is the batch shape with any dimensions of draws in front."""
        # Average in logarithms, because rounded probabilities would cut off the tails.
        log_weights = self.weights.log().reshape(-1, *(1,) * self.rank)
        found = self.components.log_prob(self._beside_points(value)) + log_weights
        return torch.logsumexp(found, -1 - self.rank)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the distribution function."""
        return self._average(distribution_function(self.components, self._beside_points(value)))

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw a component for each observation separately, then the observation."""
        shape, size = torch.Size(sample_shape), self.batch_shape.numel()
        count, points = shape.numel(), len(self.weights)
        chosen = torch.multinomial(self.weights, count * size, replacement=True).reshape(count, size)
        drawn, numel = [], max(1, size * self.event_shape.numel())
        parts = list(chosen.split(max(1, _CHUNK // numel)))
        while parts:
            part = parts.pop()
            # Every component is drawn as often as the most frequent one is needed, and no draw is used twice.
            nth = _earlier_equals(part)
            often = int(nth.max()) + 1
            if len(part) > 1 and often * points * numel > 4 * _CHUNK:
                parts += part.chunk(2)
                continue
            every: Tensor = self.components.sample((often,))
            every = every.movedim(-1 - self.rank - len(self.event_shape), 1)
            every = every.reshape(often * points, size, *self.event_shape)
            drawn.append(every[nth * points + part, torch.arange(size, device=part.device)])
        return torch.cat(drawn).reshape(self._extended_shape(shape))

    def _with_between(self, within: Tensor) -> Tensor:
        """Average variances of the components, and add the variance between their means."""
        between = self.components.mean - self._beside_points(self.mean)
        return self._average(within + between.square(), len(self.event_shape))

    def _average(self, values: Tensor, more: int = 0) -> Tensor:
        """Average values ``[..., S, *right]`` over S; ``more`` dimensions follow the batch dimensions on the right."""
        return (values.movedim(-1 - self.rank - more, -1) * self.weights).sum(-1)

    def _beside_points(self, value: Tensor) -> Tensor:
        """Return values ``[*draws, *batch, *event]`` with a dimension for the points."""
        value = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape + self.event_shape))
        return value.unsqueeze(-1 - self.rank - len(self.event_shape))


def _earlier_equals(values: Tensor) -> Tensor:
    """Return, for each element of ``[n, m]``, how many elements above it in its column are equal to it."""
    ordered, order = values.mT.contiguous().sort(stable=True)
    first = torch.searchsorted(ordered, ordered)
    place = torch.arange(len(values), device=values.device) - first
    return torch.empty_like(place).scatter_(-1, order, place).mT


class EqualMixture(td.Distribution):
    r"""The mixture :math:`\tfrac1K \sum_k p_k(y)` of separate distribution objects.

    Args:
        each: the distributions, which have the same batch shape and the same event shape.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (as in torch)
    support = None  # each component checks its values itself

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = list(each)
        super().__init__(each[0].batch_shape, each[0].event_shape, validate_args=False)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the distribution function."""
        return torch.stack([distribution_function(fn, value) for fn in self.each]).mean(0)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw a component for each observation separately, then the observation."""
        first, *others = self.each
        drawn: Tensor = first.sample(sample_shape)
        chosen = torch.randint(len(self.each), (*sample_shape, *self.batch_shape), device=drawn.device)
        chosen = chosen.reshape(*chosen.shape, *(1,) * len(self.event_shape))
        for k, fn in enumerate(others, 1):
            drawn = torch.where(chosen == k, fn.sample(sample_shape), drawn)
        return drawn


class _InAny(constraints.Constraint):
    """The union of the supports of the components.

    Args:
        inner: support of the components, whose limits may differ between components.
        rank: number of batch dimensions to the right of the points.
    """

    def __init__(self, inner: Any, rank: int) -> None:
        self.inner, self.rank = inner, rank
        self.is_discrete, self.event_dim = inner.is_discrete, inner.event_dim
        super().__init__()

    def __repr__(self) -> str:
        return repr(self.inner)

    def check(self, value: Tensor) -> Tensor:
        beside = value.unsqueeze(-1 - self.rank - self.event_dim)
        found: Tensor = self.inner.check(beside)
        return found.any(-1 - self.rank)


def distribution_function(fn: Any, value: Tensor) -> Tensor:
    """Return the distribution function at ``value``, which may lie outside the support of some components.

    Raises:
        NotImplementedError: if the distribution function has no closed form.
    """
    lowest, highest = (getattr(fn.support, name, None) for name in ("lower_bound", "upper_bound"))
    value = value if lowest is None else value.clamp_min(lowest)
    value = value if highest is None else value.clamp_max(highest)
    if getattr(type(fn), "cdf", None) is not td.TransformedDistribution.cdf:
        return fn.cdf(value)  # type: ignore[no-any-return]
    sign: Any = 1  # the base distribution may have its own bounds, as for Gumbel
    for transform in reversed(fn.transforms):
        value, sign = transform.inv(value), sign * transform.sign
    found = distribution_function(fn.base_dist, value)
    return found if isinstance(sign, int) and sign == 1 else 0.5 + sign * (found - 0.5)


Noisy = Callable[[Tensor, Any, Any], Any]


class NoiseLink(ABC):
    """A map from Gaussian noise of uncertain scale to a predictive distribution."""

    @abstractmethod
    def predictive(
        self, noisy: Noisy, loc: Tensor, spread: Any, scale: GaussianMoments, joint: Joint | None = None
    ) -> Any:
        """Return the predictive distribution of Gaussian noise around a Gaussian mean.

        Args:
            noisy: a function of a mean, its spread and the variance of the noise, which returns a distribution.
            loc: mean.
            spread: variances of the mean, of the same shape, or covariances ``[*batch, n, n]`` of the n elements of an
                event.
            scale: scale of the noise.
            joint: covariances of mean and scale; None if all are independent.
        """


@dataclass(frozen=True)
class MomentMatched(NoiseLink):
    r"""One Normal with the exact mean and variance, :math:`\mathcal N(\mu, v_\mu + \mathrm E[s^2])`.

    For a scale :math:`s = e^h`, that is, a log-variance :math:`c = 2h`, :math:`\mathrm E[s^2] = e^{\bar c + v_c/2}`.
    The variance is correct whatever the correlation of mean and scale.

    Source: Schmitt & Roth (2021), Eq. 19.
    """

    def predictive(
        self, noisy: Noisy, loc: Tensor, spread: Any, scale: GaussianMoments, joint: Joint | None = None
    ) -> Any:
        """Return a Normal (LogNormal, MultivariateNormal)."""
        return noisy(loc, spread, _mean_square(scale))


def _mean_square(scale: GaussianMoments) -> Tensor:
    """Return the exact mean square of a scale; for an exponential, compute it from the Gaussian in the exponent."""
    if scale.link is not None and scale.link.name == "exp":
        h = scale.link.inner
        return torch.exp(2 * (h.loc + h.variance))
    square: Tensor = second_moment_of(scale)
    return square


@dataclass(frozen=True)
class GaussHermite(NoiseLink):
    r"""A mixture over nodes of the Gaussian behind the scale, :math:`\sum_k w_k\,\mathcal N(\mu, v_\mu + s_k^2)`.

    It has the same mean and variance as :class:`MomentMatched`, and heavier tails due to the uncertain scale. If mean
    and scale are correlated, each node uses the conditional mean and variance given its scale. If the scales of one
    event depend on several Gaussians, Sobol points replace the nodes.

    Args:
        num_nodes: number of components.
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
    """Return a Gaussian over vectors, matrices or tensors with full covariance plus independent noise.

    Args:
        loc: mean, ``[*batch, *shape]``.
        covariance: covariance of all elements of an event, ``[*batch, n, n]``.
        variance: variance of the noise, broadcastable to ``loc``.
        shape: shape of an event.
    """
    variance = torch.as_tensor(variance, dtype=loc.dtype, device=loc.device).expand(loc.shape)
    total = covariance + torch.diag_embed(variance.flatten(-len(shape)))
    vectors = td.MultivariateNormal(loc.flatten(-len(shape)), covariance_matrix=total)
    found: Any = vectors if len(shape) == 1 else ShapedNormal(vectors, shape)
    found.function_variance = torch.diagonal(covariance, dim1=-2, dim2=-1).unflatten(-1, shape)
    return found


class Normal(td.Normal):
    """Gaussian noise around a Gaussian mean; keeps the variance of the mean as ``function_variance``.

    Args:
        loc: mean of the mean.
        function_variance: variance of the mean.
        noise_variance: variance of the noise.
    """

    def __init__(self, loc: Tensor, function_variance: Any, noise_variance: Any) -> None:
        super().__init__(loc, (function_variance + noise_variance).sqrt())
        self.function_variance = torch.as_tensor(function_variance).to(self.scale).expand(self.batch_shape)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Return the expanded distribution, with the expanded variance of the mean."""
        found = super().expand(batch_shape, _instance or object.__new__(type(self)))
        found.function_variance = self.function_variance.expand(batch_shape)
        return found


class ShapedNormal(td.TransformedDistribution):
    """Gaussian vectors reshaped to matrices or tensors.

    Args:
        vectors: the distribution of the vectors.
        shape: shape of one observation.
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
