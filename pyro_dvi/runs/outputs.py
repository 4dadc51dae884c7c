# SPDX-License-Identifier: Apache-2.0
"""Outputs of a model for given inputs: the parameters of its observed distribution as real numbers.

A mean is already a real number; a scale is represented by its logarithm, and class probabilities by the model's logits.
The linearisation applies to these real numbers, so every parameter stays inside its domain.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import pyro.distributions as dist
import torch
from torch import Tensor, distributions as td
from torch.distributions import constraints

from pyro_dvi.core.distributions import Built, arguments_kept, given_to, innermost, rewrapped
from pyro_dvi.core.recorder import structural
from pyro_dvi.errors import DataError, ModelError, NonFiniteError, UnsupportedError
from pyro_dvi.expectations.expectation import without_checks
from pyro_dvi.runs.latents import unconstraining_transform
from pyro_dvi.runs.log_joint import AtUnconstrained
from pyro_dvi.runs.posterior_run import twice_differentiable
from pyro_dvi.runs.sites import AllRows, choose_response, example_axis, is_deterministic, responses

# Location parameters of observations. They come before other parameters, such as degrees of freedom.
_LOCATIONS = ("loc", "logits", "probs", "rate", "predictor")


@dataclass(frozen=True)
class Parameter:
    """One uncertain parameter of the observed distribution.

    Attributes:
        name: name of the distribution's argument.
        shape: shape of the unconstrained values of one example.
        axis: the dimension of the parameter that indexes examples, counted from the left.
        transform: map from real numbers to the parameter's domain; None for the identity.
    """

    name: str
    shape: tuple[int, ...]
    axis: int
    transform: Any

    @property
    def size(self) -> int:
        """Number of unconstrained values per example."""
        return prod(self.shape)

    def native(self, real: Tensor) -> Tensor:
        """Return the argument of the distribution that unconstrained values ``[*lead, B, *shape]`` represent."""
        lead = real.dim() - 1 - len(self.shape)
        moved = real.movedim(lead, lead + self.axis)
        return moved if self.transform is None else self.transform(moved)


@dataclass(frozen=True)
class Outputs:
    """The outputs of one run.

    Attributes:
        site: name of the observed or deterministic site.
        values: all parameters of each example, ``[B, K]``.
        parameters: the parameters that the K values represent, in order; the first is the mean, the logits or the
            logarithm of a rate, even if only other parameters are uncertain.
        distribution: the observed distribution; None for a deterministic site.
        given: arguments of the innermost distribution, by name.
        axis: the dimension of the batch shape that indexes examples, counted from the right.
        trace: the run, for its observations; None if the outputs are detached.
    """

    site: str
    values: Tensor
    parameters: tuple[Parameter, ...]
    distribution: Any
    given: Mapping[str, Any]
    axis: int
    trace: Any = None

    def split(self, values: Tensor) -> list[Tensor]:
        """Return the unconstrained values ``[*lead, B, *shape]`` of each parameter, from values ``[*lead, B, K]``."""
        parts = values.split([p.size for p in self.parameters], -1)
        return [
            part.reshape(*values.shape[:-1], *p.shape) for p, part in zip(self.parameters, parts, strict=True)
        ]

    def with_values(self, values: Tensor) -> Any:
        """Return the distribution with the parameters that given values represent.

        Args:
            values: unconstrained values of all parameters, ``[*lead, B, K]``.

        Returns:
            The distribution with batch shape ``[*lead, *batch]``.
        """
        real = self.split(values)
        native = {p.name: p.native(part) for p, part in zip(self.parameters, real, strict=True)}
        return self.rebuilt({**self.given, **native}, tuple(values.shape[:-2]))

    def rebuilt(self, given: Mapping[str, Any], lead: tuple[int, ...]) -> Any:
        """Return the distribution with the arguments of the innermost distribution replaced.

        Args:
            given: new arguments of the innermost distribution.
            lead: batch dimensions to add on the left.
        """

        def replaced(base: Any) -> Any:
            return type(base)(**given, **without_checks(type(base)))

        return rewrapped(self.distribution, replaced, lead)

    def detached(self) -> "Outputs":
        """Return the outputs without the autograd graph of the run."""
        given = {k: v.detach() if torch.is_tensor(v) else v for k, v in self.given.items()}
        plain = replace(self, values=self.values.detach(), given=given, trace=None)
        if self.distribution is None:
            return plain
        return replace(plain, distribution=plain.with_values(plain.values))


def run_outputs(
    model: Callable, args: tuple, values: Mapping[str, Tensor], num_rows: int, site: str | None = None
) -> Outputs:
    """Run ``model`` with its latents at ``values``, and return its outputs.

    Args:
        model: a Pyro model.
        args: positional arguments of the model; observations may be None.
        values: unconstrained value of every latent site.
        num_rows: B, the number of examples.
        site: name of an observed site or of a ``pyro.deterministic`` site; None for the only observed site.

    Raises:
        ModelError: if there is no such site, if there are several and ``site`` is None, or if the site does not depend
            on any latent site.
        DataError: if the site has no dimension of B examples.
        UnsupportedError: if a parameter of the distribution cannot be represented by unconstrained values.
    """
    with twice_differentiable(), AllRows(), AtUnconstrained(values) as run, arguments_kept() as made:
        model(*args)
    nodes: Any = run.trace.nodes
    node = nodes.get(site)
    if node is not None and is_deterministic(node):
        return replace(_deterministic(str(site), node["value"], num_rows), trace=run.trace)
    name = choose_response(site, responses(nodes, values))
    node = nodes[name]
    found = observed_outputs(name, node["fn"], example_axis(name, node, num_rows), num_rows, made)
    return replace(found, trace=run.trace)


def _deterministic(site: str, value: Tensor, num_rows: int) -> Outputs:
    if value.dim() == 0 or len(value) != num_rows:
        raise DataError(
            f"deterministic site {site!r} has the shape {tuple(value.shape)}: its first dimension must index the "
            f"{num_rows} examples. If it has one value per group, write pyro.deterministic('own', value[group]), with "
            "the group of each example, or use guide.sample or guide.quantiles"
        )
    if not value.requires_grad:
        raise _without_latents(f"deterministic site {site!r} does not depend")
    parameter = Parameter("value", tuple(value.shape[1:]), 0, None)
    return Outputs(site, value.reshape(num_rows, -1), (parameter,), None, {}, -value.dim())


def observed_outputs(site: str, fn: Any, axis: int, num_rows: int, made: list[Built]) -> Outputs:
    """Return the outputs from the distribution of an observed site; raises the errors of :func:`run_outputs`.

    Args:
        site: the name of the site.
        fn: the distribution at the site.
        axis: the dimension of the distribution's batch shape that indexes examples, counted from the right.
        num_rows: B, the number of examples.
        made: the distributions that were built in the run, with their arguments.
    """
    base = innermost(fn)
    given = given_to(site, base, made)
    batch_shape = _full_batch_shape(fn)
    position = len(fn.batch_shape) + axis  # wrappers only remove batch dimensions on the right
    parts, parameters = [], []
    location = _location(given)
    for name in sorted(given, key=lambda name: name not in _LOCATIONS):
        value = given[name]
        constraint = base.arg_constraints.get(name)
        if constraint is None or not (torch.is_tensor(value) and value.requires_grad):
            _refuse_hidden(site, base, name, value)
            if constraint is None or name != location:
                continue
            value = _certain(value, given)
        transform, event_dim = _real_numbers(site, base, name, constraint)
        own = value.shape[value.dim() - event_dim :] if event_dim else ()
        value = value.expand(*batch_shape, *own)
        real = (value if transform is None else transform.inv(value)).movedim(position, 0)
        if not structural(torch.isfinite(real.detach()).all()):
            raise NonFiniteError(
                f"observed site {site!r}: {name!r} of {type(base).__name__} is NaN, infinite or at the edge of the "
                "domain for some examples: use logits= instead of probs=, or keep scales away from zero"
            )
        parameters.append(Parameter(name, tuple(real.shape[1:]), position, transform))
        parts.append(real.reshape(num_rows, parameters[-1].size))
    if not any(part.requires_grad for part in parts):
        raise _without_latents(f"no parameter of {type(base).__name__} at observed site {site!r} depends")
    return Outputs(site, torch.cat(parts, -1), tuple(parameters), fn, given, axis)


def _location(given: Mapping[str, Any]) -> str | None:
    """Return the name of the parameter that is the prediction; it is an output even if it is deterministic."""
    name = next((name for name in _LOCATIONS if name in given), None)
    # The mean of a Gamma depends on both its rate and its concentration.
    return None if name == "rate" and "concentration" in given else name


def _certain(value: Any, given: Mapping[str, Any]) -> Tensor:
    """Return a deterministic parameter as a constant tensor, with the dtype and device of the other parameters."""
    if torch.is_tensor(value):
        return value
    like = next((v for v in given.values() if torch.is_tensor(v)), torch.empty(()))
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def _without_latents(what: str) -> ModelError:
    return ModelError(f"{what} on the latent sites, so its prediction has no uncertainty")


def _refuse_hidden(site: str, base: Any, name: str, value: Any) -> None:
    """Raise an error if an argument that cannot be linearised, such as the components of a mixture, is uncertain."""
    if isinstance(value, td.Distribution) or (torch.is_tensor(value) and value.requires_grad):
        raise UnsupportedError(
            f"observed site {site!r}: the argument {name!r} of {type(base).__name__} cannot be linearised. Choose a "
            "pyro.deterministic site for the prediction: guide.predictive(x, site='...')"
        )


def _full_batch_shape(fn: Any) -> tuple[int, ...]:
    """Return the batch shape of the innermost distribution after all expansions by its wrappers."""
    shape = tuple(fn.batch_shape)
    base = innermost(fn)
    while fn is not base:
        if isinstance(fn, td.Independent):
            shape = (*shape, *fn.event_shape[: fn.reinterpreted_batch_ndims])
        elif not isinstance(fn, (dist.MaskedDistribution, dist.ExpandedDistribution)):
            # A transform may turn batch dimensions into event dimensions.
            inner = tuple(fn.base_dist.batch_shape)
            shape = shape if len(inner) == len(shape) else inner
        fn = fn.base_dist
    return shape


def _real_numbers(site: str, base: Any, name: str, constraint: Any) -> tuple[Any, int]:
    """Return the transform from real numbers to a parameter's domain, and the number of its event dimensions."""
    if constraint is constraints.simplex:
        # Use one value per class, as for logits; stick-breaking would not treat all classes alike.
        return td.SoftmaxTransform(), constraint.event_dim
    with suppress(NotImplementedError):
        if not constraints.is_dependent(constraint):  # a dependent domain varies with other parameters
            return unconstraining_transform(constraint), constraint.event_dim
    raise UnsupportedError(
        f"observed site {site!r}: {name!r} of {type(base).__name__} has the domain {constraint}, for which there is no "
        "transform from real numbers. Choose a pyro.deterministic site for the prediction with site='...'"
    )
