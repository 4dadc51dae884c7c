# SPDX-License-Identifier: Apache-2.0
"""The curvature of the prior, where it is that of independent latents."""

import torch
from torch import Tensor

from pyro_dvi.errors import NotPositiveDefiniteError, UnsupportedError
from pyro_dvi.laplace.energy.energy import LocalEnergy

__all__ = ["common_ratio", "independent_prior_precision", "prior_diagonal"]


def independent_prior_precision(local: LocalEnergy, method: str) -> Tensor:
    """Return the diagonal [D] of the Hessian of minus the log prior, which has nothing else.

    Args:
        local: U around the mode.
        method: who asks, for the message.

    Raises:
        UnsupportedError: latents are coupled by their prior, as the scale of a hierarchical prior with what it scales.
        NotPositiveDefiniteError: the prior has no positive curvature at some latent.
    """
    diagonal = local.prior_diagonal()
    if diagonal is not None:
        return diagonal
    diagonal, coupled = _diagonal_by_sites(local)
    if coupled:
        raise UnsupportedError(
            f"{method} needs a prior of independent latents; that of {' and '.join(map(repr, coupled))} couples them. "
            "Use Dense() or ConjugateGradient(), or subset=... without those that enter the prior of others"
        )
    _check_positive(local, diagonal)
    return diagonal


def prior_diagonal(local: LocalEnergy, method: str) -> Tensor:
    """Return the diagonal [D] of the Hessian of minus the log prior, whatever else it has.

    Raises:
        UnsupportedError: elements of one site are coupled by their prior.
    """
    found = local.prior_diagonal()
    if found is not None:
        return found
    found, coupled = _diagonal_by_sites(local)
    if len(coupled) == 1:
        raise UnsupportedError(
            f"{method} needs the diagonal of the prior's curvature, which is not known for {coupled[0]!r}: its "
            "elements are dependent. Use Dense() or ConjugateGradient(preconditioner=None)"
        )
    return found


def common_ratio(new: Tensor, old: Tensor) -> float | None:
    """Return the number by which all prior precisions were multiplied; None if there is no one such number."""
    ratio = new / old
    lowest, highest = float(ratio.min()), float(ratio.max())
    return highest if highest - lowest <= 100 * torch.finfo(new.dtype).eps * highest else None


def _diagonal_by_sites(local: LocalEnergy) -> tuple[Tensor, list[str]]:
    """The diagonal, found with one probe a site, and the names of a site or two that are coupled."""
    layout, generator = local.energy.layout, torch.Generator().manual_seed(0)
    diagonal, coupled = torch.zeros_like(local.point), list[str]()
    ones = layout.named(torch.ones_like(local.point))
    probe = torch.randn(local.point.shape, generator=generator).to(local.point)  # any two elements differ
    for name in layout.names:
        parts = {other: torch.zeros_like(v) for other, v in ones.items()}
        parts[name] = ones[name]
        here = layout.flatten(list(parts.values()))
        mine, probed = local.prior_hessian(torch.stack([here, here * probe]))
        diagonal += mine * here
        wrong = (probed - mine * here * probe).abs() > 1e3 * torch.finfo(mine.dtype).eps * mine.abs().max()
        found = [other for other, places in layout.named(wrong).items() if bool(places.any())]
        if name in found:
            return diagonal, [name]
        if found and not coupled:
            coupled = [name, found[0]]
    return diagonal, coupled


def _check_positive(local: LocalEnergy, diagonal: Tensor) -> None:
    for name, part in local.energy.layout.named(diagonal).items():
        if not bool((part > 0).all()):
            raise NotPositiveDefiniteError(
                f"the prior of {name!r} has curvature {part.min().item():.3g} at the mode, which is not positive (a "
                "flat or heavy-tailed prior): use Dense() or ConjugateGradient(), or another prior"
            )
