# SPDX-License-Identifier: Apache-2.0
r"""Expected log-likelihoods :math:`\mathrm E[\log p(y \mid \theta)]` for distributions with uncertain parameters.

To add a rule, write a function of the observed value and of the parameters, which have the same names as in the
distribution's constructor, and register the function with :func:`expectation_rule`. Each parameter may be
:class:`~pyro_dvi.moments.GaussianMoments` or a tensor. A rule returns ``NotImplemented`` for parameters that it does
not cover.

Without a rule, the expectation is computed numerically: ``log_prob`` is averaged over predetermined integration points
of the uncertain parameters. If a parameter is a function of a Gaussian, as in ``concentration=softplus(h)``, the
function is applied to points of h, so that the parameter stays positive. The points depend on how many scalar
parameters of each density are uncertain: 64 equally spaced nodes for one, a disc of 28 x 28 nodes for two, and 128
scrambled Sobol points for more (vectors, matrices). They are the same in every call.

Status: equally spaced nodes are exact to 1e-8 for log densities that are smooth on the scale of the Gaussian; relative
errors are 1e-6 if the log density is half as wide as the Gaussian, and 1e-3 if it is a fifth as wide or has a kink.
Sobol points have errors of a few hundredths at variance 1. Functions that mix examples (along the first dimension) are
not covered.
"""

import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyro_dvi.core.densities import parent_in
from pyro_dvi.core.registry import registering
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.logits import LogitEstimator, Sobol
from pyro_dvi.expectations.points import (
    are_dependent,
    are_distinct,
    at_points,
    check_domain,
    event_dim_of,
    fixed_points,
    gaussian_of,
    identity_of,
    within_example,
)
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.quadrature import constants

_CHUNK = 2**22  # elements of one parameter held in memory at once


@dataclass(frozen=True)
class Evaluation:
    """The points at which a distribution with uncertain parameters is evaluated.

    Attributes:
        points: standard Gaussian points, ``[S, number of Gaussians]``.
        weights: ``[S]``; they sum to one.
        at: a function that returns the distribution at some of the points, with batch shape ``[S, *batch]``.
        rank: number of batch dimensions.
        size: number of values of the largest parameter.
    """

    points: Tensor
    weights: Tensor
    at: Callable[[Tensor], Any]
    size: int


def numerical_expectation(family: type, parameters: Mapping[str, Any], value: Tensor) -> Tensor:
    """Return the expected log-likelihood, with the batch shape of the distribution.

    Memory does not grow with the number of points: large problems are computed in parts, which the backward pass
    recomputes.

    Raises:
        UnsupportedError: if an uncertain parameter leaves its domain.
    """
    plan = evaluation(family, parameters, value)

    def part(points: Tensor, weights: Tensor) -> Tensor:
        return torch.tensordot(weights, plan.at(points).log_prob(value), 1)

    per_part = max(1, _CHUNK // max(plan.size, value.numel(), 1))
    if per_part >= len(plan.points):
        return part(plan.points, plan.weights)
    parts = zip(plan.points.split(per_part), plan.weights.split(per_part), strict=True)
    total: Any = 0.0
    for points, weights in parts:
        total = total + checkpoint(part, points, weights, use_reentrant=False, preserve_rng_state=False)
    return torch.as_tensor(total)


def evaluation(
    family: type, parameters: Mapping[str, Any], value: Tensor | None = None, num_points: int = 128
) -> Evaluation:
    """Choose the points for the Gaussians behind the parameters; parameters that share a Gaussian share its points.

    Args:
        family: the distribution class.
        parameters: the arguments of the distribution, by name.
        value: the observation, whose batch shape may be larger than the batch shape of the parameters.
        num_points: number of points if more than two scalar parameters of a density are uncertain.
    """
    uncertain = {k: p for k, p in parameters.items() if isinstance(p, GaussianMoments)}
    like = next(iter(uncertain.values())).loc
    keys = {name: identity_of(gaussian_of(p)) for name, p in uncertain.items()}
    shapes: dict[Hashable, tuple[int, ...]] = {}
    for name, p in uncertain.items():
        shape = _coordinates(family, name, p)
        if len(shape) >= len(shapes.get(keys[name], ())):  # their last dimensions agree
            shapes[keys[name]] = shape
    sizes = [math.prod(shape) for shape in shapes.values()]
    points, weights = fixed_points(sum(sizes), like, num_points)
    options = without_checks(family)
    fn = family(**{k: p.loc if k in uncertain else p for k, p in parameters.items()}, **options)
    rank = max(0 if value is None else value.dim() - len(fn.event_shape), len(fn.batch_shape))

    def at(points: Tensor) -> Any:
        found = {}
        blocks = dict(zip(shapes, points.split(sizes, 1), strict=True))
        for name, p in uncertain.items():
            values = at_points(p, blocks[keys[name]].reshape(len(points), *shapes[keys[name]]))
            check_domain(family, name, p, values)
            found[name] = aligned(values, rank + (event_dim_of(family, name) or 0))
        return family(**{**parameters, **found}, **options)

    return Evaluation(points, weights, at, max(p.numel() for p in uncertain.values()))


def _coordinates(family: type, name: str, parameter: GaussianMoments) -> tuple[int, ...]:
    """Return the shape of the elements that need separate points; different examples may share points."""
    inner = gaussian_of(parameter)
    depth = event_dim_of(family, name)
    link = parameter.link
    mixed = link is not None and not (link.elementwise or (link.moved and depth == 0))
    if depth is None or mixed:
        return within_example(parameter)
    return tuple(inner.shape[inner.dim() - depth :]) if depth else ()


def aligned(values: Tensor, rank: int) -> Tensor:
    """Insert dimensions after the first, so that ``[S, *]`` broadcasts against tensors of this rank."""
    return values.reshape(len(values), *(1,) * (rank + 1 - values.dim()), *values.shape[1:])


def without_checks(family: type) -> dict[str, bool]:
    """Return keyword arguments with which a distribution does not check its parameters."""
    names = inspect.signature(family).parameters
    return {"validate_args": False} if "validate_args" in names else {}


RULES: dict[type, Callable] = {}
_WITH_COVARIANCES: set[Callable] = set()
_DEFAULT_ESTIMATOR = Sobol()


class Found(NamedTuple):
    """A rule, the names of its parameters, and a flag for rules that use covariances between parameters."""

    rule: Callable
    names: frozenset[str]
    covariances: bool


def expectation_rule(*families: type, covariances: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the expected log-likelihood of distribution classes.

    The rule is called as ``rule(value, loc=..., scale=...)`` with the arguments of the distribution, and with
    ``estimator=`` if the rule has a parameter of that name (for the logits of classes).

    Args:
        families: the classes.
        covariances: True if the rule uses the covariances of parameters that are
            :class:`~pyro_dvi.moments.shared_noise.JointMoments`.

    Raises:
        ValueError: if a class already has a rule.

    Example:
        >>> class Unit(torch.distributions.Normal):
        ...     def __init__(self, loc):
        ...         super().__init__(loc, 1.0)
        >>> @expectation_rule(Unit)
        ... def unit(value, loc):
        ...     return -0.5 * ((value - loc.loc) ** 2 + loc.variance) - 0.918938533
        >>> expected_log_prob(
        ...     Unit, {"loc": GaussianMoments(torch.zeros(2), torch.ones(2))}, torch.zeros(2)
        ... )
        tensor([-1.4189, -1.4189])
    """

    def register(rule: Callable) -> Callable:
        _find.cache_clear()
        if covariances:
            _WITH_COVARIANCES.add(rule)
        return registering(RULES, families)(rule)

    return register


def expected_log_prob(
    family: type,
    parameters: Mapping[str, Any],
    value: Tensor,
    estimator: LogitEstimator | None = None,
) -> Tensor:
    r"""Return :math:`\mathrm E[\log p(y \mid \theta)]`, with the batch shape of the distribution.

    Status: each rule states its accuracy. Uncertain parameters are treated as independent, unless they are functions of
    the same Gaussian or of the same view of it, such as ``h.squeeze(-1)``. Copies such as ``h.clone()`` or
    ``h.flip(0)`` count as different Gaussians. Families without a rule use quadrature (:func:`numerical_expectation`).

    Args:
        family: the distribution class.
        parameters: the arguments of the distribution by name: moments, tensors or numbers.
        value: y.
        estimator: estimator of the expected log-normaliser of class probabilities; :class:`Sobol` by default.

    Raises:
        UnsupportedError: if an uncertain parameter can leave its domain.

    Example:
        >>> f = GaussianMoments(torch.tensor(0.0), torch.tensor(1.0))
        >>> expected_log_prob(
        ...     torch.distributions.Normal, {"loc": f, "scale": 1.0}, torch.tensor(1.0)
        ... )
        tensor(-1.9189)
    """
    given = {k: v for k, v in parameters.items() if k != "validate_args" and v is not None}
    uncertain = [p for p in given.values() if isinstance(p, GaussianMoments)]
    value = torch.as_tensor(value)
    if not uncertain:
        plain: Tensor = family(**given).log_prob(value)
        return plain
    found = _find(family)
    dependent = are_dependent(family, given)
    fits = found is not None and (found.covariances or not dependent)
    if found is not None and fits and given.keys() <= found.names and are_distinct(uncertain):
        like = uncertain[0].loc
        arguments = {k: _as_tensor(p, like) for k, p in given.items()}
        if "estimator" in found.names:
            arguments["estimator"] = estimator or _DEFAULT_ESTIMATOR
        result = found.rule(value, **arguments)
        if result is not NotImplemented:
            return result
    if dependent:
        names = ", ".join(k for k, p in given.items() if isinstance(p, GaussianMoments))
        raise UnsupportedError(
            f"{family.__name__}({names}) has parameters with covariances between them, which only Categorical, "
            "OneHotCategorical, Multinomial, MultivariateNormal and Normal (with a fixed scale or a scale exp(h)) "
            "support. Leave out full_covariance=True, use a MeanFieldGuide, or use LastLayerGuide with PerOutput()"
        )
    return numerical_expectation(family, given, value)


def _as_tensor(parameter: Any, like: Tensor) -> Any:
    if isinstance(parameter, GaussianMoments | Tensor):
        return parameter
    if isinstance(parameter, int | float):
        return constants(parameter, like)
    return torch.as_tensor(parameter, dtype=like.dtype, device=like.device)


@lru_cache(maxsize=256)
def _find(family: type) -> Found | None:
    takes_missing = "nanmasked" in getattr(getattr(family, "log_prob", None), "__module__", "")
    return None if takes_missing else find_rule(RULES, family)


def find_rule(table: Mapping[type, Callable], family: type) -> Found | None:
    """Return the rule of the class, or of a parent class with the same density.

    Args:
        table: the rules by distribution class.
        family: the class.
    """
    if (parent := parent_in(table, family)) is None:
        return None
    names = inspect.signature(table[parent]).parameters
    return Found(table[parent], frozenset(names), table[parent] in _WITH_COVARIANCES)
