# SPDX-License-Identifier: Apache-2.0
"""Run a model for prediction, in evaluation mode and with given latent values, and read a response from its trace."""

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
from pyro_dvi.runs.explained import explained_errors
from pyro_dvi.runs.sites import AllRows, SetLatents, choose_response, counted, example_axis, responses

Latents = Mapping[str, Tensor]


@dataclass(frozen=True)
class Response:
    """The observed site of one run of the model.

    Attributes:
        site: name of the site.
        distribution: the predictive distribution given the latent values.
        value: the value that the model drew or observed at the site.
        is_observed: True if the value was observed.
        axis: the dimension of ``distribution.batch_shape`` that indexes examples, counted from the right (negative).
        mask: True for the values to score, with the shape of one draw; None to score all.
        drawn: names of the sites that the model drew before this site and that are neither latent nor observed.
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
    """Run ``model`` on a batch with its latent sites set to ``latents``, and return its response.

    Args:
        model: a Pyro model.
        batch: arguments of the model.
        latents: values by site.
        site: observed site to predict, if the model has several.
        learned_for: arguments, by position or name, with the examples that local latents belong to; empty if unknown.

    Raises:
        ModelError: if the model has no observed site, has several and ``site`` is not given, or has none named
            ``site``.
        DataError: if the response does not have one row per example, or the rows of a latent site belong to other
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
            raise _local(latent, f"this batch starts at example {batch.start}")
        for place, (parameter, value) in enumerate(zip(positional(model), batch.inputs, strict=False)):
            first = learned_for.get(place, learned_for.get(parameter.name))
            if not all(map(_same_rows, tensors_in(value), tensors_in(first))):
                raise _local(latent, "the values were learnt for other examples")
    drawn = tuple(other for other in names[: names.index(name)] if not nodes[other]["is_observed"])
    return Response(name, node["fn"], node["value"], node["is_observed"], axis, counted(node), drawn)


def sites_at(
    model: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], names: Collection[str]
) -> Callable[[Latents], dict[str, Any]]:
    """Return a function that runs the model with latent values and returns the sites ``names``, as fast as possible.

    The model runs only up to the last of these sites. Nothing is drawn at these sites, and nothing is recorded.
    Arguments, names and the structure of the model are not checked, because :func:`respond` or :func:`observed_run` has
    already checked them.

    Raises:
        ModelError: if a run of the model does not reach all of these sites.
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
        raise ModelError(
            f"sites {missing} were not reached with other latent values, on which a model's sites must not depend"
        )

    return run


def with_others(run: Callable[[Latents], Any], others: Latents) -> Callable[[Latents], Any]:
    """Return ``run`` with other observed sites set to their observed values."""
    conditioned: Callable[[Latents], Any] = ConditionMessenger(dict(others))(run) if others else run
    return conditioned


def check_observation(model: Callable[..., Any], batch: Batch, latents: Latents, site: str | None) -> Batch:
    """Check that the value observed at the site to predict is the observation of the batch.

    Returns:
        The batch with its observation reshaped to the shape of the site (such as ``[N, 1]`` to ``[N]``), and with the
        mask of the model.

    Raises:
        DataError: if the site is not observed when the model is called with the data, or has other observed values.
    """
    assert batch.observed is not None
    nodes = observed_run(model, batch, latents)
    name = choose_response(site, responses(nodes, latents))
    node: Any = nodes[name]
    value, mask = node["value"], counted(node)
    same = value is batch.observed or _same_values(value.squeeze(), batch.observed.squeeze(), mask)
    if not (node["is_observed"] and same):
        what = "has other observed values" if node["is_observed"] else "is not observed"
        raise DataError(
            f"site {name!r} {what} when the model is called with these data. Name the argument that contains the "
            "observations with observed=..., or choose another site with site=.... If the model transforms the "
            "observations, predict from inputs alone and call metrics(transformed)"
        )
    varies = _has_mask(node) or value.shape != batch.observed.shape
    return replace(batch, observed=batch.observed.reshape(value.shape), mask=mask, varies=varies)


def _same_values(first: Tensor, second: Tensor, mask: Tensor | None) -> bool:
    if first.shape != second.shape:
        return False
    same = (first == second) | (first.isnan() & second.isnan())
    return bool((same if mask is None else same | ~mask.squeeze()).all())


def _has_mask(node: Any) -> bool:
    """Return True if a site has a mask, even if this masks no value."""
    fn, found = node["fn"], node["mask"] is not None and node["mask"] is not True
    while isinstance(fn, WRAPPERS):
        found, fn = found or isinstance(fn, dist.MaskedDistribution), fn.base_dist
    return found


def observed_run(model: Callable[..., Any], batch: Batch, latents: Latents) -> Mapping[str, Any]:
    """Return the sites of a run at ``latents`` in which the model sees the observations, if the batch has any.

    Plates of the model are not subsampled.

    Raises:
        DataError: if the model requires a different number of rows, or the values of a latent site belong to other
            examples.
    """
    args, kwargs = with_missing(model, batch.whole[0]), batch.whole[1]
    recorder = poutine.trace()
    with explained_errors(model, args, kwargs):
        try:
            with recorder, AllRows(), AtValues(latents):
                model(*args, **kwargs)
        except ValueError as error:
            if "Shape mismatch inside plate" not in str(error):
                raise
            raise DataError(
                f"the model does not accept {batch.num_rows} rows ({error}): give its plate subsample_size=len(x)"
            ) from error
    nodes: Mapping[str, Any] = recorder.trace.nodes
    return nodes


def _same_rows(first: Tensor, second: Tensor) -> bool:
    rows = min(map(len, (first, second))) if first.dim() and second.dim() else 0
    return rows == 0 or torch.equal(first[:rows], second[:rows].to(first))


def _local(site: str, which: str) -> DataError:
    return DataError(
        f"site {site!r} has one value per example, and it is unknown to which examples the values belong: {which}. If "
        "the guide learnt the values for its training data, predict only these data, in one batch and in the same "
        "order (a tuple, with batch_size at least their number). For other data of the same groups, pass the index of "
        "each row's group to the model as an input. If the guide computes the values from its inputs, predict one "
        "batch at a time, with pyro.plate(name, len(x)) in model and guide"
    )


@contextmanager
def evaluation_mode(*functions: Any) -> Iterator[None]:
    """Run modules in evaluation mode and without gradients; see :func:`~pyro_dvi.core.undisturbed.evaluating`."""
    torch.clear_autocast_cache()  # a surrounding autocast context may keep copies of earlier parameters
    with evaluating(*functions), torch.no_grad():
        yield


@contextmanager
def seeded(seed: int | None, device: torch.device | None) -> Iterator[int]:
    """Yield a seed, and restore the global random state afterwards.

    If ``seed`` is None, a seed is drawn from the global generator, so ``pyro.set_rng_seed`` makes predictions
    reproducible as well. The generator remains advanced by this draw.
    """
    if seed is None:
        seed = int(torch.randint(2**31 - 1, ()))
    with forked(device):
        yield seed


class AtValues(SetLatents):
    """Set latent sites to given values; the rows of each value must match the plates of its site."""

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
    """Stops a run of the model at the last required site."""


class _StopAfter(Messenger):
    """End the run of a model at the last of the given sites, before anything is drawn there."""

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
    """Raise an error if a latent site with one value per example does not have as many values as the batch has rows."""
    if frame.full_size is not None and frame.full_size != frame.size:
        # It is unknown which rows of the plate are in the batch.
        raise _local(
            msg["name"], f"there are {frame.full_size} values, but this batch has {frame.size} examples"
        )
    dim = frame.dim - len(msg["fn"].event_shape)
    rows = value.shape[dim] if value.dim() >= -dim else 1
    if rows not in (1, frame.size):
        raise _local(msg["name"], f"there are {rows} values, but plate {frame.name!r} has {frame.size} rows")
