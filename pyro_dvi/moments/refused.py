# SPDX-License-Identifier: Apache-2.0
"""Functions that need a deterministic value or have misleading moments; each raises an error that states a remedy."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.nn.functional as F

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.rules import functions_of, moment_rule
from pyro_dvi.moments.tensor_like import name_of


def _refusing(function: Callable, instead: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(f"{name_of(function)} of moments is not supported. {instead}.")

    refuse.__doc__ = f"Refuse ``{function.__name__}``."
    return refuse


_WITH_INDICES = [f"{kind}max_pool{dims}d_with_indices" for kind in ("", "adaptive_") for dims in (1, 2, 3)]
_REMEDIES: dict[str, list[Callable]] = {
    "A comparison of uncertain values gives a probability instead of True or False. Compare x.loc to decide by the "
    "mean (as in torch.where(x.loc > 0, x, y)), or use the activation function that the comparison implements": (
        functions_of(
            torch,
            "eq ne not_equal gt ge greater greater_equal lt le less less_equal isclose allclose equal bitwise_not "
            "logical_not",
        )
        + functions_of(torch.Tensor, "__eq__ __ne__ __gt__ __ge__ __lt__ __le__")
    ),
    "The index of the largest element is itself uncertain. Choose by the mean (x.loc.argmax(-1), then x.gather). For "
    "the element with the largest mean, use x.amax(-1) or pooling without indices; for a smooth maximum, use "
    "torch.logsumexp or softmax": functions_of(
        torch,
        "aminmax argmax argmin cummax cummin topk sort argsort kthvalue median quantile mode nonzero unique bernoulli "
        "multinomial max_pool1d_with_indices",
    )
    + functions_of(F, " ".join(_WITH_INDICES)),
    "The variance over elements is a sum of squares of correlated differences. Use F.layer_norm, F.batch_norm or "
    "F.group_norm, which have rules, or ((x - x.loc.mean()) ** 2).mean()": functions_of(
        torch, "var std var_mean std_mean"
    ),
    "The loss of uncertain values is an expectation, which the ELBO computes from observed sites. Write "
    "pyro.sample('obs', dist.Categorical(logits=logits), obs=y) in the model, or take the loss of x.loc": [
        *functions_of(
            F,
            "cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits mse_loss l1_loss "
            "smooth_l1_loss huber_loss gaussian_nll_loss poisson_nll_loss kl_div",
        ),
        torch.Tensor.backward,
    ],
    "Step functions have no rule: round x.loc, or remove the function from the model": (
        functions_of(torch, "sign sgn round floor ceil trunc frac fmod remainder floor_divide heaviside")
        + functions_of(torch.Tensor, "__mod__ __rmod__ __floordiv__ __rfloordiv__")
    ),
    "Sampling is not needed with moments: use F.softmax": [F.gumbel_softmax],
    "Write F.embedding(indices, weight) with a sum or mean over the bag": [F.embedding_bag],
    "Call the function of the same name in torch.nn.functional": functions_of(
        torch, "batch_norm instance_norm"
    ),
}
for _instead, _functions in _REMEDIES.items():
    for _function in dict.fromkeys(_functions):
        moment_rule(_function)(_refusing(_function, _instead))
