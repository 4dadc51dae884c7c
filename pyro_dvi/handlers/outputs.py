# SPDX-License-Identifier: Apache-2.0
"""What a model puts out for given inputs, as real numbers: the parameters of its observed distribution.

A mean is a real number; a scale enters by its logarithm, class probabilities by the logits that the model gave.
Linearising these keeps every distribution inside its domain.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions import distribution as pyro_distribution
from torch import Tensor
from torch.distributions import biject_to, constraints

from pyro_dvi.errors import DataError, ModelError, UnsupportedError
from pyro_dvi.handlers.all_rows import AllRows
from pyro_dvi.handlers.log_joint import AtUnconstrained
from pyro_dvi.handlers.mean_run import twice_differentiable
from pyro_dvi.handlers.response import choose_response, example_axis, responses
from pyro_dvi.handlers.wrapped import innermost, rewrapped

__all__ = ["Outputs", "Parameter", "run_outputs"]


@dataclass(frozen=True)
class Parameter:
    """One uncertain parameter of the observed distribution.

    Attributes:
        name: as the distribution calls it.
        shape: of one example, in real numbers.
        axis: the dimension of the example in the parameter, from the left.
        transform: from real numbers to the parameter's domain; None for the identity.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    transform: Any

    @property
    def size(self) -> int:
        """Real numbers for each example."""
        return prod(self.shape)


@dataclass(frozen=True)
class Outputs:
    """The outputs of one run.

    Attributes:
        site: the observed site, or the deterministic one.
        values: all parameters of each example, ``[B, K]``.
        parameters: what the K numbers are, in order; the first is the mean, the logits or the logarithm of a rate.
        distribution: the observed distribution; None for a deterministic site.
        given: what the innermost distribution is made with, by name.
        axis: the dimension of its batch shape that counts examples, from the right.
    """

    site: str
    values: Tensor
    parameters: tuple[Parameter, ...]
    distribution: Any
    given: Mapping[str, Any]
    axis: int

    def with_values(self, values: Tensor) -> Any:
        """Return the distribution with other parameters.

        Args:
            values: ``[*lead, B, K]``.

        Returns:
            The distribution with batch shape ``[*lead, *batch]``.
        """
        lead = tuple(values.shape[:-2])
        given = dict(self.given)
        for parameter, part in zip(
            self.parameters, values.split([p.size for p in self.parameters], -1), strict=True
        ):
            real = part.reshape(*lead, len(self.values), *parameter.shape)
            real = real.movedim(len(lead), len(lead) + parameter.axis)
            given[parameter.name] = real if parameter.transform is None else parameter.transform(real)
        return rewrapped(self.distribution, lambda base: type(base)(**given, validate_args=False), lead)


def run_outputs(
    model: Callable, args: tuple, values: Mapping[str, Tensor], num_rows: int, site: str | None = None
) -> Outputs:
    """Run ``model`` with its latents at ``values`` and read its outputs.

    Args:
        model: a Pyro model.
        args: its positional arguments; observations may be None.
        values: unconstrained value of every latent site.
        num_rows: B, the number of examples.
        site: an observed site or one of ``pyro.deterministic``; None for the one observed site.

    Raises:
        ModelError: no such site, or several to choose from.
        DataError: the site has no dimension of B examples.
        UnsupportedError: a parameter of the distribution cannot be written as free real numbers.
    """
    recorder = poutine.trace()
    with twice_differentiable(), recorder, AllRows(), AtUnconstrained(values), _arguments_kept() as made:
        model(*args)
    nodes: Any = recorder.trace.nodes
    node = nodes.get(site)
    if node is not None and node["infer"].get("_deterministic"):
        return _deterministic(str(site), node["value"], num_rows)
    name = choose_response(site, responses(nodes, values))
    node = nodes[name]
    return _observed(name, node["fn"], example_axis(name, node, num_rows), num_rows, made)


def _deterministic(site: str, value: Tensor, num_rows: int) -> Outputs:
    if value.dim() == 0 or len(value) != num_rows:
        raise DataError(
            f"deterministic site {site!r} has shape {tuple(value.shape)}, whose first dimension does not count the "
            f"{num_rows} examples"
        )
    parameter = Parameter("value", tuple(value.shape[1:]), 0, None)
    return Outputs(site, value.reshape(num_rows, -1), (parameter,), None, {}, -value.dim())


def _observed(site: str, fn: Any, axis: int, num_rows: int, made: "list[_Made]") -> Outputs:
    base = innermost(fn)
    given = _given(site, base, made)
    batch_dims = len(base.batch_shape)
    # The example's dimension, in the innermost distribution: wrappers move batch dimensions to the right only.
    position = (
        len(fn.batch_shape)
        + axis
        - (len(fn.batch_shape) + len(fn.event_shape))
        + (batch_dims + len(base.event_shape))
    )
    parts, parameters = [], []
    for name, value in given.items():
        constraint = base.arg_constraints.get(name)
        if constraint is None or not (torch.is_tensor(value) and value.requires_grad):
            continue
        transform, event_dim = _real_numbers(site, base, name, constraint)
        shape = (
            (*base.batch_shape, *value.shape[value.dim() - event_dim :]) if event_dim else base.batch_shape
        )
        real = value.expand(shape) if transform is None else transform.inv(value.expand(shape))
        real = real.movedim(position, 0)
        parts.append(real.reshape(num_rows, -1))
        parameters.append(Parameter(name, tuple(real.shape[1:]), position, transform))
    if not parts:
        raise ModelError(
            f"no parameter of {type(base).__name__} at observed site {site!r} depends on the latent sites: its "
            "prediction has no uncertainty to approximate"
        )
    return Outputs(site, torch.cat(parts, -1), tuple(parameters), fn, given, axis)


def _real_numbers(site: str, base: Any, name: str, constraint: Any) -> tuple[Any, int]:
    """Return the transform from real numbers to a parameter's domain, and the parameter's own dimensions."""
    if constraints.is_dependent(constraint):
        raise UnsupportedError(
            f"observed site {site!r}: the domain of {name!r} of {type(base).__name__} depends on other parameters, so "
            "it cannot be linearised. Name a pyro.deterministic site of the prediction instead: site='...'"
        )
    event_dim = constraint.event_dim
    inner = constraint
    while isinstance(inner, constraints.independent):
        inner = inner.base_constraint
    if inner in (constraints.real, constraints.real_vector):
        return None, event_dim
    return biject_to(constraint), event_dim


_Made = tuple[Any, dict[str, Any]]


@contextmanager
def _arguments_kept() -> Iterator[list[_Made]]:
    """Keep every Pyro distribution that is built with its arguments: logits, say, before they are normalised."""
    made: list[_Made] = []
    building = False

    def keep(cls: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        nonlocal building
        if building:
            return None
        building = True
        try:
            built = cls(*args, **kwargs)
        finally:
            building = False
        given = cls.__signature__.bind(*args, **kwargs).arguments
        given.update(given.pop("kwargs", {}))
        made.append((built, {k: v for k, v in given.items() if k != "validate_args" and v is not None}))
        return built

    coercions: list[Any] = pyro_distribution.COERCIONS
    coercions.append(keep)  # after others, which may build something else
    try:
        yield made
    finally:
        coercions.remove(keep)


def _given(site: str, base: Any, made: list[_Made]) -> dict[str, Any]:
    """Return what a distribution was made with; a plate may have expanded it since, which shares its memory."""
    for built, given in reversed(made):
        # Either may have computed further parameters since, such as probs of logits.
        if type(built) is type(base) and _memory(built) & _memory(base):
            return given
    raise UnsupportedError(
        f"observed site {site!r}: {type(base).__module__}.{type(base).__name__} hides what it was made of; use the "
        "class of the same name in pyro.distributions"
    )


def _memory(fn: Any) -> set[tuple[str, int]]:
    return {(name, fn.__dict__[name].data_ptr()) for name in fn.arg_constraints if name in fn.__dict__}
