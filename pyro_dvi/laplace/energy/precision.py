# SPDX-License-Identifier: Apache-2.0
"""Precision matrices of the Gaussian, and the contribution of the prior."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.core.undisturbed import widest
from pyro_dvi.curvature.example_gradients import add_gauss_newton_matrix
from pyro_dvi.errors import NotPositiveDefiniteError, UnsupportedError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.linalg.operator import identity_rows


class PrecisionMatrix(ABC):
    """A symmetric matrix P at the mode, represented by its products."""

    @abstractmethod
    def product(self, local: LocalEnergy, vectors: Tensor) -> Tensor:
        """Return P v as ``[S, D]`` for vectors ``[S, D]``."""

    def matrix(self, local: LocalEnergy) -> Tensor:
        """Return P as ``[D, D]``."""
        return torch.cat([self.product(local, rows) for rows in identity_rows(local.point)])


@dataclass(frozen=True)
class GGN(PrecisionMatrix):
    r"""The Gauss-Newton matrix, :math:`P = \frac1\beta\sum_i J_i^\top \Lambda_i J_i - \nabla^2\log p(u)`.

    :math:`\Lambda_i` is the expected Fisher information of the parameters of the observed distribution. For log-concave
    priors, P is positive definite whether or not training has converged.

    Status: the exact Hessian of the linearised model; it differs from :class:`Hessian` by the curvature of the network.

    Source: Schraudolph (2002), "Fast curvature matrix-vector products"; Martens (2020), Section 9, for the connection
    with the Fisher information.
    """

    def product(self, local: LocalEnergy, vectors: Tensor) -> Tensor:
        """Return P v."""
        return local.ggn(vectors)

    def matrix(self, local: LocalEnergy) -> Tensor:
        """Return P, from per-example gradients if they are cheap."""
        found = self.from_examples(local)
        return super().matrix(local) if found is None else found

    def from_examples(self, local: LocalEnergy) -> Tensor | None:
        """Return P from per-example gradients, with K backward passes; None if they are not cheap.

        Products are summed in double precision. In single precision, their rounding errors can exceed the prior's
        precision, and P is then not positive definite.

        They are also used if they are expensive but differentiable, since products are not differentiable.
        """
        size, device = len(local.point), local.point.device
        total = torch.zeros(size, size, dtype=widest(device), device=device)
        for examples in local.examples():
            if not (examples.cheap or local.energy.differentiable):
                return None
            add_gauss_newton_matrix(examples, total)
        diagonal = local.prior_diagonal
        if diagonal is None:
            return total.add_(torch.cat([local.prior_hessian(rows) for rows in identity_rows(local.point)]))
        total.diagonal().add_(diagonal)
        return total


@dataclass(frozen=True)
class Hessian(PrecisionMatrix):
    r"""The Hessian of the negative log posterior density, :math:`P = \nabla^2 U`.

    It is positive definite only at a minimum of U: after training, call ``guide.polish(batches)``.

    Status: exact.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import Dense, Hessian
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False))
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=3, noise_scale=1.0))
        >>> batches = [(torch.ones(3, 1), torch.zeros(3, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> guide.fit(batches, Dense(Hessian())).precision
        tensor([[4.]], dtype=torch.float64)
    """

    def product(self, local: LocalEnergy, vectors: Tensor) -> Tensor:
        """Return P v."""
        return local.hessian(vectors)


def independent_prior_precision(local: LocalEnergy, method: str) -> Tensor:
    """Return the diagonal [D] of the Hessian of minus the log prior, for independent latents.

    Args:
        local: U with its derivatives at the mode.
        method: name of the caller, for error messages.

    Raises:
        UnsupportedError: the prior couples latents, such as a weight and the scale of its hierarchical prior.
        NotPositiveDefiniteError: the curvature of the prior is not positive for some latent.
    """
    diagonal = prior_diagonal(local, method, independent=True)
    for name, part in local.energy.layout.named(diagonal).items():
        if not bool((part > 0).all()):
            what = f"the prior of {name!r} is flat or heavy-tailed and has curvature {part.min():.3g} at the mode"
            raise NotPositiveDefiniteError(f"{what}: use Dense(), ConjugateGradient() or another prior")
    return diagonal


def prior_diagonal(local: LocalEnergy, method: str, *, independent: bool = False) -> Tensor:
    """Return the diagonal [D] of the Hessian of minus the log prior, with one probe per site.

    Raises:
        UnsupportedError: the prior couples elements of a site or, if ``independent`` is set, several sites.
    """
    if local.prior_diagonal is not None:
        return local.prior_diagonal
    layout, diagonal = local.energy.layout, torch.zeros_like(local.point)
    probe = torch.randn(local.point.shape, generator=torch.Generator().manual_seed(0)).to(diagonal)
    ones = layout.named(torch.ones_like(diagonal))
    for name in layout.names:
        here = layout.flatten([v * (site == name) for site, v in ones.items()])
        # All elements of the probe differ.
        mine, probed = local.prior_hessian(torch.stack([here, here * probe]))
        diagonal += mine * here
        wrong = (probed - mine * here * probe).abs() > 1e3 * torch.finfo(mine.dtype).eps * mine.abs().max()
        coupled = [site for site, places in layout.named(wrong).items() if bool(places.any())]
        if name in coupled or (independent and coupled):
            sites = " and ".join(sorted({repr(name), repr(coupled[0])}))
            what = f"{method} needs independent latents, but the prior of {sites} couples them"
            raise UnsupportedError(f"{what}: use Dense(), ConjugateGradient(), or another subset")
    return diagonal


def common_ratio(new: Tensor, old: Tensor) -> float | None:
    """Return the common ratio of all prior precisions; None if the ratios differ."""
    ratio = new / old
    lowest, highest = float(ratio.min()), float(ratio.max())
    return highest if highest - lowest <= 100 * torch.finfo(new.dtype).eps * highest else None
