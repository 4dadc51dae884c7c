# SPDX-License-Identifier: Apache-2.0
r"""Points and weights for expectations under a standard Gaussian, :math:`\mathrm E[f(z)] \approx \sum_s w_s f(z_s)`."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

from pyro_dvi.moments.activations import normal
from pyro_dvi.moments.activations.normal import constants

_BITS = 30  # of Sobol integers in torch


def gauss_hermite(num_nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and weights ``[num_nodes]`` on the device and in the dtype of ``like``; weights sum to one.

    Best for functions that grow as exponentials, such as powers of a scale.
    """
    nodes, weights = (constants(c, like).squeeze(-1) for c in normal.gauss_hermite(num_nodes))
    return nodes, weights


def fixed_points(num_gaussians: int, like: Tensor, num_points: int = 128) -> tuple[Tensor, Tensor]:
    """Return points ``[S, num_gaussians]`` and weights ``[S]``, the same in every call.

    For one Gaussian 64 equally spaced nodes weighted by their density, for two a disc of 28 x 28; for more,
    ``num_points`` scrambled Sobol points. Equally spaced nodes converge as fast as Gauss-Hermite for smooth functions
    and do better where a log density is narrower than the Gaussian.
    """
    if num_gaussians <= 2:
        return _grid(num_gaussians, like.dtype, like.device)
    return _fixed_sobol(num_points, num_gaussians, like.dtype, like.device)


def sobol_points(num_points: int, dimension: int, like: Tensor) -> Tensor:
    """Return Gaussian points ``[num_points, dimension]``, the same in every call."""
    return _fixed_sobol(num_points, dimension, like.dtype, like.device)[0]


def shifted_sobol(num_points: int, dimension: int, like: Tensor) -> Tensor:
    """Return Gaussian points ``[num_points, dimension]`` with a fresh shift from torch's global generator.

    The shift is digital: the bits of all points are flipped alike, which keeps their even spread and makes every single
    point uniform, so that averages over them are unbiased. It costs one random number per dimension.
    """
    integers = _sobol_integers(num_points, dimension, like.device)
    shift = torch.randint(0, 2**_BITS, (dimension,), device=like.device)
    return _gaussian(integers ^ shift, like.dtype)


@lru_cache(maxsize=16)
def _grid(num_gaussians: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    radius, num_nodes = (8.5, 64) if num_gaussians == 1 else (6.5, 28)
    line = np.linspace(-radius, radius, num_nodes)
    nodes = np.stack(np.meshgrid(*[line] * num_gaussians, indexing="ij"), -1).reshape(-1, num_gaussians)
    nodes = nodes[np.square(nodes).sum(1) <= radius**2 + 1e-9]
    weights = np.exp(-0.5 * np.square(nodes).sum(1))
    with torch.inference_mode(False):  # an inference tensor in the cache could not take part in training
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
    """Gaussian quantiles at the centres of the cells that the integers number."""
    symmetric = (2 * integers + (1 - 2**_BITS)).to(dtype) / 2**_BITS
    edge = 1 - torch.finfo(dtype).eps
    return torch.erfinv(symmetric.clamp_(-edge, edge)).mul_(math.sqrt(2))
