# SPDX-License-Identifier: Apache-2.0
r"""Expected log-likelihoods :math:`\mathrm E[\log p(y \mid \theta)]` where parameters of p are uncertain.

Adding a rule: write a function of the observed value and of the parameters by the names of the constructor, each of
which may be :class:`~pyro_dvi.moments.GaussianMoments` or a tensor, and register it with :func:`expectation_rule`.
A parameter that does not go well with the rule is declined by returning ``NotImplemented``; the expectation is then
taken numerically, as for every distribution without a rule (:mod:`pyro_dvi.expectations.numerical`).
"""

import inspect
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dvi.core.registry import registering
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.gaussian import are_dependent, are_distinct
from pyro_dvi.expectations.logits import LogitEstimator, Sobol
from pyro_dvi.expectations.numerical import numerical_expectation
from pyro_dvi.moments import GaussianMoments

_RULES: dict[type, Callable] = {}
_WITH_COVARIANCES: set[Callable] = set()
_DEFAULT_ESTIMATOR = Sobol()


class Found(NamedTuple):
    """A rule, the names of its parameters, and whether it takes those that share noise."""

    rule: Callable
    names: frozenset[str]
    covariances: bool


def expectation_rule(*families: type, covariances: bool = False) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the expected log-likelihood of distribution classes.

    The rule is called as ``rule(value, loc=..., scale=...)`` with the arguments that the distribution was made with,
    and with ``estimator=`` if it has a parameter of that name (for the logits of classes).

    Args:
        families: the classes.
        covariances: whether the rule looks at the covariances of parameters that are
            :class:`~pyro_dvi.moments.joint.JointMoments`.

    Raises:
        ValueError: a class has a rule already.

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
        return registering(_RULES, families)(rule)

    return register


def families_with_rules() -> dict[type, Callable]:
    """Return a copy of the table of rules: distribution class to rule."""
    return dict(_RULES)


def expected_log_prob(
    family: type,
    parameters: Mapping[str, Any],
    value: Tensor,
    estimator: LogitEstimator | None = None,
) -> Tensor:
    r"""Return :math:`\mathrm E[\log p(y \mid \theta)]`, of the batch shape of the distribution.

    Status: each rule says how exact it is. Uncertain parameters are taken as independent of each other, unless they
    are functions of the very same Gaussian, or of the same view of it (``h.squeeze(-1)``; copies such as ``h.clone()``
    or ``h.flip(0)`` count as another). Without a rule: quadrature (:mod:`pyro_dvi.expectations.numerical`).

    Args:
        family: the distribution class.
        parameters: what the distribution is made with, by name: moments, tensors or numbers.
        value: y.
        estimator: how the log of the sum of class probabilities is averaged; :class:`Sobol` by default.

    Raises:
        UnsupportedError: an uncertain parameter can leave its domain.

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
            f"{family.__name__}({names}) has outputs of a last layer with covariances between them, which only "
            "Categorical, OneHotCategorical, Multinomial, MultivariateNormal and Normal with a scale that is certain "
            "or exp(h) know. Use LastLayerGuide with PerOutput(), whose outputs are independent, or a MeanFieldGuide"
        )
    return numerical_expectation(family, given, value)


def _as_tensor(parameter: Any, like: Tensor) -> Any:
    if isinstance(parameter, GaussianMoments | Tensor):
        return parameter
    return torch.as_tensor(parameter, dtype=like.dtype, device=like.device)


@lru_cache(maxsize=256)
def _find(family: type) -> Found | None:
    return find_rule(_RULES, family)


def find_rule(table: Mapping[type, Callable], family: type) -> Found | None:
    """Return the rule of the class, or of a parent whose density it has.

    Pyro's classes keep the name of torch's. Any other subclass may redefine the density, as NanMaskedNormal does, and
    is served only if it does not.

    Args:
        table: distribution class to rule.
        family: the class.
    """
    for parent in family.__mro__:
        if parent in table:
            density = getattr(family, "log_prob", None)
            if family.__name__ != parent.__name__ and density is not getattr(parent, "log_prob", None):
                return None
            names = inspect.signature(table[parent]).parameters
            return Found(table[parent], frozenset(names), table[parent] in _WITH_COVARIANCES)
    return None
