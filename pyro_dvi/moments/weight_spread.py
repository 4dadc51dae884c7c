# SPDX-License-Identifier: Apache-2.0
r"""What the noise of one layer's weights adds to the variance of an output, given the output's slope in the layer.

Let a layer compute :math:`y_{po} = \sum_i x_{pi} w_{oi}` at positions p, and let an output of the network have the
slopes :math:`\delta_{po}` in y. Noise of the weights, and of the inputs that the weights multiply, then adds

.. math::
    \sum_{oi} \Bigl(\sum_p \delta_{po} \bar x_{pi}\Bigr)^2 \mathrm{Var}[w_{oi}]
        + \sum_{poi} \delta_{po}^2 \mathrm{Var}[x_{pi}] \mathrm{Var}[w_{oi}].

The inner sum is the gradient of the output in the weight for one example: positions that share a weight add up before
the square, which variances that flow forward cannot know.

A rule is a function with the signature of the torch function and a keyword ``examples``, the dimension of y that counts
examples. It meets a weight as :class:`Weight` and inputs as moments or tensors, and returns a function from slopes (of
the shape of y) to variances ``[B]``, or None if the weight is used in a way that it does not know.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments.rules import rule_for
from pyro_dvi.moments.value import loc_of, second_moment_of, variance_of
from pyro_dvi.registry import registering

__all__ = ["Spread", "Weight", "spread_rule", "spread_rule_for"]

Spread = Callable[[Tensor], Tensor]
_RULES: dict[Callable, Callable[..., Spread | None]] = {}
_BUDGET = 2**24  # elements of per-example gradients at a time


@dataclass(frozen=True)
class Weight:
    """Mean and variance of a latent weight."""

    loc: Tensor
    variance: Tensor

    @property
    def shape(self) -> torch.Size:
        """That of the mean."""
        return self.loc.shape


def spread_rule(*functions: Callable) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the spread of weights in torch ``functions``, under any of their spellings."""
    return registering(_RULES, functions)


def spread_rule_for(func: Callable) -> Callable[..., Spread | None] | None:
    """Return the rule for ``func`` however it is spelled (``x @ w`` is torch.matmul), or None."""
    moments = rule_for(func)
    for function, rule in _RULES.items():
        if function is func or rule_for(function) is moments:
            return rule
    return None


# Matrix products -----------------------------------------------------------------------------------------------


@spread_rule(F.linear)
def linear(input: Any, weight: Any, bias: Any = None, *, examples: int) -> Spread | None:
    """Weights ``[out, in]`` that positions may share, and their biases."""
    if isinstance(input, Weight) or not 0 <= examples < input.dim() - 1:
        return None
    if input.dim() == 2:
        terms = []
        if isinstance(weight, Weight):
            terms.append(F.linear(second_moment_of(input), weight.variance))
        if isinstance(bias, Weight):
            terms.append(bias.variance)
        return lambda delta: (delta.square() * sum(terms)).sum(1)
    loc, uncertain = _rows(loc_of(input), examples), variance_of(input)
    variance = None if uncertain is None else _rows(uncertain, examples)

    def spread(delta: Tensor) -> Tensor:
        delta = _rows(delta, examples)
        total = delta.new_zeros(len(delta))
        if isinstance(weight, Weight):
            total += _shared_weight(delta, loc, variance, weight)
        if isinstance(bias, Weight):
            total += delta.sum(1).square() @ bias.variance
        return total

    return spread


@spread_rule(torch.matmul, torch.mm, torch.mv)
def matmul(input: Any, other: Any, *, examples: int) -> Spread | None:
    """Products ``x @ w`` with a matrix or vector of weights, or a stack of matrices, as one for each head."""
    if isinstance(input, Weight):
        return None
    if len(other.shape) > 2:
        return _stacked(input, other, examples)
    if other.loc.dim() == 2:
        return linear(input, Weight(other.loc.mT, other.variance.mT), examples=examples)
    as_matrix = linear(input, Weight(other.loc[None], other.variance[None]), examples=examples)
    return None if as_matrix is None else lambda delta: as_matrix(delta[..., None])


def _stacked(input: Any, weight: Weight, examples: int) -> Spread | None:
    """Spread of weights ``[*stack, in, out]`` in products with inputs ``[B, *stack, positions, in]``."""
    if examples != 0 or input.shape[1:-2] != weight.shape[:-2]:
        return None
    loc, variance, flat = loc_of(input), variance_of(input), weight.variance.flatten()
    noise = None if variance is None else variance @ weight.variance

    def spread(delta: Tensor) -> Tensor:
        parts = []
        for rows in _portions(len(delta), flat.numel()):
            gradient = loc[rows].mT @ delta[rows]
            parts.append(gradient.square_().flatten(1) @ flat)
        total = torch.cat(parts)
        if noise is not None:
            total += (delta.square() * noise).flatten(1).sum(1)
        return total

    return spread


@spread_rule(torch.addmm)
def addmm(
    input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1, examples: int
) -> Spread | None:
    """A product and a bias."""
    if isinstance(mat1, Weight) or examples != 0:
        return None
    product = matmul(mat1, mat2, examples=0) if isinstance(mat2, Weight) else _nothing
    bias = _scaled(input, 1.0, None, 2, examples) if isinstance(input, Weight) else _nothing
    if product is None or bias is None:
        return None
    return lambda delta: product(alpha * delta) + bias(beta * delta)


def _rows(x: Tensor, examples: int) -> Tensor:
    """Examples first, then all positions, then features."""
    x = x.movedim(examples, 0)
    return x.reshape(len(x), -1, x.shape[-1])


def _shared_weight(delta: Tensor, x: Tensor, variance: Tensor | None, weight: Weight) -> Tensor:
    """Spread of weights ``[out, in]`` for slopes ``[B, positions, out]`` and inputs ``[B, positions, in]``."""
    flat, total = weight.variance.flatten(), []
    for rows in _portions(len(delta), flat.numel()):
        gradient = torch.bmm(delta[rows].mT, x[rows])
        total.append(gradient.square_().flatten(1) @ flat)
    result = torch.cat(total)
    if variance is not None:
        result += (delta.square() * F.linear(variance, weight.variance)).sum((1, 2))
    return result


def _portions(num_examples: int, size: int) -> list[slice]:
    """Split examples so that ``size`` numbers for each fit into the budget."""
    step = max(1, _BUDGET // max(size, 1))
    return [slice(start, start + step) for start in range(0, num_examples, step)]


# Convolutions ---------------------------------------------------------------------------------------------------


@spread_rule(F.conv1d, F.conv2d, F.conv3d)
def convolution(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    examples: int,
) -> Spread | None:
    """Kernels of any stride, padding, dilation and number of groups."""
    if isinstance(input, Weight) or examples != 0 or input.dim() != len(weight.shape):
        return None
    if not isinstance(weight, Weight):
        return lambda delta: delta.flatten(2).sum(2).square() @ bias.variance
    layout = _layout(weight.shape[2:], stride, padding, dilation)
    loc, variance = loc_of(input), variance_of(input)
    flat, per_kernel = weight.variance.flatten(), weight.shape[1:].numel()
    noise = None
    if variance is not None:
        function = (F.conv1d, F.conv2d, F.conv3d)[len(layout[0]) - 1]
        noise = function(variance, weight.variance, None, stride, padding, dilation, groups).flatten(2)

    def spread(delta: Tensor) -> Tensor:
        delta = delta.flatten(2)
        positions = delta.shape[2]
        parts = []
        for rows in _portions(len(delta), max(flat.numel(), groups * per_kernel * positions)):
            windows = _windows(loc[rows], *layout).reshape(-1, groups, per_kernel, positions)
            gradient = delta[rows].unflatten(1, (groups, -1)) @ windows.mT
            parts.append(gradient.square_().flatten(1) @ flat)
        total = torch.cat(parts)
        if noise is not None:
            total += (delta.square() * noise).sum((1, 2))
        if isinstance(bias, Weight):
            total += delta.sum(2).square() @ bias.variance
        return total

    return spread


def _layout(kernel: Sequence[int], stride: Any, padding: Any, dilation: Any) -> tuple[list[int], ...]:
    n = len(kernel)
    strides, dilations = _per_dimension(stride, n), _per_dimension(dilation, n)
    before = after = [0] * n
    if padding == "same":
        missing = [d * (k - 1) for d, k in zip(dilations, kernel, strict=True)]
        before = [m // 2 for m in missing]
        after = [m - b for m, b in zip(missing, before, strict=True)]
    elif padding != "valid":
        before = after = _per_dimension(padding, n)
    return list(kernel), strides, dilations, before, after


def _windows(
    x: Tensor,
    kernel: list[int],
    strides: list[int],
    dilations: list[int],
    before: list[int],
    after: list[int],
) -> Tensor:
    """What each position of a convolution sees: ``[B, channels, *kernel, *positions]``."""
    n = len(kernel)
    x = F.pad(x, [p for pair in reversed(list(zip(before, after, strict=True))) for p in pair])
    for k in range(n):
        x = x.unfold(2 + k, dilations[k] * (kernel[k] - 1) + 1, strides[k])[..., :: dilations[k]]
    return x.permute(0, 1, *range(2 + n, 2 + 2 * n), *range(2, 2 + n))


def _per_dimension(value: Any, n: int) -> list[int]:
    values = [value] if isinstance(value, int) else list(value)
    return values * n if len(values) == 1 else values


# Scaling and shift ----------------------------------------------------------------------------------------------


@spread_rule(torch.add)
def add(input: Any, other: Any, *, alpha: float = 1, examples: int) -> Spread | None:
    """A bias that is broadcast over the examples."""
    if isinstance(input, Weight):
        return None if isinstance(other, Weight) else _scaled(input, 1.0, None, _dims(other), examples)
    bias = _scaled(other, 1.0, None, _dims(input), examples)
    return None if bias is None else lambda delta: bias(alpha * delta)


@spread_rule(torch.sub)
def sub(input: Any, other: Any, *, alpha: float = 1, examples: int) -> Spread | None:
    """Likewise."""
    return add(input, other, alpha=-alpha, examples=examples)


@spread_rule(torch.mul)
def mul(input: Any, other: Any, *, examples: int) -> Spread | None:
    """A factor that is broadcast over the examples."""
    weight, x = (input, other) if isinstance(input, Weight) else (other, input)
    return None if isinstance(x, Weight) else _scaled(weight, loc_of(x), variance_of(x), _dims(x), examples)


@spread_rule(F.batch_norm)
def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *,
    examples: int,
) -> Spread | None:
    """Weights and biases of channels, with running statistics."""
    if training or examples != 0:
        return None
    x = F.batch_norm(input, running_mean, running_var, None, None, False, momentum, eps)
    return _affine(x, _channels(weight, x.dim()), _channels(bias, x.dim()), examples)


@spread_rule(F.group_norm)
def group_norm(
    input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *, examples: int
) -> Spread | None:
    """Weights and biases of channels."""
    if examples != 0:
        return None
    x = F.group_norm(input, num_groups, None, None, eps)
    return _affine(x, _channels(weight, x.dim()), _channels(bias, x.dim()), examples)


@spread_rule(F.layer_norm)
def layer_norm(
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    examples: int,
) -> Spread | None:
    """Weights and biases of features."""
    return _affine(F.layer_norm(input, normalized_shape, None, None, eps), weight, bias, examples)


def _channels(weight: Any, dims: int) -> Any:
    if not isinstance(weight, Weight):
        return weight
    shape = (-1, *[1] * (dims - 2))
    return Weight(weight.loc.reshape(shape), weight.variance.reshape(shape))


def _affine(x: Any, weight: Any, bias: Any, examples: int) -> Spread | None:
    dims = x.dim()
    factor = (
        _scaled(weight, loc_of(x), variance_of(x), dims, examples) if isinstance(weight, Weight) else _nothing
    )
    shift = _scaled(bias, 1.0, None, dims, examples) if isinstance(bias, Weight) else _nothing
    if factor is None or shift is None:
        return None
    return lambda delta: factor(delta) + shift(delta)


def _nothing(delta: Tensor) -> Tensor:
    return delta.new_zeros(())


def _dims(x: Any) -> int:
    return 0 if isinstance(x, int | float) else int(x.dim())


def _scaled(weight: Weight, x: Any, variance: Tensor | None, dims: int, examples: int) -> Spread | None:
    """Spread of a weight that multiplies x of ``dims`` dimensions, broadcast over examples and maybe positions."""
    shape = [1] * (dims - weight.loc.dim()) + list(weight.shape)
    if shape[examples] != 1:  # each example has weights of its own
        return None
    spreads = weight.variance.reshape(shape)
    shared = [d for d in range(len(shape)) if shape[d] == 1 and d != examples]

    def spread(delta: Tensor) -> Tensor:
        gradient = (delta * x).sum(shared, keepdim=True) if shared else delta * x
        total = (gradient.square() * spreads).movedim(examples, 0).reshape(delta.shape[examples], -1).sum(1)
        if variance is not None:
            noise = (delta.square() * variance * spreads).movedim(examples, 0)
            total = total + noise.reshape(len(noise), -1).sum(1)
        return total

    return spread


# Tables -----------------------------------------------------------------------------------------------------------


@spread_rule(F.embedding)
def embedding(input: Tensor, weight: Any, *options: Any, examples: int, **more: Any) -> Spread | None:
    r"""Rows of a table. A row that occurs twice in an example is the same row both times.

    .. math:: \sum_t \delta_t \sum_{t'} [i_t = i_{t'}] \delta_{t'} \mathrm{Var}[w_{i_t}]
    """
    if isinstance(input, Weight) or examples >= input.dim():
        return None
    tokens = input.movedim(examples, 0).flatten(1) if input.dim() > 1 else input[:, None]
    variance = weight.variance[tokens]

    def spread(delta: Tensor) -> Tensor:
        delta = delta.movedim(examples, 0).reshape(*tokens.shape, -1)
        same = (tokens[:, :, None] == tokens[:, None, :]).to(delta.dtype)
        return (delta * torch.bmm(same, delta) * variance).flatten(1).sum(1)

    return spread
