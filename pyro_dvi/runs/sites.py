# SPDX-License-Identifier: Apache-2.0
"""The sites of a run: their kinds, selection by name, setting of latent sites, and the response with its examples.

A site is a node of a trace, or the message that a messenger receives. Every sample site is latent, observed data, a
factor, deterministic, or internal to Pyro (the rows that a plate draws).
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from pyro.poutine.messenger import Messenger
from pyro.poutine.trace_messenger import TraceMessenger
from pyro.poutine.util import site_is_factor, site_is_subsample
from torch import Tensor

from pyro_dvi.core.densities import mask_of
from pyro_dvi.errors import ArgumentError, DataError, ModelError
from pyro_dvi.runs.missing import are_given


def is_latent(site: Any) -> bool:
    """Return True if a site is a latent variable, or an auxiliary variable of a guide."""
    return _is_sample(site) and not site["is_observed"] and not site["infer"].get("_do_not_trace")


def is_data(site: Any) -> bool:
    """Return True if a site has observed values and a distribution."""
    return _is_sample(site) and site["is_observed"] and not (is_deterministic(site) or site_is_factor(site))


def is_deterministic(site: Any) -> bool:
    """Return True if a site is computed from others, by ``pyro.deterministic`` or by one of Pyro's reparameterisers."""
    return site["type"] == "sample" and site["is_observed"] and type(core(site["fn"])).__name__ == "Delta"


def sites_of(trace: Any, kind: Callable[[Any], bool]) -> list[Any]:
    """Return the sites of a run for which ``kind`` returns True, such as :func:`is_latent`, in the order of the run."""
    return [site for site in trace.nodes.values() if kind(site)]


def core(fn: Any) -> Any:
    """Return the distribution inside all wrappers, transforms and expansions."""
    while hasattr(fn, "base_dist"):
        fn = fn.base_dist
    return fn


def subsampled_share(site: Any) -> float:
    """Return how much of a site this run contains: a fraction of the rows of the site's plates."""
    frames = [frame for frame in site["cond_indep_stack"] if frame.full_size is not None]
    return math.prod(frame.size / frame.full_size for frame in frames)


def _is_sample(site: Any) -> bool:
    return site["type"] == "sample" and not site_is_subsample(site)


def sites_named(argument: str, patterns: str | Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the sites of a guide that match a pattern, in the order of ``names``.

    Args:
        argument: name of the argument that the user passed, for the error message.
        patterns: one pattern or several.
        names: all sites.

    Raises:
        ArgumentError: if a pattern matches no site.
    """
    several = isinstance(patterns, Iterable) and not isinstance(patterns, str)
    listed: list[Any] = list(patterns) if several else [patterns]
    for pattern in listed:
        if not isinstance(pattern, str) or not any(fnmatchcase(name, pattern) for name in names):
            like = [name for name in names if fnmatchcase(name, f"*{pattern}")]
            hint = f"write '*{pattern}' for {like}" if like else f"the sites are {names}"
            raise ArgumentError(f"{argument} names {pattern!r}, which is not a site of the guide; {hint}")
    return [name for name in names if any(fnmatchcase(name, pattern) for pattern in listed)]


class SetLatents(Messenger):
    """Set latent sites of a run to given values, without turning the sites into observations."""

    @abstractmethod
    def _value_of(self, site: Any) -> Any:
        """Return the value of a latent site; None leaves the site unchanged."""

    def _pyro_sample(self, msg: Any) -> None:
        value = self._value_of(msg) if is_latent(msg) else None
        if value is not None:
            msg["value"], msg["done"] = value, True


class SampleTrace(TraceMessenger):
    """Record the sample sites of a run, but not its parameters, which SVI records itself."""

    _pyro_post_param = None  # type: ignore[assignment]


class AllRows(Messenger):
    """Let a plate with ``subsample_size=n`` index the n given rows, whatever the size of the plate.

    The plate's size then does not limit predictions: a model of 500 training images can predict 1,000 test images.
    """

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if site_is_subsample(msg) and msg["value"] is None and fn.subsample_size is not None:
            msg["value"], msg["done"] = torch.arange(fn.subsample_size, device=fn.device), True


def responses(nodes: Mapping[str, Any], latents: Container[str]) -> list[str]:
    """Return the sample sites that are neither latent nor internal to Pyro: observed sites, with or without data."""
    return [
        name for name, node in nodes.items() if name not in latents and (is_latent(node) or is_data(node))
    ]


def choose_response(site: str | None, names: list[str]) -> str:
    """Return the site named ``site``, or the only response.

    Raises:
        ModelError: if the model has no observed site, has several and ``site`` is not given, or has none named
            ``site``.
    """
    if site is None and len(names) == 1:
        return names[0]
    if site is not None and site in names:
        return site
    if site is not None:
        raise ModelError(
            f"the model has no observed site {site!r}; it has {names}. Latent sites are in guide.quantiles"
        )
    if not names:
        raise ModelError(
            "the model has no observed site to predict: it needs pyro.sample(name, distribution, obs=y), where y may "
            "be None, and a guide that was set up with the observed values"
        )
    raise ModelError(
        f"the model has several sites that the guide does not cover: {names}. Choose one with site=. "
        "If one of them is a latent variable, use a guide for this model. If the guide omits the variable on purpose, "
        "predict with Samples(n), which averages over draws of this variable"
    )


def example_axis(name: str, node: Any, num_rows: int) -> int:
    """Return the dimension of a site's batch shape that indexes examples, counted from the right (negative).

    A subsampled plate has priority over other plates with as many rows, because it is the plate that batches divide.

    Raises:
        DataError: if no dimension has as many rows as the batch, or if several plates have.
    """
    shape = tuple(node["fn"].batch_shape)
    frames = [f for f in node["cond_indep_stack"] if f.vectorized]
    fitting = [f for f in frames if f.size == num_rows and len(shape) >= -f.dim and shape[f.dim] == num_rows]
    found = [f for f in fitting if f.full_size not in (None, f.size)] or fitting
    if len(found) == 1 or (found and num_rows == 1):  # for a single row, any of the plates is right
        return int(found[0].dim)
    if not frames and shape[:1] == (num_rows,):
        return -len(shape)
    problem = f"{len(found)} plates of {num_rows} rows, {[f.name for f in found]}, may index the examples"
    raise DataError(
        f"observed site {name!r} with batch shape {shape} and event shape {tuple(node['fn'].event_shape)}: "
        f"{problem if found else f'no dimension indexes the {num_rows} examples'}. Pass the batch to the model, put "
        "the site in pyro.plate('data', size, subsample_size=len(x)), and declare other dimensions with to_event"
    )


def counted(node: Any) -> Tensor | None:
    """Return a mask in the shape of one draw, True for values of a site that are not masked; None if all are True.

    Masks come from ``poutine.mask``, from ``.mask()`` of the distribution at any depth, and from missing values.
    """
    mask, value = mask_of(node["fn"], node["mask"]), node.get("value")
    if mask is not None and value is not None:
        mask = mask.to(value.device)
    given = are_given(node["fn"], value) if node.get("is_observed") else None
    if given is not None:
        mask = given if mask is None else mask & given
    return None if mask is None or bool(mask.all()) else mask
