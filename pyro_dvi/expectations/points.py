# SPDX-License-Identifier: Apache-2.0
r"""Points and weights for expectations under a standard Gaussian, :math:`\mathrm E[f(z)] \approx \sum_s w_s f(z_s)`."""

import math
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor
from torch.quasirandom import SobolEngine

__all__ = ["fixed_points", "gauss_hermite", "shifted_sobol"]

_BITS = 30  # of Sobol integers in torch


def gauss_hermite(num_nodes: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return nodes and weights ``[num_nodes]`` on the device and in the dtype of ``like``; weights sum to one."""
    return _hermite(num_nodes, 1, like.dtype, like.device)


def fixed_points(num_gaussians: int, like: Tensor, num_points: int = 128) -> tuple[Tensor, Tensor]:
    """Return points ``[S, num_gaussians]`` and weights ``[S]``, the same in every call.

    Gauss-Hermite for one (32 nodes) and two Gaussians (a grid of 20 x 20 without its negligible corners), scrambled
    Sobol points for more.
    """
    if num_gaussians <= 2:
        nodes, weights = _hermite(32 if num_gaussians == 1 else 20, num_gaussians, like.dtype, like.device)
        return nodes.reshape(-1, num_gaussians), weights
    return _fixed_sobol(num_points, num_gaussians, like.dtype, like.device)


def shifted_sobol(num_points: int, dimension: int, like: Tensor) -> Tensor:
    """Return Gaussian points ``[num_points, dimension]`` with a fresh shift from torch's global generator.

    The shift is digital: the bits of all points are flipped alike, which keeps their even spread and makes every single
    point uniform, so that averages over them are unbiased. It costs one random number per dimension.
    """
    integers = _sobol_integers(num_points, dimension, like.device)
    shift = torch.randint(0, 2**_BITS, (dimension,), device=like.device)
    return _gaussian(integers ^ shift, like.dtype)


@lru_cache(maxsize=64)
def _hermite(
    num_nodes: int, num_gaussians: int, dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    nodes: np.ndarray
    weights: np.ndarray
    nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)
    weights = weights / weights.sum()
    if num_gaussians == 2:
        weights = np.outer(weights, weights).reshape(-1)
        nodes = np.stack(np.meshgrid(nodes, nodes, indexing="ij"), -1).reshape(-1, 2)
        kept = weights > 1e-13
        nodes, weights = nodes[kept], weights[kept] / weights[kept].sum()
    with torch.inference_mode(False):  # an inference tensor in the cache could not take part in training
        return (
            torch.tensor(nodes, dtype=dtype, device=device),
            torch.tensor(weights, dtype=dtype, device=device),
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
