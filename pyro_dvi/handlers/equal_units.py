# SPDX-License-Identifier: Apache-2.0
"""Leave a start at which the hidden units of a network are all alike."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import DviWarning

__all__ = ["Starts", "equal_units", "start_apart"]

# Site, its means in the storage of their parameter, weights of the network.
Starts = list[tuple[str, Tensor, Tensor]]


def equal_units(latents: Iterable[Any], log_likelihood: Tensor) -> Starts:
    """Find means at zero where they leave hidden units alike, though the network has weights to start from.

    Where all weights are zero, the likelihood has no gradient in those of hidden layers, and one and the same in all
    that leave a hidden layer: no step of training tells the units apart. Linear models have nothing hidden.
    """
    zero = [latent for latent in latents if _stands_at_zero(latent)]
    if zero and log_likelihood.requires_grad:
        values = [latent.value for latent in zero]
        grads = torch.autograd.grad(log_likelihood, values, allow_unused=True, retain_graph=True)
        if any(grad is not None and not grad.any() for grad in grads):
            return [(latent.name, latent.loc.detach(), latent.prior.initial_value) for latent in zero]
    return []


def _stands_at_zero(latent: Any) -> bool:
    """Whether a latent could start from a weight of its network, and starts at zero."""
    known = getattr(latent.prior, "initial_value", None) is not None and latent.transform is None
    trained = latent.source is not None and latent.loc.requires_grad and latent.value.requires_grad
    return known and trained and not latent.loc.any()


def start_apart(starts: Starts) -> None:
    """Start from the weights of the network, unless the means have been moved since; says so."""
    if starts and not any(mean.any() for _, mean, _ in starts):
        for _, mean, initial in starts:
            mean.copy_(initial)
        warnings.warn(
            f"the guide starts with all means at zero (site {starts[0][0]!r} and {len(starts) - 1} more), where hidden "
            "units are alike and training hardly tells them apart. They now start from the weights that the network "
            "had: as AutoNormal(model, init_loc_fn=pyro_dvi.init_to_module) says beforehand.",
            DviWarning,
            stacklevel=2,
        )
