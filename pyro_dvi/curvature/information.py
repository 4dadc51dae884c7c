# SPDX-License-Identifier: Apache-2.0
r"""Expected Fisher information of a likelihood's own parameters, in factored form.

For a distribution p(y | f(u)) the expected Fisher information in u is :math:`\sum_k (w_k\,\partial_u f_k)^2` summed
over a few scalar parameters :math:`f_k` with weights :math:`w_k`. Each rule returns the pairs :math:`(f, w)` with shape
``[*batch_shape, K]``. Distributions with finite support need no rule: there
:math:`f_k = \log p(k)` and :math:`w_k = \sqrt{p(k)}`.

Adding a rule: register a function for the distribution class with :func:`information_rule`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.registry import registering

__all__ = ["expected_information", "information_rule"]

Pairs = list[tuple[Tensor, Tensor]]
_RULES: dict[type, Callable[..., Pairs]] = {}


def information_rule(*classes: type) -> Callable[[Callable[..., Pairs]], Callable[..., Pairs]]:
    """Register the expected information of distribution ``classes`` (subclasses included)."""
    return registering(_RULES, classes)


def expected_information(fn: td.Distribution, site: str) -> Pairs:
    r"""Return pairs (f, w) of shape ``[*batch_shape, K]`` with information :math:`\sum_k (w_k \partial f_k)^2`.

    Args:
        fn: the observed site's distribution.
        site: its name, for the error message.

    Raises:
        UnsupportedError: there is no closed form for this distribution.

    Example:
        >>> f = torch.zeros(3, requires_grad=True)
        >>> (loc, weight), _ = expected_information(td.Normal(f, 0.5), "y")
        >>> weight.squeeze(-1)
        tensor([2., 2., 2.])
    """
    base: Any = fn
    masks = []
    while hasattr(base, "base_dist") and (
        hasattr(base, "reinterpreted_batch_ndims") or hasattr(base, "_mask")
    ):
        if hasattr(base, "_mask") and base._mask is not True:
            masks.append(torch.as_tensor(base._mask).expand(base.batch_shape))
        base = base.base_dist
    for cls in type(base).__mro__:
        if cls in _RULES:
            pairs = _RULES[cls](base)
            break
    else:
        if not base.has_enumerate_support:
            raise UnsupportedError(
                f"GGN has no closed-form Fisher information for {type(base).__name__} at site {site!r}. Use "
                "TaylorELBO(curvature=Fisher()), which draws labels instead, or register one with "
                "pyro_dvi.curvature.information.information_rule."
            )
        pairs = _finite_support(base)
    shape = fn.batch_shape
    for mask in masks:  # one set below to_event has more dimensions than one above it
        keep = mask[(...,) + (None,) * (len(base.batch_shape) - mask.dim())]
        pairs = [(f, w * keep[(...,) + (None,) * (f.dim() - keep.dim())].to(w.device)) for f, w in pairs]
    pairs = [(f.reshape(*shape, -1), w.expand_as(f).reshape(*shape, -1)) for f, w in pairs]
    return pairs


def _finite_support(fn: td.Distribution) -> Pairs:
    log_prob = fn.log_prob(fn.enumerate_support(expand=False)).movedim(0, -1)
    return [(log_prob, (0.5 * log_prob).exp())]


@information_rule(td.Normal)
def _normal(fn: td.Normal) -> Pairs:
    return [(fn.loc, 1 / fn.scale), (fn.scale, 2**0.5 / fn.scale)]


@information_rule(td.Laplace)
def _laplace(fn: td.Laplace) -> Pairs:
    return [(fn.loc, 1 / fn.scale), (fn.scale, 1 / fn.scale)]


@information_rule(td.StudentT)
def _student_t(fn: td.StudentT) -> Pairs:
    # Lange, Little & Taylor (1989). The degrees of freedom must be fixed: their information has cross terms.
    if fn.df.requires_grad:
        raise UnsupportedError(
            "GGN needs fixed degrees of freedom in StudentT; use Fisher() for learned ones"
        )
    root = (fn.df + 3).rsqrt() / fn.scale
    return [(fn.loc, (fn.df + 1).sqrt() * root), (fn.scale, (2 * fn.df).sqrt() * root)]


@information_rule(td.Poisson)
def _poisson(fn: td.Poisson) -> Pairs:
    return [(fn.rate, fn.rate.rsqrt())]


@information_rule(td.Exponential)
def _exponential(fn: td.Exponential) -> Pairs:
    return [(fn.rate, 1 / fn.rate)]
