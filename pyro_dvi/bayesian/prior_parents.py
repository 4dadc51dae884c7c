# SPDX-License-Identifier: Apache-2.0
"""Which latent sites the parameters of another site's prior are computed from."""

from typing import Any

from pyro.poutine.messenger import Messenger
from torch import Tensor

from pyro_dvi.autograd_graph import enters

__all__ = ["PriorParents"]


class PriorParents(Messenger):
    """Remember the latent values of a run, so that tensors computed from them can be traced back.

    Status: follows gradients, so a parent that is discrete, or detached by the model, is not seen.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> with PriorParents() as parents:
        ...     scale = pyro.sample("s", dist.LogNormal(0.0, 1.0))
        >>> parents.of(2 * scale), parents.of(torch.ones(()))
        (('s',), ())
    """

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[str, Tensor] = {}

    def _pyro_post_sample(self, msg: Any) -> None:
        value = msg["value"]
        if msg["is_observed"] or not isinstance(value, Tensor) or not value.is_floating_point():
            return
        # Cut off from its own parents, so that only the nearest are found; a copy may be written in place.
        leaf = value.detach().requires_grad_()
        self._values[msg["name"]] = leaf
        msg["value"] = leaf.clone()

    def of(self, value: Tensor) -> tuple[str, ...]:
        """Return the sites that ``value`` was computed from, in the order of the run."""
        parents = enters(list(self._values.values()), [value])
        return tuple(name for name, is_parent in zip(self._values, parents, strict=True) if is_parent)
