# SPDX-License-Identifier: Apache-2.0
r"""The updates of VOGN, OGN and IVON on a GPU, with one pass over the tensors of a site.

The equations are those of :mod:`pyro_dvi.natural_gradients.updates`, with the formulation ``Consistent()``. Numbers
that change from step to step are read from the device, so that a CUDA graph can contain the update.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


@triton.jit(do_not_specialize=["size", "unit"])
def _update(  # type: ignore[no-untyped-def]
    loc,
    precision,
    gradient,
    measured,
    momentum,
    curvature,
    prior_loc,
    prior_precision,
    numbers,
    size,
    unit,
    ONE_LOC: tl.constexpr,
    ONE_PRECISION: tl.constexpr,
    IVON: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one block of a site; the tensors of a prior may have a single element."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < size
    forget, rate, temper, prior, damping, correction, bound, step, kept = (
        tl.load(numbers).to(tl.float32),
        tl.load(numbers + 1).to(tl.float32),
        tl.load(numbers + 2).to(tl.float32),
        tl.load(numbers + 3).to(tl.float32),
        tl.load(numbers + 4).to(tl.float32),
        tl.load(numbers + 5).to(tl.float32),
        tl.load(numbers + 6).to(tl.float32),
        tl.load(numbers + 7).to(tl.float32),
        tl.load(numbers + 8).to(tl.float32),
    )
    mu, g = tl.load(loc + i, inside, 0.0), tl.load(gradient + i, inside, 0.0)
    m, s, h = (
        tl.load(momentum + i, inside, 0.0),
        tl.load(curvature + i, inside, 1.0),
        tl.load(measured + i, inside, 0.0),
    )
    centre = tl.load(prior_loc) if ONE_LOC else tl.load(prior_loc + i, inside, 0.0)
    delta = prior * (tl.load(prior_precision) if ONE_PRECISION else tl.load(prior_precision + i, inside, 1.0))
    pull = delta * (mu - centre)
    if IVON:
        m += forget * (g - m)
        s = tl.maximum(s, -kept * delta)
        change = h - s
        s += rate * change + 0.5 * rate * rate * change * change / (s + delta)
        direction = m + correction * pull
    else:
        s += rate * (h - s)
        m += forget * (g + pull - m)
        direction = m
    total = s + delta
    direction = direction / (total + damping)
    limit = bound * unit
    direction = tl.minimum(tl.maximum(direction, -limit), limit)
    tl.store(loc + i, mu - step * direction, inside)
    tl.store(precision + i, total * temper, inside)
    tl.store(momentum + i, m, inside)
    tl.store(curvature + i, s, inside)


def update(tensors: list[Tensor], numbers: Tensor, unit: float, ivon: bool) -> None:
    """Update the tensors of a site in place.

    Args:
        tensors: means, precisions, gradient of the means, measured curvature, momentum, curvature, and mean and
            precision of the prior (of the same shape, or with one element); contiguous, in float32.
        numbers: the nine numbers of the step, in float64 or float32.
        unit: unit of the site's steps.
        ivon: whether to use the update of IVON.
    """
    size = tensors[0].numel()
    one_loc, one_precision = (tensor.numel() == 1 for tensor in tensors[6:])
    with torch.cuda.device_of(tensors[0]):
        _update[(triton.cdiv(size, _BLOCK),)](
            *tensors, numbers, size, unit, one_loc, one_precision, ivon, _BLOCK, num_warps=4
        )
