# SPDX-License-Identifier: Apache-2.0
"""The parts of distributions: wrappers, tensors, and the arguments with which a model built them."""

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import pyro.distributions as dist
import torch
from pyro.distributions import distribution as pyro_distribution
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Tensor, distributions as td
from torch.distributions import constraints

from pyro_dvi.errors import UnsupportedError

D = TypeVar("D", bound=TorchDistributionMixin)

# Wrappers -------------------------------------------------------------------------------------------------------

WRAPPERS = (td.Independent, dist.MaskedDistribution, dist.ExpandedDistribution, td.TransformedDistribution)


def strip_event_dims(fn: Any) -> Any:
    """Return the distribution below ``to_event``, whose parameters have the shape of the value."""
    while hasattr(fn, "reinterpreted_batch_ndims"):
        fn = fn.base_dist
    return fn


def innermost(fn: Any) -> Any:
    """Return a distribution without its wrappers; named classes such as LogNormal and Gumbel are kept whole."""
    while isinstance(fn, WRAPPERS) and not _is_named(fn):
        fn = fn.base_dist
    return fn


def _is_named(fn: Any) -> bool:
    plain = (td.TransformedDistribution, dist.TransformedDistribution)
    return isinstance(fn, td.TransformedDistribution) and type(fn) not in plain


def rewrapped(fn: Any, replace: Callable[[Any], Any], lead: tuple[int, ...] = ()) -> Any:
    """Return ``fn`` with its innermost distribution replaced.

    Args:
        fn: a distribution.
        replace: function that returns the new innermost distribution, given the old one.
        lead: batch dimensions that the new distribution has to the left of the old batch dimensions.
    """
    if isinstance(fn, td.Independent):
        return rewrapped(fn.base_dist, replace, lead).to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.MaskedDistribution):
        return rewrapped(fn.base_dist, replace, lead).mask(fn._mask)
    if isinstance(fn, dist.ExpandedDistribution):
        return rewrapped(fn.base_dist, replace, lead).expand((*lead, *fn.batch_shape))
    if isinstance(fn, td.TransformedDistribution) and not _is_named(fn):
        return dist.TransformedDistribution(rewrapped(fn.base_dist, replace, lead), fn.transforms)
    return replace(fn)


def unexpanded(value: Tensor) -> Tensor:
    """Return a tensor without the repetitions of ``expand``: a scale shared by all weights is a scalar again."""
    shape = [1 if stride == 0 else size for size, stride in zip(value.shape, value.stride(), strict=True)]
    return value if shape == list(value.shape) else value.as_strided(shape, value.stride())


# Tensors --------------------------------------------------------------------------------------------------------


def tensors_of(fn: Any, *, strict: bool = False) -> list[Tensor]:
    """Return every tensor in a distribution, including tensors in inner distributions, transforms and constraints.

    Args:
        fn: any distribution of Pyro or torch.
        strict: True to raise an error for objects that may contain other tensors.

    Raises:
        TypeError: if ``strict`` and there is such an object, for example a function.
    """
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _mapped(fn, note, strict)
    return found


def with_tensors(fn: Any, tensors: Iterable[Tensor]) -> Any:
    """Return a copy of a distribution with other tensors, in the order of :func:`tensors_of`."""
    given = iter(tensors)
    return _mapped(fn, lambda _: next(given), strict=True)


def placed_like(distribution: D, reference: Tensor) -> D:
    """Return ``distribution`` on the device and in the floating-point dtype of ``reference``.

    Distributions have no ``to`` method. This copies the object tree (base distributions, mixture components,
    transforms) with every tensor replaced by the moved one. If all are in place already, the object itself is
    returned.

    Args:
        distribution: any distribution of Pyro or torch.
        reference: the tensor to follow.

    Example:
        >>> import torch
        >>> import pyro.distributions as dist
        >>> placed_like(dist.Normal(0.0, 1.0), torch.zeros(1, dtype=torch.float64)).sample().dtype
        torch.float64
    """
    tensors = tensors_of(distribution)
    moved = [t.to(reference.device, reference.dtype if t.is_floating_point() else None) for t in tensors]
    if all(new is old for new, old in zip(moved, tensors, strict=True)):
        return distribution
    return copy.deepcopy(distribution, {id(old): new for old, new in zip(tensors, moved, strict=True)})


def broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Return True if a tensor of one shape expands to another shape."""
    ends = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(size in (1, wanted) for size, wanted in ends)


_CONSTANT = (type(None), bool, int, float, str, type, torch.Size, torch.dtype, torch.device)


def _mapped(value: Any, function: Callable[[Tensor], Tensor], strict: bool) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, _CONSTANT):
        return value
    if isinstance(value, (td.Distribution, td.Transform, constraints.Constraint)):
        made, parts = copy.copy(value), dict(vars(value))
        if isinstance(value, td.Transform) and not isinstance(value, type(td.ExpTransform().inv)):
            parts["_inv"] = None  # computed from the transform itself on access
        vars(made).update({name: _mapped(part, function, strict) for name, part in parts.items()})
        return made
    if isinstance(value, dict):
        return {name: _mapped(part, function, strict) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_mapped(part, function, strict) for part in value)
    if strict:
        raise TypeError(
            f"a distribution contains an object of type {type(value).__name__}, which may hide tensors"
        )
    return value


# Arguments that the model passed, such as logits before normalisation ----------------------------------------


@dataclass(frozen=True)
class Built:
    """A distribution and its arguments by name."""

    distribution: Any
    given: dict[str, Any]


def arguments_of(cls: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters with which a distribution is built, by name."""
    given = dict(cls.__signature__.bind(*args, **kwargs).arguments)
    given.update(given.pop("kwargs", {}))
    return {name: value for name, value in given.items() if name != "validate_args" and value is not None}


@contextmanager
def arguments_kept() -> Iterator[list[Built]]:
    """Yield a list of every Pyro distribution that is built in the context, with its arguments."""
    made: list[Built] = []

    def keep(cls: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        distribution = type.__call__(cls, *args, **kwargs)  # what Pyro does without coercions
        made.append(Built(distribution, arguments_of(cls, args, kwargs)))
        return distribution

    # After other coercions, which may build another distribution.
    with building_by(keep, len(pyro_distribution.COERCIONS)):
        yield made


@contextmanager
def building_by(build: Callable[[Any, tuple, dict[str, Any]], Any], place: int = 0) -> Iterator[None]:
    """Build the Pyro distributions in the context with a function of their class and arguments.

    Args:
        build: function that returns the distribution, or None for Pyro's usual one.
        place: position of the function among Pyro's coercions; the first coercion that returns a distribution counts.
    """
    coercions: list[Any] = pyro_distribution.COERCIONS
    coercions.insert(place, build)
    try:
        yield
    finally:
        coercions.remove(build)


def given_to(site: str, base: Any, made: list[Built]) -> dict[str, Any]:
    """Return the arguments with which a distribution was built, even if a plate has expanded it since.

    Raises:
        UnsupportedError: if the distribution was built inside another one, or is not a Pyro distribution.
    """
    for built in made:
        if built.distribution is base:
            return built.given
    memory = _memory(base)
    for built in made:
        if type(built.distribution) is not type(base):
            continue
        other = _memory(built.distribution)
        # Either distribution may have computed further parameters since, such as probs from logits. Two distributions
        # may share one parameter, so all common parameters must agree.
        common = memory.keys() & other.keys()
        if common and all(memory[name] == other[name] for name in common):
            return built.given
    raise UnsupportedError(
        f"observed site {site!r}: the parameters of {type(base).__module__}.{type(base).__name__} cannot be traced to "
        "tensors of the model. In place of torch.distributions, use pyro.distributions. For a mixture of other "
        "distributions, add a pyro.deterministic site for the prediction and choose it with site='...'"
    )


def _memory(fn: Any) -> dict[str, int]:
    """Return the addresses of the parameters of a distribution, without parameters that it computes on access."""
    found = {}
    for name in fn.arg_constraints:
        lazy = isinstance(
            inspect.getattr_static(type(fn), name, None), torch.distributions.utils.lazy_property
        )
        value = fn.__dict__.get(name) if lazy else getattr(fn, name, None)
        if torch.is_tensor(value):
            found[name] = value.data_ptr()
    return found
