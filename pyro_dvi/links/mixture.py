# SPDX-License-Identifier: Apache-2.0
"""Mixtures over the points at which uncertain parameters are evaluated."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td
from torch.distributions import constraints

_CHUNK = 2**22  # numbers drawn at once


class PointMixture(td.Distribution):
    r"""The mixture :math:`\sum_s w_s\,p(y \mid \theta_s)` of distributions of any kind.

    Points have a dimension on the left of the batch, so that whatever a distribution does to its last dimensions
    (``to_event``, a reshaping, single numbers of a vector) is done to the components alone.

    Status: exact for what it says.

    Args:
        components: the distributions at the points, of batch shape ``[S, *batch]``.
        weights: :math:`w_s`, ``[S]``, which sum to one.
        rank: batch dimensions on the right of the points, where others are on their left, as after :meth:`expand`.
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
        """Where observations may lie: what any component can give."""
        return _InAny(self.components.support, self.rank)

    @property
    def mean(self) -> Tensor:
        """The average of the components' means."""
        return self._average(self.components.mean, len(self.event_shape))

    @property
    def variance(self) -> Tensor:
        """Variance within the components and between their means."""
        return self._with_between(self.components.variance)

    @property
    def function_variance(self) -> Tensor | None:
        """The part of the variance that is not noise; None where the components do not know theirs."""
        inner = self.components
        while isinstance(inner, td.Independent):
            inner = inner.base_dist
        within = getattr(inner, "function_variance", None)
        return None if within is None else self._with_between(within.expand_as(self.components.mean))

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density, of the batch shape behind any dimensions of draws."""
        # The rounding of probabilities would end the tails.
        log_weights = self.weights.log().reshape(-1, *(1,) * self.rank)
        found = self.components.log_prob(self._beside_points(value)) + log_weights
        return torch.logsumexp(found, -1 - self.rank)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the distribution function."""
        return self._average(distribution_function(self.components, self._beside_points(value)))

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw a component for each observation by itself, then the observation."""
        shape, event_dim = torch.Size(sample_shape), len(self.event_shape)
        count, size = shape.numel(), self.batch_shape.numel()
        chosen = torch.multinomial(self.weights, count * size, replacement=True)
        chosen = chosen.reshape(count, *self.batch_shape).unsqueeze(-1 - self.rank)
        at_once = max(1, _CHUNK // max(1, len(self.weights) * size * self.event_shape.numel()))
        drawn = []
        for places in chosen.split(at_once):
            every: Tensor = self.components.sample((len(places),))
            places = places.reshape(*places.shape, *(1,) * event_dim)
            places = places.expand(*places.shape[: places.dim() - event_dim], *self.event_shape)
            point_dim = -1 - self.rank - event_dim
            drawn.append(every.gather(point_dim, places).squeeze(point_dim))
        return torch.cat(drawn).reshape(self._extended_shape(shape))

    def _with_between(self, within: Tensor) -> Tensor:
        """Average variances of the components, and add that of their means."""
        between = self.components.mean - self._beside_points(self.mean)
        return self._average(within + between.square(), len(self.event_shape))

    def _average(self, values: Tensor, more: int = 0) -> Tensor:
        """Average ``[..., S, *right]``, with ``more`` dimensions behind."""
        return (values.movedim(-1 - self.rank - more, -1) * self.weights).sum(-1)

    def _beside_points(self, value: Tensor) -> Tensor:
        """Return values ``[*draws, *batch, *event]`` with a dimension for the points."""
        value = value.expand(torch.broadcast_shapes(value.shape, self.batch_shape + self.event_shape))
        return value.unsqueeze(-1 - self.rank - len(self.event_shape))


class EqualMixture(td.Distribution):
    r"""The mixture :math:`\tfrac1K \sum_k p_k(y)` of distributions that are objects of their own.

    Args:
        each: the distributions, of one batch and event shape.
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (as in torch)
    support = None  # that of each of them, which checks its values itself

    def __init__(self, each: Sequence[Any]) -> None:
        self.each = list(each)
        super().__init__(each[0].batch_shape, each[0].event_shape, validate_args=False)

    def cdf(self, value: Tensor) -> Tensor:
        """Return the distribution function."""
        return torch.stack([distribution_function(fn, value) for fn in self.each]).mean(0)

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """Draw a component for each observation by itself, then the observation."""
        first, *others = self.each
        drawn: Tensor = first.sample(sample_shape)
        chosen = torch.randint(len(self.each), (*sample_shape, *self.batch_shape), device=drawn.device)
        chosen = chosen.reshape(*chosen.shape, *(1,) * len(self.event_shape))
        for k, fn in enumerate(others, 1):
            drawn = torch.where(chosen == k, fn.sample(sample_shape), drawn)
        return drawn


class _InAny(constraints.Constraint):
    """What lies in the support of any component.

    Args:
        inner: support of the components, whose limits may differ from one to the other.
        rank: batch dimensions on the right of the points.
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
    """Return the probability of less than ``value``, also where that lies outside the support of some components.

    Raises:
        NotImplementedError: the distribution has none in closed form.
    """
    lowest, highest = (getattr(fn.support, name, None) for name in ("lower_bound", "upper_bound"))
    value = value if lowest is None else value.clamp_min(lowest)
    found: Tensor = fn.cdf(value if highest is None else value.clamp_max(highest))
    return found
