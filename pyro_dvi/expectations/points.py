# SPDX-License-Identifier: Apache-2.0
r"""Points and weights for expectations under Gaussians, and parameter values at points of the underlying Gaussian.

.. math:: \mathrm E[f(z)] \approx \sum_s w_s f(z_s), \qquad z \sim \mathcal N(0, I).
"""

import math
from collections.abc import Hashable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributions import constraints
from torch.quasirandom import SobolEngine

from pyro_dvi.core.recorder import is_recording
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments, quadrature as normal
from pyro_dvi.moments.quadrature import constants
from pyro_dvi.moments.shared_noise import has_covariances
from pyro_dvi.moments.value import floored

_BITS = 30  # number of bits of torch's Sobol integers


def gauss_hermite(num_nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and weights ``[num_nodes]`` with the device and dtype of ``like``; weights sum to one.

    These nodes suit functions with exponential growth, such as powers of a scale.
    """
    nodes, weights = (constants(c, like).squeeze(-1) for c in normal.gauss_hermite(num_nodes))
    return nodes, weights


def fixed_points(num_gaussians: int, like: Tensor, num_points: int = 128) -> tuple[Tensor, Tensor]:
    """Return points ``[S, num_gaussians]`` and weights ``[S]``, the same in every call.

    One Gaussian gets 64 equally spaced nodes weighted by their density, two get a disc of 28 x 28 nodes, and more get
    ``num_points`` scrambled Sobol points. For smooth functions, equally spaced nodes converge as fast as Gauss-Hermite
    nodes; they are more accurate if a log density is narrower than the Gaussian.
    """
    if num_gaussians <= 2:
        return _grid(num_gaussians, like.dtype, like.device)
    return _fixed_sobol(num_points, num_gaussians, like.dtype, like.device)


def sobol_points(num_points: int, dimension: int, like: Tensor) -> Tensor:
    """Return Gaussian points ``[num_points, dimension]``, the same in every call."""
    return _fixed_sobol(num_points, dimension, like.dtype, like.device)[0]


def shifted_sobol(num_points: int, dimension: int, like: Tensor) -> Tensor:
    """Return Gaussian points ``[num_points, dimension]`` with a fresh shift from torch's global generator.

    The shift is digital: the same random bits are flipped in all points, which preserves their even spread and makes
    every point uniform, so averages are unbiased. The shift costs one random number per dimension. It is drawn on the
    CPU, so that a seed gives the same numbers on every device.
    """
    integers = _sobol_integers(num_points, dimension, like.device)
    shift = torch.randint(0, 2**_BITS, (dimension,)).to(like.device, non_blocking=True)
    return _gaussian(integers ^ shift, like.dtype)


@lru_cache(maxsize=16)
def _grid(num_gaussians: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    radius, num_nodes = (8.5, 64) if num_gaussians == 1 else (6.5, 28)
    line = np.linspace(-radius, radius, num_nodes)
    nodes = np.stack(np.meshgrid(*[line] * num_gaussians, indexing="ij"), -1).reshape(-1, num_gaussians)
    nodes = nodes[np.square(nodes).sum(1) <= radius**2 + 1e-9]
    weights = np.exp(-0.5 * np.square(nodes).sum(1))
    with torch.inference_mode(False):  # an inference tensor in the cache could not be used in training
        return (
            torch.tensor(nodes, dtype=dtype, device=device),
            torch.tensor(weights / weights.sum(), dtype=dtype, device=device),
        )


@lru_cache(maxsize=16)
def _fixed_sobol(
    num_points: int, dimension: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        if dimension > SobolEngine.MAXDIM:
            generator = torch.Generator().manual_seed(0)
            points = torch.randn(num_points // 2, dimension, generator=generator, dtype=torch.float64)
            points = torch.cat([points, -points]).to(device, dtype)
        else:
            points = _gaussian(_sobol_integers(num_points, dimension, device), dtype)
        return points, torch.full((len(points),), 1 / len(points), dtype=dtype, device=device)


@lru_cache(maxsize=16)
def _sobol_integers(num_points: int, dimension: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        points = SobolEngine(dimension, scramble=True, seed=0).draw(num_points, dtype=torch.float64)
        return (points * 2**_BITS).round().long().to(device)


def _gaussian(integers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return Gaussian quantiles at the centres of the cells with these indices."""
    symmetric = (2 * integers + (1 - 2**_BITS)).to(dtype) / 2**_BITS
    edge = 1 - torch.finfo(dtype).eps
    return torch.erfinv(symmetric.clamp_(-edge, edge)).mul_(math.sqrt(2))


# Functions whose values always lie in the domain of the parameters for which they are used.
_SAFE = {
    "exp": "positive",
    "softplus": "positive",
    "sigmoid": "unit",
    "special_expit": "unit",
    "softmax": "simplex",
}


def gaussian_of(parameter: GaussianMoments) -> GaussianMoments:
    """Return the Gaussian of which the parameter is a function; the parameter itself if it has no link."""
    return parameter if parameter.link is None else parameter.link.inner


def at_points(parameter: GaussianMoments, points: Tensor) -> Tensor:
    """Return values ``[S, *shape]`` of a parameter.

    Args:
        parameter: moments, with or without a link.
        points: standard Gaussian points, ``[S, *]``, broadcastable to ``[S, *shape]`` for the shape of
            :func:`gaussian_of`.
    """
    inner = gaussian_of(parameter)
    points = points.reshape(len(points), *(1,) * (inner.dim() - points.dim() + 1), *points.shape[1:])
    values = torch.addcmul(inner.loc, points, floored(inner.variance).sqrt())
    if parameter.link is None:
        return values
    function = parameter.link.function
    try:  # vmap, because the function may index dimensions from the left
        result: Tensor = torch.vmap(function)(values)
    except RuntimeError:  # vmap rejects functions whose shape depends on values, such as x[mask]
        result = torch.stack([function(value) for value in values])
    return result


def nodes_of(parameter: GaussianMoments, num_nodes: int = 32) -> tuple[Tensor, Tensor]:
    """Return values ``[S, *shape]`` of a parameter and their weights.

    Uses Gauss-Hermite nodes, or 512 Sobol points per example if a function such as softmax mixes its elements.
    """
    if parameter.link is None or parameter.link.separate:
        points, weights = gauss_hermite(num_nodes, parameter.loc)
    else:
        shape = within_example(parameter)
        points, weights = fixed_points(math.prod(shape), parameter.loc, 512)
        points = points.reshape(-1, *shape)
    return at_points(parameter, points), weights


def within_example(parameter: GaussianMoments) -> tuple[int, ...]:
    """Return the shape of the Gaussian behind a parameter for one example: all but the first dimension."""
    shape = gaussian_of(parameter).shape
    return tuple(shape[1:] if len(shape) > 1 else shape)


def identity_of(gaussian: GaussianMoments) -> Hashable:
    """Return a key that is equal for moments with the same elements in the same order.

    Two views of the same elements (``h.squeeze(-1)`` twice) have the same key; copies (``h.clone()``, ``h.flip(0)``) do
    not. The variance is part of the key, because ``dropout(h)`` has the same mean as h.
    """
    parts = gaussian.loc, gaussian.variance
    if torch.compiler.is_compiling():
        return tuple(id(t) for t in parts)
    try:
        return tuple((t.data_ptr(), t.device, t.dtype, t.shape, t.stride()) for t in parts)
    except RuntimeError:  # tensors inside vmap have no storage
        return tuple(id(t) for t in parts)


def are_distinct(parameters: Iterable[GaussianMoments]) -> bool:
    """Return True if no two parameters are functions of the same Gaussian."""
    gaussians = [gaussian_of(p) for p in parameters]
    return len(gaussians) < 2 or len({identity_of(g) for g in gaussians}) == len(gaussians)


def are_dependent(family: type, parameters: Mapping[str, Any]) -> bool:
    """Return True if a density depends on several outputs of a layer with covariances between outputs."""
    gaussians = {k: gaussian_of(p) for k, p in parameters.items() if isinstance(p, GaussianMoments)}
    shared = [k for k, gaussian in gaussians.items() if has_covariances(gaussian)]
    mixed = [k for k in shared if event_dim_of(family, k) != 0]
    return len(shared) > 1 or bool(mixed)


def constraint_of(family: type, name: str) -> Any:
    """Return the domain of a parameter of the family; None if unknown."""
    table = getattr(family, "arg_constraints", None)
    return table.get(name) if isinstance(table, dict) else None


def event_dim_of(family: type, name: str) -> int | None:
    """Return the number of event dimensions of a parameter; None if unknown."""
    constraint = constraint_of(family, name)
    return None if constraint is None or constraints.is_dependent(constraint) else constraint.event_dim


def check_domain(family: type, name: str, parameter: GaussianMoments, values: Tensor) -> None:
    """Raise an error if parameter values lie outside the domain, as values of an untransformed Gaussian may.

    Raises:
        UnsupportedError: if a value lies outside the domain; the message names the family and the parameter.
    """
    constraint = constraint_of(family, name)
    if constraint is None or constraint is constraints.real or constraints.is_dependent(constraint):
        return
    if parameter.link is not None and parameter.link.name in _SAFE:
        return
    if is_recording() or _admitted(constraint, values):
        return
    raise UnsupportedError(
        f"the uncertain parameter of {family.__name__}({name}=...) must lie in the domain {constraint}, but can take "
        f"values from {values.detach().min().item():.3g} to {values.detach().max().item():.3g}. Pass logits= instead "
        "of probs=, or apply softmax, sigmoid, F.softplus or torch.exp as the last step of the network. No product or "
        "sum of two uncertain terms, cat, stack, writing by index or dropout may follow this step"
    )


def _admitted(constraint: Any, values: Tensor) -> bool:
    if constraint is constraints.simplex:  # the families normalise it
        return bool((values >= 0).all())
    return bool(constraint.check(values).all())


def log_and_inverse_power(family: type, name: str, scale: Any, power: int) -> tuple[Tensor, Tensor]:
    r"""Return :math:`\mathrm E[\log s]` and :math:`\mathrm E[s^{-p}]`.

    For :math:`s = e^h` with Gaussian h, they are :math:`\bar h` and :math:`e^{-p\bar h + p^2 v_h/2}`.

    Status: exact for a deterministic scale and for ``exp``. Other functions use Gauss-Hermite quadrature with 32 nodes
    over the Gaussian behind the scale; the relative error is 1e-8 for softplus at standard deviations up to 1.

    Args:
        family: the distribution class, named in error messages.
        name: name of the parameter.
        scale: moments, tensor or number.
        power: p.
    """
    if not isinstance(scale, GaussianMoments):
        return scale.log(), scale.pow(-power)
    link = scale.link
    if link is not None and link.name == "exp":
        h = gaussian_of(scale)
        return h.loc, torch.exp(torch.add(-power * h.loc, h.variance, alpha=0.5 * power**2))
    values, weights = nodes_of(scale)
    check_domain(family, name, scale, values)
    mean_log, mean_power = (torch.tensordot(weights, f, 1) for f in (values.log(), values.pow(-power)))
    return mean_log, mean_power
