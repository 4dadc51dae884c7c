# SPDX-License-Identifier: Apache-2.0
"""Tables of rules that are filled by decorators."""

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Rule = TypeVar("Rule", bound=Callable[..., Any])


def registering(rules: dict[Any, Any], keys: Iterable[Any]) -> Callable[[Rule], Rule]:
    """Return a decorator that enters a function into ``rules`` under every key.

    Raises:
        ValueError: if a key already has a rule; with two rules, the result would depend on the order of imports.

    Example:
        >>> rules = {}
        >>> @registering(rules, [int])
        ... def of_integers(): ...
        >>> rules[int] is of_integers
        True
    """

    def register(rule: Rule) -> Rule:
        for key in keys:
            if key in rules:
                name = getattr(key, "__name__", key)
                raise ValueError(f"{name} already has the rule {rules[key].__name__}")
            rules[key] = rule
        return rule

    return register
