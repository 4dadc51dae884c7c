# SPDX-License-Identifier: Apache-2.0
r"""Expected log-likelihoods of any distribution by its own ``log_prob`` at fixed points.

One uncertain number per density: 64 equally spaced nodes. Two: a disc of 28 x 28. More (vectors, matrices): 128
scrambled Sobol points, the same in every call. Points are taken from the Gaussian behind each parameter and passed
through its function, so that ``concentration=softplus(h)`` stays positive.

Status: equally spaced nodes are exact to 1e-8 for log densities that are smooth on the scale of the Gaussian; relative
errors of 1e-6 where the log density has half its width, 1e-3 where a fifth, or a kink. Sobol points have an error of
some hundredths at variance 1. Functions that mix the first dimension (the examples) are not foreseen.
"""

import inspect
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from pyro_dvi.expectations.gaussian import (
    at_points,
    check_domain,
    event_dim_of,
    gaussian_of,
    identity_of,
    within_example,
)
from pyro_dvi.expectations.points import fixed_points
from pyro_dvi.moments import GaussianMoments

_CHUNK = 2**22  # values of one parameter that are held at once


@dataclass(frozen=True)
class Evaluation:
    """Where a distribution with uncertain parameters is evaluated.

    Attributes:
        points: standard Gaussian, ``[S, number of Gaussians]``.
        weights: ``[S]``, sum to one.
        at: the distribution with batch shape ``[S, *batch]`` at some of the points.
        rank: number of batch dimensions.
        size: number of values of the largest parameter.
    """

    points: Tensor
    weights: Tensor
    at: Callable[[Tensor], Any]
    rank: int
    size: int


def numerical_expectation(family: type, parameters: Mapping[str, Any], value: Tensor) -> Tensor:
    """Return the expected log-likelihood, of the batch shape.

    Memory does not grow with the number of points: what does not fit is computed in parts, and again in the backward
    pass.

    Raises:
        UnsupportedError: an uncertain parameter leaves its domain.
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
        parameters: its arguments by name.
        value: what will be scored, for its batch dimensions.
        num_points: points where more than two numbers of one density are uncertain.
    """
    uncertain = {k: p for k, p in parameters.items() if isinstance(p, GaussianMoments)}
    like = next(iter(uncertain.values())).loc
    keys = {name: identity_of(gaussian_of(p)) for name, p in uncertain.items()}
    shapes: dict[Hashable, tuple[int, ...]] = {}
    for name, p in uncertain.items():
        shape = _coordinates(family, name, p)
        if len(shape) >= len(shapes.get(keys[name], ())):  # of the same last dimensions
            shapes[keys[name]] = shape
    blocks: dict[Hashable, slice] = {}
    count = 0
    for key, shape in shapes.items():
        blocks[key] = slice(count, count + math.prod(shape))
        count += math.prod(shape)
    points, weights = fixed_points(count, like, num_points)
    rank = _batch_rank(family, parameters, value)
    options = without_checks(family)

    def at(points: Tensor) -> Any:
        found = {}
        for name, p in uncertain.items():
            block = points[:, blocks[keys[name]]]
            values = at_points(p, block.reshape(len(points), *shapes[keys[name]]))
            check_domain(family, name, p, values)
            found[name] = aligned(values, rank + (event_dim_of(family, name) or 0))
        return family(**{**parameters, **found}, **options)

    return Evaluation(points, weights, at, rank, max(p.numel() for p in uncertain.values()))


def _coordinates(family: type, name: str, parameter: GaussianMoments) -> tuple[int, ...]:
    """Shape of the numbers that need points of their own; other elements, of other examples, may share them."""
    inner = gaussian_of(parameter)
    depth = event_dim_of(family, name)
    link = parameter.link
    mixed = link is not None and not (link.elementwise or (link.moved and depth == 0))
    if depth is None or mixed:
        return within_example(parameter)
    return tuple(inner.shape[inner.dim() - depth :]) if depth else ()


def _batch_rank(family: type, parameters: Mapping[str, Any], value: Tensor | None) -> int:
    """How many batch dimensions the log density has."""
    means = {k: p.loc if isinstance(p, GaussianMoments) else p for k, p in parameters.items()}
    fn = family(**means, **without_checks(family))
    rank = 0 if value is None else value.dim() - len(fn.event_shape)
    return max(rank, len(fn.batch_shape))


def aligned(values: Tensor, rank: int) -> Tensor:
    """Insert dimensions after the first, so that ``[S, *]`` broadcasts against tensors of that rank."""
    return values.reshape(len(values), *(1,) * (rank + 1 - values.dim()), *values.shape[1:])


def without_checks(family: type) -> dict[str, bool]:
    """Keyword arguments that build a distribution without checking its parameters."""
    names = inspect.signature(family).parameters
    return {"validate_args": False} if "validate_args" in names else {}
