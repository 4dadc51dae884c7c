# SPDX-License-Identifier: Apache-2.0
"""Run a model for prediction: evaluation mode, given latent values, one response read from the trace."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from pyro import poutine
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_dvi.errors import DataError, ModelError
from pyro_dvi.predictive.batches import Batch, with_missing

__all__ = ["AllRows", "Response", "evaluation_mode", "respond", "seeded"]

Latents = Mapping[str, Tensor]


@dataclass(frozen=True)
class Response:
    """The observed site of one run of the model.

    Attributes:
        site: its name.
        distribution: the predictive distribution given the latent values.
        value: what the model drew there, or observed.
        is_observed: which of the two.
        axis: the dimension of ``distribution.batch_shape`` that counts examples, from the right (negative).
    """

    site: str
    distribution: Any
    value: Tensor
    is_observed: bool
    axis: int


def respond(model: Callable[..., Any], batch: Batch, latents: Latents, site: str | None = None) -> Response:
    """Run ``model`` on a batch with its latent sites at ``latents`` and return its response.

    Raises:
        ModelError: the model has no response, several, or none of the name ``site``.
        DataError: the response does not have a row for each example.
    """
    recorder = poutine.trace()
    try:
        with recorder, AllRows(), _AtValues(latents):
            model(*with_missing(model, batch.inputs))
    except ValueError as error:
        if "Shape mismatch inside plate" not in str(error):
            raise
        raise DataError(
            f"the model does not take {batch.num_rows} rows ({error}): give the plate of the data "
            "subsample_size=len(x), so that batches of any size fit"
        ) from error
    candidates = {
        name: node
        for name, node in recorder.trace.nodes.items()
        if node["type"] == "sample" and name not in latents and not _is_bookkeeping(node)
    }
    name = _choose(site, list(candidates))
    node: Any = candidates[name]
    axis = _example_axis(name, node, batch.num_rows)
    return Response(name, node["fn"], node["value"], node["is_observed"], axis)


@contextmanager
def evaluation_mode(*functions: Any) -> Iterator[None]:
    """Run modules as in evaluation, without gradients; put every one back as it was.

    Modules are found inside ``functions`` and, by a forward hook, wherever a plain function calls them, so batch
    normalisation keeps its running statistics and dropout does nothing in models of either kind.

    Example:
        >>> net = nn.Dropout()
        >>> with evaluation_mode():
        ...     print(net(torch.ones(2)))
        tensor([1., 1.])
        >>> net.training
        True
    """
    switched: list[nn.Module] = []

    def switch(module: nn.Module, _inputs: object = None) -> None:
        if module.training:
            switched.append(module)
            module.training = False

    handle = nn.modules.module.register_module_forward_pre_hook(switch)
    try:
        for function in functions:
            if isinstance(function, nn.Module):
                for module in function.modules():
                    switch(module)
        with torch.no_grad():
            yield
    finally:
        handle.remove()
        for module in switched:
            module.training = True


@contextmanager
def seeded(seed: int | None, device: torch.device | None) -> Iterator[int]:
    """Give a seed to work with and leave the global generators as they were.

    Without a seed, one is drawn from the global generator (which moves by that draw), so ``pyro.set_rng_seed``
    makes predictions reproducible as well.
    """
    if seed is None:
        seed = int(torch.randint(2**31 - 1, ()))
    devices = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        yield seed


class _AtValues(Messenger):
    """Set latent sites to given values, without turning them into observations."""

    def __init__(self, values: Latents) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]
            msg["done"] = True


class AllRows(Messenger):
    """Let a plate of ``subsample_size=n`` mean the n rows that are there.

    The training plate's size then limits nothing: 1,000 test images go through a model of 500 training images.
    """

    def _pyro_sample(self, msg: Any) -> None:
        fn = msg["fn"]
        if type(fn).__name__ == "_Subsample" and msg["value"] is None and fn.subsample_size is not None:
            msg["value"] = torch.arange(fn.subsample_size, device=fn.device)
            msg["done"] = True


def _is_bookkeeping(node: Any) -> bool:
    """Whether a site is Pyro's own: a plate, ``pyro.deterministic``, ``pyro.factor``."""
    return type(node["fn"]).__name__ in ("_Subsample", "Unit") or bool(node["infer"].get("_deterministic"))


def _choose(site: str | None, names: list[str]) -> str:
    if site is not None:
        if site in names:
            return site
        raise ModelError(f"the model has no observed site {site!r}; it has {names}")
    if len(names) == 1:
        return names[0]
    if not names:
        raise ModelError(
            "the model has no observed site to predict: it needs pyro.sample(name, distribution, obs=y) where y may "
            "be None, and a guide that was set up with the observed values given"
        )
    raise ModelError(
        f"the model has several sites that the guide does not cover: {names}. Choose the one to predict by site=; "
        "if one of them is a latent variable, the guide is not the one of this model."
    )


def _example_axis(name: str, node: Any, num_rows: int) -> int:
    shape = tuple(node["fn"].batch_shape)
    frames = [f for f in node["cond_indep_stack"] if f.vectorized]
    axes = sorted(
        f.dim for f in frames if f.size == num_rows and len(shape) >= -f.dim and shape[f.dim] == num_rows
    )
    if axes:
        return int(axes[0])  # of nested plates of one size the outermost in memory
    if not frames and shape and shape[0] == num_rows:
        return -len(shape)
    hint = (
        "the model seems to choose rows itself (indexing by its plate); pass batches to the model instead"
        if frames
        else "put it in pyro.plate('data', size, subsample_size=len(x)), and let to_event take an example's own "
        "dimensions only"
    )
    raise DataError(
        f"observed site {name!r} has batch shape {shape} and event shape {tuple(node['fn'].event_shape)}: no "
        f"dimension counts the {num_rows} examples. Either {hint}."
    )
