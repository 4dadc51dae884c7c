# SPDX-License-Identifier: Apache-2.0
r"""Sums of squared per-example gradients of convolutions on a GPU, without writing the gradients to memory.

.. math:: S_{ok} = \sum_n \Bigl(\sum_p \delta_{nop}\, x_{nkp}\Bigr)^2

Here n is an example, o an output channel, p a position of the output, and k an input channel with an offset in the
kernel. Each program of the GPU computes one tile of the gradient for a few examples, one after the other, and adds the
squares. It reads x from a view of the padded input (:func:`torch.Tensor.as_strided`), so each position's input is not
written to memory either. A second operation sums over the programs of a tile, in a fixed order.
"""

from functools import cache
from math import ceil, prod

import torch
import triton
import triton.language as tl
from torch import Tensor

_PROGRAMS = 264  # number of programs that run at the same time on a large GPU
_POSITIONS = 320  # number of positions whose work takes as long as writing a tile and adding it to others


@triton.jit(do_not_specialize=["examples", "each"])  # a smaller last batch needs no compilation
def _add_squares(  # type: ignore[no-untyped-def]
    windows,
    delta,
    sums,
    examples,
    each,
    outputs,
    inputs,
    strides,
    KERNEL: tl.constexpr,
    POSITIONS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Write one tile ``[OUTPUTS, INPUTS]`` of the sum over ``each`` examples, for one group."""
    tile, group, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    columns = tl.cdiv(inputs, INPUTS)
    o = tile // columns * OUTPUTS + tl.arange(0, OUTPUTS)
    k = tile % columns * INPUTS + tl.arange(0, INPUTS)
    TAPS: tl.constexpr = KERNEL[0] * KERNEL[1] * KERNEL[2]
    ALL: tl.constexpr = POSITIONS[0] * POSITIONS[1] * POSITIONS[2]
    CHUNKS: tl.constexpr = (ALL + CHUNK - 1) // CHUNK
    # Beyond the last row and column, earlier ones are read again, and not written.
    rows = (group * outputs + o % outputs) * ALL
    tap = k % inputs % TAPS
    offsets = (group * (inputs // TAPS) + k % inputs // TAPS) * strides[1]
    offsets += tap // (KERNEL[1] * KERNEL[2]) * strides[2]
    offsets += tap // KERNEL[2] % KERNEL[1] * strides[3] + tap % KERNEL[2] * strides[4]
    total = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    gradient = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    first = split * each
    for i in range(min(each, examples - first) * CHUNKS):
        n = first.to(tl.int64) + i // CHUNKS
        p = i % CHUNKS * CHUNK + tl.arange(0, CHUNK)
        places = p // (POSITIONS[1] * POSITIONS[2]) * strides[5]
        places += p // POSITIONS[2] % POSITIONS[1] * strides[6] + p % POSITIONS[2] * strides[7]
        inside = (p < ALL)[None, :]
        d = tl.load(delta + n * (tl.num_programs(1) * outputs * ALL) + (rows[:, None] + p), inside, 0.0)
        x = tl.load(windows + n * strides[0] + (offsets[:, None] + places), inside, 0.0)
        gradient = tl.dot(d, x.T, gradient, input_precision=PRECISION)
        if i % CHUNKS == CHUNKS - 1:
            total += gradient * gradient
            gradient = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    row = (split * tl.num_programs(1) + group).to(tl.int64) * outputs + o[:, None]
    tl.store(sums + row * inputs + k, total, (o < outputs)[:, None] & (k < inputs))


@torch.library.custom_op("pyro_dvi::convolution_squares", mutates_args=())
def convolution_squares(windows: Tensor, delta: Tensor, groups: int) -> Tensor:
    """Return the sum of squares of per-example gradients of a convolution, as one operator, without a derivative.

    Products are rounded to TF32 where torch's convolutions may do so, with an error of about 0.1 percent in the sum.
    Otherwise, each product is the sum of three, which are as precise as float32 (faster than products in float32).

    Args:
        windows: input at each position, ``[N, channels, *kernel, *positions]``, in float32.
        delta: gradient of the output, ``[N, output channels, *positions]``, in float32.
        groups: number of groups of channels.

    Returns:
        Sum of squares, with the shape of the weight, ``[output channels, channels / groups, *kernel]``.
    """
    kernel = windows.shape[2 : delta.dim()]
    for _ in range(5 - delta.dim()):  # further dimensions, of size 1
        windows, delta = windows.unsqueeze(delta.dim()).unsqueeze(2), delta.unsqueeze(2)
    taps, positions = tuple(windows.shape[2:5]), tuple(windows.shape[5:])
    examples, channels = delta.shape[:2]
    outputs, inputs = channels // groups, windows.shape[1] // groups * prod(taps)
    rows, columns = _tile(outputs, inputs)
    tiles = ceil(outputs / rows) * ceil(inputs / columns)
    each = _examples_each(tiles * groups, examples, prod(positions))
    sums = delta.new_empty(ceil(examples / each), channels, inputs)
    precision, warps = ("tf32", 4) if _rounds_to_tf32() else ("tf32x3", 8)
    with torch.cuda.device_of(delta):
        _add_squares[(tiles, groups, len(sums))](
            windows,
            delta.contiguous(),
            sums,
            examples,
            each,
            outputs,
            inputs,
            windows.stride(),
            taps,
            positions,
            rows,
            columns,
            min(32, _power_of_two(prod(positions))),
            precision,
            num_warps=warps,
            num_stages=3,
        )
    return sums.sum(0).view(channels, -1, *kernel)


@convolution_squares.register_fake
def _(windows: Tensor, delta: Tensor, groups: int) -> Tensor:
    kernel = windows.shape[2 : delta.dim()]
    return delta.new_empty(delta.shape[1], windows.shape[1] // groups, *kernel)


def _power_of_two(size: int) -> int:
    return 1 << (max(size, 16) - 1).bit_length()  # 16 is the least size of a product in Triton


def _tile(outputs: int, inputs: int) -> tuple[int, int]:
    """Return the sizes of a tile, for which a program's sums fit into its registers."""
    rows = min(128, _power_of_two(outputs))
    return rows, min(8192 // rows, 128, _power_of_two(inputs))


@cache
def _examples_each(tiles: int, examples: int, positions: int) -> int:
    """Return the number of examples of a program for which all programs take the least time."""

    def time(each: int) -> int:
        rounds = ceil(tiles * ceil(examples / each) / _PROGRAMS)
        return rounds * (each * positions + _POSITIONS)

    return min(range(examples, 0, -1), key=time)


def _rounds_to_tf32() -> bool:
    """Return whether convolutions may round to TF32."""
    convolutions = getattr(torch.backends.cudnn, "conv", None)  # None before torch 2.9
    return torch.backends.cudnn.allow_tf32 if convolutions is None else convolutions.fp32_precision == "tf32"
