# SPDX-License-Identifier: Apache-2.0
r"""Propagation of the covariances between the activations of each example, through linear layers and rectifiers.

Within :func:`full_covariances`, activations are :class:`~pyro_dvi.moments.shared_noise.JointMoments`, with one shared
variable for each unit of the hidden layer on which they depend linearly. For a hidden layer with means :math:`\bar h`
and covariance C, and a layer of independent weights with means M and variances S,

.. math::
    \mathrm{Cov}[y_o, y_p] = (M C M^\top)_{op} + \delta_{op}\sum_k S_{ok}\,(C_{kk} + \bar h_k^2).

Status: exact for the linear layer, whatever the distribution of its inputs, if each weight is used once per example. At
rectifiers, activations are taken to be Gaussian (:mod:`pyro_dvi.moments.rectified_covariance`).

Source: Wu et al. (2019), "Deterministic variational inference for robust Bayesian neural networks".
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.dispatch import Kind, observed_by
from pyro_dvi.moments.rectified_covariance import rectified_covariance
from pyro_dvi.moments.shared_noise import (
    NO_RULE,
    Followed,
    JointMoments,
    SharedNoise,
    covariance_of,
    gaussian_behind,
    has_covariances,
    outputs_with,
)
from pyro_dvi.moments.tensor_like import ENTRIES, name_of
from pyro_dvi.moments.value import GaussianMoments, loc_of, raised, second_moment_of, variance_of
from pyro_dvi.moments.weight_uses import parts_of


class _Local(threading.local):
    """A flag for this thread: True if covariances are propagated."""

    on = False


_LOCAL = _Local()
_KEEP_ROWS = frozenset("reshape view flatten squeeze unsqueeze expand".split())  # if the last size is kept
_PARTS_OF_ROWS = frozenset("getitem narrow split chunk flip".split())  # if all other sizes are kept
_COPIES = frozenset(
    "expand broadcast_to repeat tile repeat_interleave gather index_select take_along_dim".split()
)


@contextmanager
def full_covariances(on: bool = True) -> Iterator[None]:
    """Propagate the covariances between activations of an example; functions that would lose them raise an error."""
    if not on:
        yield
        return
    before, _LOCAL.on = _LOCAL.on, True
    try:
        with observed_by(_FullCovariance()):
            yield
    finally:
        _LOCAL.on = before


def are_followed() -> bool:
    """Return True if covariances between activations are propagated."""
    return _LOCAL.on


def independent(x: GaussianMoments) -> JointMoments:
    """Return activations that have these moments and are independent within each example."""
    noise = SharedNoise(torch.zeros_like(x.loc).unsqueeze(0), "", between_outputs=False, base=x.loc)
    result = JointMoments(x.loc, x.variance, noise, variance=x.variance)
    result.link, result.origin = x.link, x.origin
    return result


def full_product(product: Callable[..., Tensor], x: Any, weight: Any, bias: Any = None) -> JointMoments:
    """Moments of ``product(x, weight)`` or ``product(x, weight, bias)``, for activations x and independent weights.

    Args:
        product: a function of rows; the last dimension of x and of the result indexes units.
        x: activations, other moments (treated as independent), or a tensor.
        weight: moments or a tensor.
        bias: likewise, or None.

    Raises:
        UnsupportedError: if x has lost its covariances, if its elements are no longer in rows of examples, if outputs
            share weights, or if weights have covariances.
    """
    _check(product, x, weight, bias)
    mean, spread, own = loc_of(weight), variance_of(weight), variance_of(bias)
    loc = product(loc_of(x), mean, *() if bias is None else (loc_of(bias),))
    rest = own if own is None else own.expand_as(loc)
    if spread is not None:
        rest = product(second_moment_of(x), spread, *() if own is None else (own,))
    if not isinstance(x, GaussianMoments):
        return independent(GaussianMoments(loc, torch.zeros_like(loc) if rest is None else rest))

    def through(lanes: Tensor) -> Tensor:
        return torch.vmap(lambda lane: product(lane, mean))(lanes).expand(-1, *loc.shape)

    if has_covariances(x):
        noise = x.noise if x.rest is None else _noise(x.loc, covariance_of(x))  # type: ignore[attr-defined]
        return outputs_with(
            loc, rest, replace(noise, factor=through(noise.factor), dual=through(noise.other))
        )
    factor = through(_units(x.loc))
    variance = x.variance.expand(*loc.shape[:-1], -1).movedim(-1, 0).unsqueeze(-1)
    return outputs_with(loc, rest, SharedNoise(factor, "", dual=factor * variance, base=x.loc))


def _check(product: Any, x: Any, weight: Any, bias: Any) -> None:
    link, behind = getattr(x, "link", None), gaussian_behind(x)
    if product not in (F.linear, torch.matmul) or min(x.dim(), weight.dim()) < 2:
        name = name_of(getattr(product, "func", product))
        _refuse(f"{name} with arguments of shapes {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.dim() > max(2, weight.dim()):
        _refuse(f"a layer with the same weights at each of {tuple(x.shape[1:-1])} positions of an example")
    for factor in map(gaussian_behind, (weight, bias)):
        if isinstance(factor, JointMoments):
            sites = factor.noise.sites
            _refuse(f"weights {sites} that have covariances" if sites else "activations as the second factor")
    if link is not None and (has_covariances(link.inner) or not link.separate):
        _refuse(f"{link.name or 'a function'} of dependent activations")
    if isinstance(behind, JointMoments) and not behind.noise.in_rows:
        _refuse("a product of activations that were moved to other rows or copied")


def _noise(base: Tensor, covariance: Tensor) -> SharedNoise:
    """Return the noise of activations in terms of these activations themselves: the factor is the identity."""
    dual = covariance.movedim(-1, 0)
    return SharedNoise(_units(base).expand_as(dual), "", dual=dual, base=base)


def _units(base: Tensor) -> Tensor:
    """Return the identity matrix as a factor, with one row for each unit, the same for all examples."""
    size = base.shape[-1]
    lanes = torch.eye(size, dtype=base.dtype, device=base.device)
    return lanes.reshape(size, *[1] * (base.dim() - 1), size)


class _FullCovariance(Followed):
    """Observe functions of activations."""

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Return activations with their covariances, or raise an error for a function without a rule."""
        x: Any = args[0] if args else None
        entry = ENTRIES[func]
        uncertain = [a for a in tree_leaves((args, kwargs)) if isinstance(a, GaussianMoments)]
        if isinstance(result, JointMoments):
            return result
        if entry.kind in (Kind.AFFINE, Kind.ELEMENTWISE) and result.dim() > 1:
            if any((part.shape[-1:] or (1,)) < result.shape[-1:] for part in uncertain):
                _refuse(f"{name_of(func)} of an uncertain value that several units share")
        if isinstance(x, JointMoments) and entry.kind is Kind.ELEMENTWISE and len(uncertain) == 1:
            if not x.noise.between_outputs:
                return independent(result)
            if entry.name == "relu" and x.noise.in_rows:
                covariance = rectified_covariance(x.loc, raised(x.variance), covariance_of(x))
                covariance = covariance.diagonal_scatter(result.variance, dim1=-2, dim2=-1)
                noise = _noise(result.loc, covariance)
                return JointMoments(result.loc, None, noise, variance=result.variance)
        results = super().__call__(func, args, kwargs, result)
        for part in parts_of(results) if entry.kind is Kind.REARRANGEMENT else ():
            behind: Any = gaussian_behind(part)
            if isinstance(behind, JointMoments) and not _keeps_rows(
                entry.name.strip("_"), args, part, behind
            ):
                if part.link is not None:
                    behind = behind.snapshot()
                    part.link = replace(part.link, inner=behind)
                behind.noise = replace(behind.noise, in_rows=False)
        return results


def _keeps_rows(name: str, args: tuple, part: GaussianMoments, behind: JointMoments) -> bool:
    """Return True if the last dimension still indexes the units of one example, each of them once."""
    if name in _KEEP_ROWS and part.shape[-1:] == args[0].shape[-1:]:
        return True
    if name == "getitem":
        index = args[1] if isinstance(args[1], tuple) else (args[1],)
        copies = not all(i is None or i is ... or isinstance(i, int | slice) for i in index)
    else:
        copies = name in _COPIES
    in_parts = name in _PARTS_OF_ROWS and part.shape[:-1] == args[0].shape[:-1]
    return not copies and (in_parts or not behind.noise.between_outputs)


def _refuse(what: str) -> NoReturn:
    raise UnsupportedError(f"the model has {what}, {NO_RULE}")
