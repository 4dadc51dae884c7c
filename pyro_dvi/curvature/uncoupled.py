# SPDX-License-Identifier: Apache-2.0
"""Batch normalisation with the statistics of its minibatch as constants, so that examples do not see each other."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["ConstantStatistics"]


class ConstantStatistics(TorchFunctionMode):
    """Let no gradient pass through the statistics of batch normalisation in training mode.

    Values are those of the plain function; running statistics stay as they are.

    Example:
        >>> x = torch.tensor([[1.0], [3.0]], requires_grad=True)
        >>> with ConstantStatistics():
        ...     y = F.batch_norm(x, None, None, training=True)
        >>> torch.autograd.grad(y[0, 0], x)[0][1]
        tensor([0.])
    """

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.batch_norm:
            return _of_module(*args, **kwargs)
        return _of_torch(*args, **kwargs) if func is torch.batch_norm else func(*args, **kwargs)


def _of_module(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    if training:
        dims = [k for k in range(input.dim()) if k != 1]
        like = input if weight is None else weight  # which is wider than the input under autocast
        running_var, running_mean = torch.var_mean(input.detach().to(like.dtype), dims, correction=0)
    return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)


def _of_torch(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    return _of_module(input, running_mean, running_var, weight, bias, training, momentum, eps)
