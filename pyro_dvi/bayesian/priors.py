# SPDX-License-Identifier: Apache-2.0
"""What ``prior_scale`` accepts, and how each form becomes the prior of a parameter.

Everything becomes a :class:`Prior`: numbers, distributions, callables and mappings here; He scaling, learned and
sampled scales in :mod:`~pyro_dvi.bayesian.scales`. Writing a new one: subclass :class:`Prior` with a ``place`` method
that returns a :class:`~pyro_dvi.bayesian.site_prior.SitePrior`. Most wishes need less: a callable of
``(name, parameter)`` may return a float, a distribution or any prior.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn.module import PyroModule
from torch import Tensor
from torch.distributions import Distribution

from pyro_dvi.bayesian.selection import Candidate, suggestion
from pyro_dvi.bayesian.site_prior import DistributionPrior, SitePrior
from pyro_dvi.core.distributions import broadcasts_to, placed_like, tensors_of
from pyro_dvi.errors import ArgumentError, ModelError

PriorLike = Any
"""A float, a distribution, a :class:`Prior`, a callable of ``(name, parameter)`` that returns one of these,
or a mapping from name patterns to these."""


class Prior(ABC):
    """How the prior of one parameter is made."""

    @abstractmethod
    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Return the prior of ``target``, and add to the modules what it needs (a learned scale, say).

        Args:
            target: the parameter, whose module is a ``PyroModule`` by now.
            root: the module that is converted.
        """

    def check(self, target: Candidate) -> None:  # noqa: B027 (most priors suit every parameter)
        """Raise if the prior does not suit ``target``; called for all parameters before any is changed."""

    def resolved(self, target: Candidate) -> "Prior":
        """Return the prior that ``target`` gets in the end; rules and mappings look it up."""
        return self

    def unused(self, targets: Iterable[Candidate]) -> str | None:
        """Say what part of the prior concerns none of ``targets``, or return ``None``."""
        return None


@dataclass(frozen=True)
class FixedScale(Prior):
    """``N(0, scale²)``: what a number means."""

    scale: float

    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Return the Normal prior."""
        # In double precision, so that a weight of any dtype gets the value that was given. Validation waits for the
        # device.
        deviation = torch.tensor(self.scale, dtype=torch.float64)
        normal = dist.Normal(torch.zeros_like(deviation), deviation, validate_args=False)
        return DistributionPrior(target.attribute, f"Normal(0, {self.scale:.4g})", normal)


@dataclass(frozen=True, eq=False)
class Given(Prior):
    """A distribution of a single weight, or of the whole weight."""

    distribution: TorchDistributionMixin

    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Return the distribution, expanded to the parameter's shape with all dimensions as one event."""
        return DistributionPrior(target.attribute, described(self.distribution), self.distribution)

    def check(self, target: Candidate) -> None:
        """Compare shape and support with the parameter."""
        given, shape = self.distribution, target.parameter.shape
        name = type(given).__name__
        check_no_gradient(given, f"The prior {name} of {target.name!r}")
        events = len(given.event_shape)
        batch, event = shape[: len(shape) - events], shape[len(shape) - events :]
        if len(shape) < events or event != given.event_shape or not broadcasts_to(given.batch_shape, batch):
            raise ModelError(
                f"The prior {name} of {target.name!r} has the shape {tuple(given.shape())}, and the "
                f"parameter {tuple(shape)}. Pass a scalar distribution, or one of the parameter's shape; a "
                "callable of (name, parameter) can make one for each parameter."
            )
        if given.support.is_discrete or not given.has_rsample:
            raise ModelError(
                f"The prior {name} of {target.name!r} is discrete or cannot be differentiated through its "
                "draws; weights need a continuous, reparameterised distribution such as Normal, Laplace or "
                "StudentT."
            )
        value = target.parameter.detach()
        if not bool(placed_like(given, value).expand(batch).support.check(value).all()):
            raise ModelError(
                f"The initial value of {target.name!r} lies outside the support {given.support} of its prior "
                f"{name}, so no guide could start from it. Use a prior over all real numbers, or change the "
                "initial value."
            )


@dataclass(frozen=True, eq=False)
class ByRule(Prior):
    """A callable of ``(name, parameter)``."""

    rule: Callable[[str, Tensor], PriorLike]

    def resolved(self, target: Candidate) -> Prior:
        """Call the rule; it sees a detached parameter."""
        answer = self.rule(target.name, target.parameter.detach())
        place = f"The prior rule {getattr(self.rule, '__name__', self.rule)!s} for {target.name!r}"
        if answer is None:
            raise ArgumentError(f"{place} returned None; return a float, a distribution or a prior.")
        return as_prior(answer, place).resolved(target)

    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Place what the rule says."""
        return self.resolved(target).place(target, root)


@dataclass(frozen=True, eq=False)
class ByName(Prior):
    """A mapping from name patterns to priors; the first pattern that matches decides."""

    priors: Mapping[str, Prior]

    def resolved(self, target: Candidate) -> Prior:
        """Return the prior of the first matching pattern."""
        for pattern, prior in self.priors.items():
            if self._matches(pattern, target):
                return prior.resolved(target)
        raise ModelError(
            f"No pattern of prior_scale matches {target.name!r}; add one, for instance '*' as the last for "
            "the rest."
        )

    def unused(self, targets: Iterable[Candidate]) -> str | None:
        """Name the first pattern that matches no parameter at all."""
        targets = list(targets)
        for pattern in self.priors:
            if not any(self._matches(pattern, target) for target in targets):
                return (
                    f"The pattern {pattern!r} of prior_scale matches no chosen parameter. "
                    f"{suggestion(pattern, targets)}"
                )
        return None

    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Place the prior of the first matching pattern."""
        return self.resolved(target).place(target, root)

    @staticmethod
    def _matches(pattern: str, target: Candidate) -> bool:
        return any(fnmatchcase(name, pattern) for name in target.names)


def as_prior(prior: PriorLike, place: str = "prior_scale") -> Prior:
    """Turn anything that ``prior_scale`` accepts into a :class:`Prior`.

    Args:
        prior: a float, a distribution, a prior, a callable of ``(name, parameter)`` or a mapping of name
            patterns.
        place: what to call it in an error.

    Raises:
        ArgumentError: if it is none of these, or a number that is not positive and finite.

    Example:
        >>> as_prior(0.5)
        FixedScale(scale=0.5)
    """
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, Distribution):
        if not isinstance(prior, TorchDistributionMixin):
            raise ArgumentError(
                f"{place} is a {type(prior).__module__}.{type(prior).__name__}, a distribution of torch; "
                "take the one of the same name from pyro.distributions."
            )
        return Given(prior)
    if isinstance(prior, Mapping):
        if not prior or not all(isinstance(pattern, str) for pattern in prior):
            raise ArgumentError(f"{place} is a mapping; its keys must be name patterns, at least one.")
        return ByName({pattern: as_prior(value, f"{place}[{pattern!r}]") for pattern, value in prior.items()})
    if isinstance(prior, int | float) or (isinstance(prior, Tensor) and prior.dim() == 0):
        return FixedScale(positive(prior, place))
    if isinstance(prior, Tensor):
        raise ArgumentError(
            f"{place} is a tensor of shape {tuple(prior.shape)}; for one scale per weight pass a "
            "distribution, pyro.distributions.Normal(0., scale)."
        )
    if callable(prior) and not isinstance(prior, type):
        return ByRule(prior)
    raise ArgumentError(
        f"{place} is {prior!r}. Pass a number, a Pyro distribution, fan_in, LearnedScale(), "
        "HierarchicalScale(), a callable of (name, parameter), or a mapping from name patterns to these."
    )


def positive(value: object, place: str) -> float:
    """Return ``value`` as a float if it is a positive finite number, and raise otherwise."""
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"{place} is {value!r}; a scale is a positive number.")
    if not (value > 0 and math.isfinite(value)):
        raise ArgumentError(
            f"{place} is {value}; a scale must be positive and finite. To keep a parameter deterministic, "
            "leave it out with exclude=."
        )
    return float(value)


def check_no_gradient(distribution: TorchDistributionMixin, place: str) -> None:
    """Raise if a distribution holds trainable tensors, which no optimizer would see."""
    if any(tensor.requires_grad for tensor in tensors_of(distribution)):
        raise ArgumentError(
            f"{place} holds a tensor that requires gradients, which Pyro's optimizers would not see; use "
            "LearnedScale() for a scale that is learned."
        )


def described(
    distribution: TorchDistributionMixin, parents: Callable[[Tensor], Sequence[str]] = lambda value: ()
) -> str:
    """Return a short text such as ``Laplace(loc=0, scale=1)``.

    Args:
        distribution: what to describe.
        parents: names the sites that a parameter was drawn from. Such a parameter is shown as ``scale from s``,
            not by its value, which is one random draw.
    """
    inner = distribution
    while hasattr(inner, "base_dist") and type(inner).__name__ in ("Independent", "ExpandedDistribution"):
        inner = inner.base_dist
    parts = []
    for name in getattr(inner, "arg_constraints", {}):
        # Stored or computed from what is stored; not the lazy second parametrisation (logits for probs).
        known = name in vars(inner) or isinstance(getattr(type(inner), name, None), property)
        value = getattr(inner, name) if known else None
        if isinstance(value, Tensor) and (sources := parents(value)):
            more = ", ..." if len(sources) > 2 else ""
            parts.append(f"{name} from {', '.join(sources[:2])}{more}")
        elif isinstance(value, Tensor):
            same = value.numel() > 0 and bool((value == value.flatten()[0]).all())
            shown = (
                f"{value.flatten()[0].item():.4g}" if same else "×".join(map(str, value.shape)) + " values"
            )
            parts.append(f"{name}={shown}")
    if not parts and isinstance(base := vars(inner).get("base_dist"), TorchDistributionMixin):
        parts = [described(base, parents)]
    return f"{type(inner).__name__}({', '.join(parts)})"
