# SPDX-License-Identifier: Apache-2.0
"""Run a model for prediction: evaluation mode, given latent values, one response read from the trace."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.poutine.condition_messenger import ConditionMessenger
from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dvi.core.arguments import positional, with_missing
from pyro_dvi.core.batches import tensors_in
from pyro_dvi.core.distributions import WRAPPERS
from pyro_dvi.core.undisturbed import evaluating, forked
from pyro_dvi.errors import DataError, ModelError
from pyro_dvi.predictive.engine.inputs import Batch
from pyro_dvi.runs.sites import AllRows, SetLatents, choose_response, counted, example_axis, responses

Latents = Mapping[str, Tensor]


@dataclass(frozen=True)
class Response:
    """The observed site of one run of the model.

    Attributes:
        site: its name.
        distribution: the predictive distribution given the latent values.
        value: drawn there by the model, or observed.
        is_observed: True if it was observed.
        axis: the dimension of ``distribution.batch_shape`` that counts examples, from the right (negative).
        mask: True for values that count, of the shape of one draw; None if all do.
        drawn: further sites that the model drew before it, neither latent nor observed.
    """

    site: str
    distribution: Any
    value: Tensor
    is_observed: bool
    axis: int
    mask: Tensor | None
    drawn: tuple[str, ...] = ()


Respond = Callable[[Latents], Response]


def respond(
    model: Callable[..., Any],
    batch: Batch,
    latents: Latents,
    site: str | None = None,
    learned_for: Mapping[int | str, Any] = MappingProxyType({}),
) -> Response:
    """Run ``model`` on a batch with its latent sites at ``latents`` and return its response.

    Args:
        model: a Pyro model.
        batch: its arguments.
        latents: values by site.
        site: observed site, where there are several.
        learned_for: arguments, by place or name, of the examples that local latents belong to; empty if unknown.

    Raises:
        ModelError: the model has no response, several, or none of the name ``site``.
        DataError: the response does not have one row per example, or the rows of a latent site belong to other
            examples.
    """
    nodes = observed_run(model, replace(batch, observed=None), latents)
    names = responses(nodes, latents)
    name = choose_response(site, names)
    node: Any = nodes[name]
    axis = example_axis(name, node, batch.num_rows)
    plates = {f.name for f in node["cond_indep_stack"] if f.vectorized and f.dim == axis}
    for latent in nodes.keys() & latents.keys():
        if not plates & {f.name for f in nodes[latent]["cond_indep_stack"]}:
            continue
        if batch.start > 0:
            raise _local(latent, f"and these are examples {batch.start} and later")
        for place, (parameter, value) in enumerate(zip(positional(model), batch.inputs, strict=False)):
            first = learned_for.get(place, learned_for.get(parameter.name))
            if not all(map(_same_rows, tensors_in(value), tensors_in(first))):
                raise _local(latent, "learned for other examples than these")
    drawn = tuple(other for other in names[: names.index(name)] if not nodes[other]["is_observed"])
    return Response(name, node["fn"], node["value"], node["is_observed"], axis, counted(node), drawn)


def sites_at(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Collection[str]
) -> Callable[[Latents], dict[str, Any]]:
    """Return a function of the latent values that gives what the model says of some sites, as quickly as may be.

    The model runs up to the last of the sites only, nothing is drawn there, nothing is recorded. Arguments, names and
    the model's structure have been seen to be right by :func:`respond` or :func:`observed_run`.

    Raises:
        ModelError: in a run: the model does not come to one of the sites.
    """
    args = with_missing(model, args)

    def run(latents: Latents) -> dict[str, Any]:
        stop = _StopAfter(names)
        try:
            with stop, AllRows(), AtValues(latents):
                model(*args, **kwargs)
        except _ReachedError:
            return stop.found
        missing = [name for name in names if name not in stop.found]
        raise ModelError(f"the model did not come to its sites {missing} with other latent values")

    return run


def with_others(run: Callable[[Latents], Any], others: Latents) -> Callable[[Latents], Any]:
    """Return ``run`` with further observed sites at their observed values."""
    conditioned: Callable[[Latents], Any] = ConditionMessenger(dict(others))(run) if others else run
    return conditioned


def check_observation(model: Callable[..., Any], batch: Batch, latents: Latents, site: str | None) -> Batch:
    """Check that the site to predict observes the observation of the batch.

    Returns:
        The batch with its observation in the shape of the site, as ``[N]`` for ``[N, 1]``, and with the mask that the
        model puts on it.

    Raises:
        DataError: it observes nothing, or other values, when the model is given the observation.
    """
    assert batch.observed is not None, "there is something to check"
    nodes = observed_run(model, batch, latents)
    name = choose_response(site, responses(nodes, latents))
    node: Any = nodes[name]
    value = node["value"]
    same = value is batch.observed or torch.equal(value.squeeze(), batch.observed.squeeze().to(value.dtype))
    if not (node["is_observed"] and same):
        what = "observes other values" if node["is_observed"] else "observes nothing"
        raise DataError(
            f"site {name!r} {what} when the model is given the observation of the data: choose observed=... or "
            "site=...; where the model transforms it, predict from inputs alone and score by metrics(transformed)"
        )
    varies = _has_mask(node) or value.shape != batch.observed.shape
    return replace(batch, observed=batch.observed.reshape(value.shape), mask=counted(node), varies=varies)


def _has_mask(node: Any) -> bool:
    """Return whether a site has a mask, even one that leaves nothing out."""
    fn, found = node["fn"], node["mask"] is not None and node["mask"] is not True
    while isinstance(fn, WRAPPERS):
        found, fn = found or isinstance(fn, dist.MaskedDistribution), fn.base_dist
    return found


def observed_run(model: Callable[..., Any], batch: Batch, latents: Latents) -> Mapping[str, Any]:
    """Return the sites of a run at ``latents`` in which the model sees the observations, if there are any.

    The run has every row of the model's plates.

    Raises:
        DataError: the model takes another number of rows, or a latent site has one for each of other examples.
    """
    args, kwargs = batch.whole
    recorder = poutine.trace()
    try:
        with recorder, AllRows(), AtValues(latents):
            model(*with_missing(model, args), **kwargs)
    except ValueError as error:
        if "Shape mismatch inside plate" not in str(error):
            raise
        raise DataError(
            f"the model does not take {batch.num_rows} rows ({error}): give its plate subsample_size=len(x)"
        ) from error
    nodes: Mapping[str, Any] = recorder.trace.nodes
    return nodes


def _same_rows(first: Tensor, second: Tensor) -> bool:
    rows = min(map(len, (first, second))) if first.dim() and second.dim() else 0
    return rows == 0 or torch.equal(first[:rows], second[:rows].to(first))


def _local(site: str, which: str) -> DataError:
    return DataError(
        f"sites ['{site}'] have a value for each example, {which}, and it cannot be known to which examples they "
        "belong. If the guide has learnt them for the data of its training, with which it was also initialized: give "
        "these data, all in one batch and in their order (a tuple with a batch_size of at least their number); for "
        "other data of the same groups, let the model take the number of each row's group as an input. If it computes "
        "them from its inputs: predict one batch at a time, with a plate of its size in model and guide, "
        "pyro.plate(name, len(x))"
    )


@contextmanager
def evaluation_mode(*functions: Any) -> Iterator[None]:
    """Run modules as in evaluation, without gradients; see :func:`~pyro_dvi.core.undisturbed.evaluating`."""
    with evaluating(*functions), torch.no_grad():
        yield


@contextmanager
def seeded(seed: int | None, device: torch.device | None) -> Iterator[int]:
    """Give a seed to work with and leave the global generators as they were.

    Without a seed, one is drawn from the global generator (which moves by that draw), so ``pyro.set_rng_seed``
    makes predictions reproducible as well.
    """
    if seed is None:
        seed = int(torch.randint(2**31 - 1, ()))
    with forked(device):
        yield seed


class AtValues(SetLatents):
    """Set latent sites to given values, which have to have the rows of their plates."""

    def __init__(self, values: Latents) -> None:
        super().__init__()
        self.values = values

    def _value_of(self, site: Any) -> Tensor | None:
        value = self.values.get(site["name"])
        for frame in site["cond_indep_stack"]:
            if value is not None and frame.vectorized:
                _check_rows(site, value, frame)
        return value


class _ReachedError(Exception):
    """A run came to where it was to stop."""


class _StopAfter(Messenger):
    """End the run of a model at the last of some sites, before anything is drawn there."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self.names = names
        self.found: dict[str, Any] = {}

    def _pyro_sample(self, msg: Any) -> None:
        if msg["name"] in self.names:
            self.found[msg["name"]] = msg
            if len(self.found) == len(self.names):
                raise _ReachedError


def _check_rows(msg: Any, value: Tensor, frame: Any) -> None:
    """Refuse a latent of single examples unless it has its value for each row of the batch."""
    if frame.full_size is not None and frame.full_size != frame.size:
        # AllRows cannot know which rows of the plate these are.
        raise _local(msg["name"], f"{frame.full_size} of them, but this batch has {frame.size}")
    dim = frame.dim - len(msg["fn"].event_shape)
    rows = value.shape[dim] if value.dim() >= -dim else 1
    if rows not in (1, frame.size):
        raise _local(msg["name"], f"{rows} of them, but plate {frame.name!r} has {frame.size}")
