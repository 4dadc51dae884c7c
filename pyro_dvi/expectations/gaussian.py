# SPDX-License-Identifier: Apache-2.0
"""The Gaussian behind a parameter, and the values of the parameter at points of that Gaussian."""

from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.points import gauss_hermite
from pyro_dvi.moments import Moments
from pyro_dvi.moments.floor import floored

__all__ = [
    "at_points",
    "check_domain",
    "constraint_of",
    "event_dim_of",
    "gaussian_of",
    "mean_at_nodes",
    "nodes_of",
]

# Functions whose every value is in the domain that they are used for.
_SAFE = {
    "exp": "positive",
    "softplus": "positive",
    "sigmoid": "unit",
    "special_expit": "unit",
    "softmax": "simplex",
}


def gaussian_of(parameter: Moments) -> Moments:
    """Return the Gaussian that the parameter is a function of; its own moments if it has no link."""
    return parameter if parameter.link is None else parameter.link.inner


def at_points(parameter: Moments, points: Tensor) -> Tensor:
    """Return values ``[S, *shape]`` of a parameter.

    Args:
        parameter: moments, with or without a link.
        points: standard Gaussian, ``[S, *]``, broadcastable to ``[S, *shape]`` of :func:`gaussian_of`.
    """
    inner = gaussian_of(parameter)
    points = points.reshape(len(points), *(1,) * (inner.dim() - points.dim() + 1), *points.shape[1:])
    values = torch.addcmul(inner.loc, points, floored(inner.variance).sqrt())
    if parameter.link is None:
        return values
    # vmap, since the function may name dimensions from the left
    result: Tensor = torch.vmap(parameter.link.function)(values)
    return result


def nodes_of(parameter: Moments, num_nodes: int = 32) -> tuple[Tensor, Tensor]:
    """Return Gauss-Hermite values ``[num_nodes, *shape]`` of a parameter, and their weights."""
    nodes, weights = gauss_hermite(num_nodes, parameter.loc)
    return at_points(parameter, nodes), weights


def mean_at_nodes(values: Tensor, weights: Tensor) -> Tensor:
    """Average over the first dimension."""
    return torch.tensordot(weights, values, 1)


def constraint_of(family: type, name: str) -> Any:
    """Return the domain of a parameter of the family, None if it is not known."""
    table = getattr(family, "arg_constraints", None)
    return table.get(name) if isinstance(table, dict) else None


def event_dim_of(family: type, name: str) -> int | None:
    """Return how many of the last dimensions of a parameter belong together, None if it is not known."""
    constraint = constraint_of(family, name)
    return None if constraint is None or constraints.is_dependent(constraint) else constraint.event_dim


def check_domain(family: type, name: str, parameter: Moments, values: Tensor) -> None:
    """Refuse values that the family does not admit, which a Gaussian without a link can take.

    Raises:
        UnsupportedError: names the family and the parameter.
    """
    constraint = constraint_of(family, name)
    if constraint is None or constraint is constraints.real or constraints.is_dependent(constraint):
        return
    if parameter.link is not None and parameter.link.name in _SAFE:
        return
    if _admitted(constraint, values):
        return
    if constraint in (constraints.simplex, constraints.unit_interval):
        remedy = "give logits= instead of probs=, or end the network in softmax or sigmoid"
    else:
        remedy = "make it positive by F.softplus(h) or torch.exp(h) as the last function of the network"
    raise UnsupportedError(
        f"{family.__name__}({name}=...) is uncertain and can leave its domain ({constraint}): its Gaussian reaches "
        f"{values.detach().min().item():.3g}. For the expected log-likelihood, {remedy}, so that the Gaussian is "
        "known before that function."
    )


def _admitted(constraint: Any, values: Tensor) -> bool:
    if constraint is constraints.simplex:  # families normalise
        return bool((values >= 0).all())
    return bool(constraint.check(values).all())
