# SPDX-License-Identifier: Apache-2.0
r"""Per-example gradients of convolutions, :math:`g_i = \sum_l \delta_{il} x_{i,l+k}`, over positions l.

For the transposed convolution, x and :math:`\delta` exchange their roles. On a GPU, squares in float32 are computed by
a Triton kernel; see :mod:`~pyro_dvi.curvature.per_example.convolution_kernel`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.core.elementwise import triton_kernel
from pyro_dvi.curvature.per_example.broadcasting import over_positions
from pyro_dvi.curvature.per_example.example_rules import Contribution, Outer, per_example_rule, summed_squares

Size = int | Sequence[int]
KERNEL = "pyro_dvi.curvature.per_example.convolution_kernel:convolution_squares"


@dataclass(frozen=True)
class _Layer:
    """A convolution from ``x`` to ``delta``: the shape of its weight, and its options for each dimension."""

    shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    def gradients(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return per-example gradients ``[M, *shape]``."""
        inputs = self._by_group(self._patches(x, delta.shape[2:])).mT
        return (self._by_group(delta.flatten(2)) @ inputs).reshape(len(x), *self.shape)

    def squares(self, x: Tensor, delta: Tensor) -> Tensor:
        """Return the sum of squares of per-example gradients."""
        kernel = None
        if x.is_cuda and x.dtype == torch.float32:
            kernel = triton_kernel(KERNEL, x.device, lambda found: _checked(found, x.device))
        if kernel is not None:
            return kernel(self._windows(x.contiguous(), delta.shape[2:]), delta, self.groups)
        left = self._by_group(delta.flatten(2))
        shape = torch.Size((*left.shape[1:-1], self.shape[1:].numel()))

        def inputs(windows: Tensor) -> Tensor:
            return self._by_group(windows.reshape(len(windows), -1, left.shape[-1])).mT

        return summed_squares(left, self._windows(x, delta.shape[2:]), inputs, shape).view(self.shape)

    def _by_group(self, x: Tensor) -> Tensor:
        """Return ``[M, channels, positions]`` as ``[M, groups, channels / groups, positions]`` if there are groups."""
        return x if self.groups == 1 else x.unflatten(1, (self.groups, -1))

    def patches_of(self, x: Tensor) -> Tensor:
        """Return the input of each position of the output, ``[M, channels * kernel, positions]``."""
        sizes = zip(x.shape[2:], self.padding, self.dilation, self.shape[2:], self.stride, strict=True)
        positions = torch.Size((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes)
        return self._patches(x, positions)

    def _patches(self, x: Tensor, positions: torch.Size) -> Tensor:
        """Return the input of each of these positions, ``[M, channels * kernel, positions]``."""
        if x.requires_grad and len(positions) == 2:  # slower, but its derivative is faster
            return F.unfold(x, tuple(self.shape[2:]), self.dilation, self.padding, self.stride)
        # A view that is copied by rows is several times faster than F.unfold.
        return self._windows(x, positions).reshape(len(x), -1, positions.numel())

    def _windows(self, x: Tensor, positions: torch.Size) -> Tensor:
        """Return the input of each of these positions as a view, ``[M, channels, *kernel, *positions]``."""
        if any(self.padding):
            x = F.pad(x, [p for size in reversed(self.padding) for p in (size, size)])
        batch, channel, *strides = x.stride()
        offsets = [stride * d for stride, d in zip(strides, self.dilation, strict=True)]
        steps = [stride * s for stride, s in zip(strides, self.stride, strict=True)]
        shape = (*x.shape[:2], *self.shape[2:], *positions)
        return x.as_strided(shape, (batch, channel, *offsets, *steps), x.storage_offset())


def _checked(kernel: Callable[[Tensor, Tensor, int], Tensor], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return sums of squares of a kernel, in a tile of large layers, and of torch functions."""
    x, delta = torch.linspace(-3, 4, 2 * 3 * 128 * 32, device=device).sin().view(2, 3, 128, 32)
    return kernel(x.unsqueeze(2), delta, 1).squeeze(-1), (delta @ x.mT).square().sum(0)


def per_dimension(value: Size, n: int) -> tuple[int, ...]:
    """Return an option of a convolution for each of n dimensions."""
    return (value,) * n if isinstance(value, int) else tuple(value) * (n if len(value) == 1 else 1)


@per_example_rule(F.conv1d, F.conv2d, F.conv3d)
def _convolution(
    wanted: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size | str = 0,
    dilation: Size = 1,
    groups: int = 1,
) -> Contribution | None:
    n = weight.dim() - 2
    if input.dim() != weight.dim() or wanted == "input":  # a single image
        return None
    if wanted == "bias":
        outer = Outer(lambda x: x.new_ones(len(x), 1, 1), lambda delta: over_positions(delta)[:, None])
        return Contribution(lambda delta, x: over_positions(delta), (input,), outer=outer)
    stride, dilation = per_dimension(stride, n), per_dimension(dilation, n)
    sides: list[int] = []
    if padding == "same":
        totals = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        sides = [side for total in reversed(totals) for side in (total // 2, total - total // 2)]
    around = (0,) * n if isinstance(padding, str) else per_dimension(padding, n)
    layer = _Layer(weight.shape, stride, around, dilation, groups)

    def padded(x: Tensor) -> Tensor:
        return F.pad(x, sides) if sides else x

    outer = Outer(lambda x: layer.patches_of(padded(x)).mT, lambda delta: delta.flatten(2).mT)
    return Contribution(
        lambda delta, x: layer.gradients(padded(x), delta),
        (input,),
        lambda delta, x: layer.squares(padded(x), delta),
        outer if groups == 1 else None,
    )


@per_example_rule(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
def _transposed(
    wanted: str,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Size = 1,
    padding: Size = 0,
    output_padding: Size = 0,
    groups: int = 1,
    dilation: Size = 1,
) -> Contribution | None:
    n = weight.dim() - 2
    if input.dim() != weight.dim() or wanted == "input":
        return None
    if wanted == "bias":
        return Contribution(over_positions)
    # The padding of a transposed convolution crops its output: restore the edges.
    ends = zip(per_dimension(padding, n), per_dimension(output_padding, n), strict=True)
    sides = [side for size, extra in reversed(list(ends)) for side in (size, size - extra)]
    layer = _Layer(weight.shape, per_dimension(stride, n), (0,) * n, per_dimension(dilation, n), groups)
    return Contribution(
        lambda delta, x: layer.gradients(F.pad(delta, sides), x),
        (input,),
        lambda delta, x: layer.squares(F.pad(delta, sides), x),
    )
