# SPDX-License-Identifier: Apache-2.0
"""Resizing of images and signals."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.rules import moment_rule
from pyro_dvi.moments.value import GaussianMoments

__all__ = ["interpolate"]

_FLAT = {
    "linear": "bilinear",
    "trilinear": "bilinear",
}  # modes that F.interpolate has for one number of dimensions


@moment_rule(F.interpolate)
def interpolate(
    input: GaussianMoments,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> GaussianMoments:
    r"""Moments of resized images, :math:`y = (W_1 \otimes \dots \otimes W_d)x`.

    .. math:: \mathrm{Var}[y] = (W_1^{\circ 2} \otimes \dots \otimes W_d^{\circ 2}) \mathrm{Var}[x]

    Status: exact for independent inputs. The mode "nearest" copies elements; the matrices of the others are read off
    from the function itself, applied to unit vectors.
    """
    options: dict[str, Any] = {
        "align_corners": align_corners,
        "recompute_scale_factor": recompute_scale_factor,
        "antialias": antialias,
    }
    loc = F.interpolate(input.loc, size, scale_factor, mode, **options)
    if mode.startswith("nearest"):
        return GaussianMoments(loc, F.interpolate(input.variance, size, scale_factor, mode, **options))
    dims = input.dim() - 2
    variance = input.variance
    for k in range(dims):
        scale = scale_factor[k] if isinstance(scale_factor, Sequence) else scale_factor
        matrix = _matrix(variance, input.shape[2 + k], loc.shape[2 + k], scale, mode, options)
        variance = torch.movedim(torch.movedim(variance, 2 + k, -1) @ matrix.square(), -1, 2 + k)
    return GaussianMoments(loc, variance)


def _matrix(like: Tensor, n: int, out: int, scale: Any, mode: str, options: dict[str, Any]) -> Tensor:
    """Return the matrix ``[n, out]`` of one dimension: what unit vectors become."""
    units = torch.eye(n, dtype=like.dtype, device=like.device)[:, None, None, :]
    flat = _FLAT.get(mode, mode)
    if scale is None:
        resized = F.interpolate(units, size=(1, out), mode=flat, **options)
    else:
        resized = F.interpolate(units, scale_factor=(1.0, scale), mode=flat, **options)
    return resized[:, 0, 0, :]
