# SPDX-License-Identifier: Apache-2.0
"""Leave a start at which the hidden units of a network are all alike."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import warn

# Site, its means in the storage of their parameter, weights of the network if it keeps any.
Starts = list[tuple[str, Tensor, Tensor | None]]


def equal_units(latents: Iterable[Any], log_likelihood: Tensor) -> Starts:
    """Find means at zero where they leave hidden units alike.

    Where all weights are zero, the likelihood has no gradient in those of hidden layers, and one and the same in all
    that leave a hidden layer: no step of training tells the units apart. Linear models have nothing hidden.
    """
    zero = [latent for latent in latents if _stands_at_zero(latent)]
    if zero and log_likelihood.requires_grad:
        initial = [getattr(latent.prior, "initial_value", None) for latent in zero]
        values = [latent.value for latent in zero]
        grads = torch.autograd.grad(log_likelihood, values, allow_unused=True, retain_graph=True)
        # Of latents that nothing says to be weights, only matrices are taken for them: numbers and vectors without a
        # gradient are common in hierarchical models, and harmless.
        if any(
            g is not None and not g.any() and (start is not None or g.dim() > 1)
            for g, start in zip(grads, initial, strict=True)
        ):
            return [(a.name, a.loc.detach(), start) for a, start in zip(zero, initial, strict=True)]
    return []


def _stands_at_zero(latent: Any) -> bool:
    """Whether training would move the mean of a latent, unconstrained, from zero."""
    trained = latent.source is not None and latent.loc.requires_grad and latent.value.requires_grad
    return trained and latent.transform is None and not latent.loc.any()


def start_apart(starts: Starts) -> None:
    """Start from the weights of the network, unless the means have been moved since, or there are none; says so."""
    if not starts or any(mean.any() for _, mean, _ in starts):
        return
    for _, mean, initial in starts:
        if initial is not None:
            mean.copy_(initial)
    unknown = [name for name, _, initial in starts if initial is None]
    warn(
        f"the guide starts with all means at zero (site {starts[0][0]!r} and {len(starts) - 1} more), where hidden "
        "units are alike and training hardly tells them apart. "
        + (
            f"The model keeps no weights of {unknown[0]!r} to start from: start from draws of the prior, as by "
            "AutoNormal(model, init_loc_fn=pyro.infer.autoguide.init_to_sample)."
            if unknown
            else "They now start from the weights that the network had: as AutoNormal(model, "
            "init_loc_fn=pyro_dvi.init_to_module) says beforehand."
        )
    )
