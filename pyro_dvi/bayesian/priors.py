# SPDX-License-Identifier: Apache-2.0
"""The accepted forms of ``prior_scale``, and their conversion to the prior of a parameter.

Each form becomes a :class:`Prior`. This module converts numbers, distributions, callables and mappings; He scaling,
learned scales and sampled scales are defined in :mod:`~pyro_dvi.bayesian.prior_scales`. To add a form, subclass
:class:`Prior` and implement ``prepared``. Often, a callable of ``(name, parameter)`` that returns a number, a
distribution or a prior is enough.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor

from pyro_dvi.bayesian.converted import DistributionPrior, SitePrior
from pyro_dvi.bayesian.selection import Candidate, suggestion
from pyro_dvi.core.distributions import broadcasts_to, placed_like, tensors_of
from pyro_dvi.errors import ArgumentError, ModelError

PriorLike = Any
"""A float, a distribution, a :class:`Prior`, a callable of ``(name, parameter)`` that returns one of these,
or a mapping from name patterns to these."""


class Prior(ABC):
    """A recipe for the prior of one parameter."""

    @abstractmethod
    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Check that the prior suits ``target``, and return a function that makes it.

        The function is called after all parameters have been checked. By then, the module of ``target`` is a
        ``PyroModule``, and the function may add attributes to it, such as a learned scale.
        """

    def check_used(self, targets: Sequence[Candidate]) -> None:  # noqa: B027 (most priors have one part)
        """Raise an error if a name pattern of the prior matches none of ``targets``."""


@dataclass(frozen=True, eq=False)
class Given(Prior):
    """A distribution of a single weight, or of the whole weight tensor."""

    distribution: TorchDistributionMixin

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Check that the prior's shape and support fit the parameter."""
        given, value = self.distribution, target.parameter.detach()
        place = f"The prior {type(given).__name__} of {target.name!r}"
        check_no_gradient(given, place)
        events = value.dim() - len(given.event_shape)
        batch, event = value.shape[: max(events, 0)], value.shape[max(events, 0) :]
        if events < 0 or event != given.event_shape or not broadcasts_to(given.batch_shape, batch):
            raise ModelError(
                f"{place} has the shape {tuple(given.shape())}, but the parameter has the shape {tuple(value.shape)}: "
                "pass a scalar distribution, one of this shape, or a callable of (name, parameter) that returns one"
            )
        if given.support.is_discrete or not given.has_rsample:
            raise ModelError(
                f"{place} is discrete or its samples have no gradients: use one such as Normal, Laplace or StudentT"
            )
        if not bool(placed_like(given, value).expand(batch).support.check(value).all()):
            raise ModelError(
                f"The initial value of {target.name!r} is outside the support {given.support} of its prior: change one"
            )
        return partial(DistributionPrior, given=given, attribute=target.attribute)


@dataclass(frozen=True, eq=False)
class ByRule(Prior):
    """A callable of ``(name, parameter)``."""

    rule: Callable[[str, Tensor], PriorLike]

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Call the rule with a detached parameter."""
        answer = self.rule(target.name, target.parameter.detach())
        place = f"The value of {getattr(self.rule, '__name__', self.rule)!s} for {target.name!r}"
        return as_prior(answer, place).prepared(target)


@dataclass(frozen=True, eq=False)
class ByName(Prior):
    """A mapping from name patterns to priors; the first matching pattern applies."""

    priors: Mapping[str, Prior]

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Prepare the prior of the first matching pattern."""
        for pattern, prior in self.priors.items():
            if target.is_called(pattern):
                return prior.prepared(target)
        raise ModelError(
            f"No pattern of prior_scale matches {target.name!r}: add '*' as the last pattern, for all other parameters"
        )

    def check_used(self, targets: Sequence[Candidate]) -> None:
        """Raise an error if a pattern matches no parameter."""
        for pattern in self.priors:
            if not any(target.is_called(pattern) for target in targets):
                raise ModelError(
                    f"The pattern {pattern!r} of prior_scale matches no chosen parameter. "
                    f"{suggestion(pattern, targets)}"
                )


def as_prior(prior: PriorLike, place: str = "prior_scale") -> Prior:
    """Turn anything that ``prior_scale`` accepts into a :class:`Prior`.

    Args:
        prior: a float, a distribution, a prior, a callable of ``(name, parameter)``, or a mapping from name patterns to
            these.
        place: the name of ``prior`` in error messages.

    Raises:
        ArgumentError: if it is none of these, or a number that is not positive and finite.

    Example:
        >>> as_prior(0.5)
        Given(distribution=Normal(loc: 0.0, scale: 0.5))
    """
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, TorchDistributionMixin):
        return Given(prior)
    if isinstance(prior, Mapping):
        if not all(isinstance(pattern, str) for pattern in prior):
            raise ArgumentError(f"{place} is a mapping, whose keys must be name patterns")
        return ByName({pattern: as_prior(value, f"{place}[{pattern!r}]") for pattern, value in prior.items()})
    if isinstance(prior, int | float) or (isinstance(prior, Tensor) and prior.dim() == 0):
        # Double precision keeps the given value exact for weights of any dtype; checking values would wait for the
        # device.
        scale = torch.tensor(positive(prior, place), dtype=torch.float64)
        return Given(dist.Normal(torch.zeros_like(scale), scale, validate_args=False))
    if callable(prior) and not isinstance(prior, type):
        return ByRule(prior)
    raise ArgumentError(
        f"{place} is {prior!r}: pass a number, a distribution of pyro.distributions, fan_in, LearnedScale(), "
        "OptimalScale(), HierarchicalScale(), a callable of (name, parameter), or a mapping from name patterns to these"
    )


def positive(value: object, place: str) -> float:
    """Return ``value`` as a float if it is a positive finite number; raise an error otherwise."""
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ArgumentError(
            f"{place} is {value!r}, but a scale must be a positive, finite number (exclude= omits a parameter)"
        )
    return float(value)


def check_no_gradient(distribution: TorchDistributionMixin, place: str) -> None:
    """Raise an error if a distribution contains trainable tensors, because no optimizer would find them."""
    if any(tensor.requires_grad for tensor in tensors_of(distribution)):
        raise ArgumentError(
            f"{place} contains a tensor that requires gradients, which optimizers would not find: use LearnedScale()"
        )
