# SPDX-License-Identifier: Apache-2.0
"""The sites of a run: what each of them is, how to choose some by name, and how to set the latent ones.

A site is a node of a trace, or the message that a messenger sees. Every sample site is one of these: latent, data, a
factor, deterministic, or Pyro's own (the rows that a plate draws).
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import site_is_factor, site_is_subsample

from pyro_dvi.errors import ArgumentError


def is_latent(site: Any) -> bool:
    """Whether a site is a latent variable, or an auxiliary one of a guide."""
    return _is_sample(site) and not site["is_observed"] and not site["infer"].get("_do_not_trace")


def is_data(site: Any) -> bool:
    """Whether a site has observed values, which a distribution explains."""
    return _is_sample(site) and site["is_observed"] and not (is_deterministic(site) or is_factor(site))


def is_factor(site: Any) -> bool:
    """Whether a site is a term of the log density: ``pyro.factor``."""
    return bool(site_is_factor(site))


def is_deterministic(site: Any) -> bool:
    """Whether a site is computed from others: by ``pyro.deterministic``, or by a reparameterisation of Pyro's."""
    return site["type"] == "sample" and site["is_observed"] and type(core(site["fn"])).__name__ == "Delta"


def sites_of(trace: Any, kind: Callable[[Any], bool]) -> list[Any]:
    """Return the sites of a run that are of a kind, such as :func:`is_latent`, in their order."""
    return [site for site in trace.nodes.values() if kind(site)]


def core(fn: Any) -> Any:
    """Return the distribution that others wrap, transform or extend."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def subsampled_share(site: Any) -> float:
    """Return which part of the rows of its plates a site has in this run."""
    frames = [frame for frame in site["cond_indep_stack"] if frame.full_size is not None]
    return math.prod(frame.size / frame.full_size for frame in frames)


def _is_sample(site: Any) -> bool:
    return site["type"] == "sample" and not site_is_subsample(site)


def sites_named(argument: str, patterns: str | Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the sites of a guide that fit a pattern, in their order.

    Args:
        argument: of the user's call, for the message.
        patterns: one or several.
        names: all sites.

    Raises:
        ArgumentError: a pattern fits none.
    """
    several = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    listed: list[Any] = list(patterns) if several else [patterns]
    for pattern in listed:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
            like = [name for name in names if fnmatchcase(name, f"*{pattern}")]
            hint = f"write '*{pattern}' for {like}" if like else f"there are {names}"
            raise ArgumentError(f"{argument} names {pattern!r}, which is no site of the guide; {hint}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in listed)]


class SetLatents(Messenger):
    """Set latent sites of a run to values, without turning them into observations."""

    @abstractmethod
    def _value_of(self, site: Any) -> Any:
        """Return the value of a latent site; None leaves it alone."""

    def _pyro_sample(self, msg: Any) -> None:
        value = self._value_of(msg) if is_latent(msg) else None
        if value is not None:
            msg["value"], msg["done"] = value, True


class SampleTrace(TraceMessenger):
    """Record the sample sites of a run; its parameters are on record where they are optimised."""

    _pyro_post_param = None  # type: ignore[assignment]


class AllRows(Messenger):
    """Let a plate of ``subsample_size=n`` mean the n rows that are there, whatever its size.

    The training plate's size then limits nothing: 1,000 test images go through a model of 500 training images.
    """

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if site_is_subsample(msg) and msg["value"] is None and fn.subsample_size is not None:
            msg["value"], msg["done"] = torch.arange(fn.subsample_size, device=fn.device), True
