# SPDX-License-Identifier: Apache-2.0
"""Functions that need a value, or whose moments nobody should trust: what to write instead."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import functions_of, moment_rule
from pyro_dvi.moments.tensor_like import name_of

_COMPARISONS = "eq ne not_equal isclose allclose equal bitwise_not logical_not"
_CHOICES = (
    "aminmax argmax argmin cummax cummin topk sort argsort kthvalue median quantile mode nonzero unique bernoulli "
    "multinomial"
)
_POOLS = "max_pool1d max_pool2d max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d"
_SPREADS = "var std var_mean std_mean"
_ROUNDINGS = "sign sgn round floor ceil trunc frac fmod remainder floor_divide heaviside"
_LOSSES = (
    "cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss "
    "huber_loss gaussian_nll_loss poisson_nll_loss kl_div"
)

_INSTEAD = {
    "comparison": "A comparison of something uncertain has no answer, only a probability. Compare x.loc if the mean "
    "may decide (as in torch.where(x.loc > 0, x, y)), or use the activation that the comparison spells out",
    "choice": "Which element is largest is itself uncertain. Choose by the mean (x.loc.argmax(-1), then x.gather), use "
    "x.amax(-1) or pooling without indices for the element with the largest mean, and torch.logsumexp or softmax for a "
    "smooth maximum",
    "spread": "The variance over elements is a sum of squares of correlated differences. Use F.layer_norm, "
    "F.batch_norm or F.group_norm, which have rules, or ((x - x.loc.mean()) ** 2).mean()",
    "loss": "A loss of something uncertain is its expectation over the Gaussian, not its value at one place: let the "
    "model sample the data (pyro.sample('obs', dist.Categorical(logits=logits), obs=y)), or take the loss of x.loc",
    "rounding": "Steps have no rule: round x.loc, or leave the function out of the model",
}


def refused(function: Callable, instead: str) -> Callable[..., NoReturn]:
    """Return a rule that refuses, and says what to write instead."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name_of(function)} of moments is refused. {instead}.")

    refuse.__doc__ = f"Refuse ``{function.__name__}``."
    return refuse


for _reason, _functions in {
    "comparison": [
        *functions_of(torch, _COMPARISONS),
        *functions_of(torch.Tensor, "__eq__ __ne__"),
    ],
    "choice": [
        *functions_of(torch, f"{_CHOICES} max_pool1d_with_indices"),
        *functions_of(F, " ".join(f"{name}_with_indices" for name in _POOLS.split())),
    ],
    "spread": functions_of(torch, _SPREADS),
    "loss": [*functions_of(F, _LOSSES), torch.Tensor.backward],
    "rounding": [
        *functions_of(torch, _ROUNDINGS),
        *functions_of(torch.Tensor, "__mod__ __rmod__ __floordiv__ __rfloordiv__"),
    ],
}.items():
    for _function in dict.fromkeys(_functions):
        moment_rule(_function)(refused(_function, _INSTEAD[_reason]))
