# SPDX-License-Identifier: Apache-2.0
"""Start guides from the weights that a module had before it became Bayesian."""

from collections.abc import Callable
from typing import Any

from pyro.infer.autoguide.initialization import init_to_median
from torch import Tensor

__all__ = ["init_to_module"]


def init_to_module(
    site: dict[str, Any] | None = None, *, fallback: Callable[[dict[str, Any]], Tensor] = init_to_median
) -> Any:
    """Start a latent from the module's own, for instance pretrained, weight.

    An initialisation strategy for any of Pyro's automatic guides. ``to_bayesian_`` puts the weight on the
    prior as ``initial_value``; sites without one (a noise scale, a latent of your own) start from
    ``fallback``.

    Args:
        site: the message of a sample statement, as Pyro passes it. Without it, the strategy is returned with
            ``fallback`` filled in.
        fallback: the strategy for sites without a weight of their own; the median of the prior by default.

    Returns:
        A tensor of the site's shape, in constrained space and apart from the module's own storage.

    Example:
        >>> import torch
        >>> from pyro.infer.autoguide import AutoNormal
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = torch.nn.Linear(3, 1)
        >>> weight = net.weight.detach().clone()
        >>> guide = AutoNormal(to_bayesian_(net), init_loc_fn=init_to_module)
        >>> _ = guide(torch.ones(1, 3))
        >>> torch.equal(guide.median()["weight"], weight)
        True
    """
    if site is None:
        return _Strategy(fallback)
    value = getattr(site["fn"], "initial_value", None)
    if value is None:
        return fallback(site)
    # Pyro's guides train the tensor that they are given: without a copy they would train the module's buffer.
    return value.detach().clone()


class _Strategy:
    """:func:`init_to_module` with another fallback; a class, so that guides that hold it can be pickled."""

    def __init__(self, fallback: Callable[[dict[str, Any]], Tensor]) -> None:
        self.fallback = fallback

    def __call__(self, site: dict[str, Any]) -> Any:
        return init_to_module(site, fallback=self.fallback)
