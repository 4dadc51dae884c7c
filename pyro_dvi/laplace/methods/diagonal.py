# SPDX-License-Identifier: Apache-2.0
"""The precision without its off-diagonal entries."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pyro_dvi.errors import NotPositiveDefiniteError
from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix, prior_diagonal
from pyro_dvi.laplace.methods.kronecker_factored import KroneckerPosterior
from pyro_dvi.laplace.methods.method import Method


@dataclass(frozen=True)
class Diagonal(Method):
    r"""A Gaussian with the precision's diagonal, :math:`p_\lambda = \sum_{ik} (w_{ik} J_{ik\lambda})^2 + \text{prior}`.

    The GGN's costs one backward pass for each parameter of an observation (ten classes: ten); that of the Hessian two
    gradients for each latent.

    Status: the diagonal is exact; what is left out is not small for networks, whose weights are strongly dependent.

    Args:
        precision: ``GGN()``, or ``Hessian()`` for small models.

    Raises:
        NotPositiveDefiniteError: an entry is not positive.
        UnsupportedError: the elements of a site are dependent a priori.

    Source: Ritter, Botev & Barber (2018), Section 3.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import Diagonal
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False))
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=3, noise_scale=1.0))
        >>> batches = [(torch.ones(3, 1), torch.zeros(3, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> guide.fit(batches, Diagonal()).marginal_variance()
        tensor([0.2500])
    """

    precision: PrecisionMatrix = field(default_factory=GGN)

    reweights = True

    def fit(self, local: LocalEnergy, *, seed: int = 0) -> "DiagonalPosterior":
        """Return the posterior."""
        prior = local.prior_diagonal
        if isinstance(self.precision, GGN):
            precision = prior_diagonal(local, "Diagonal()") + likelihood_diagonal(local)
        else:
            precision = self.precision.matrix(local).diagonal().clone()
        for name, part in local.energy.layout.named(precision).items():
            if not bool((part > 0).all()):
                raise NotPositiveDefiniteError(
                    f"the precision of {name!r} has an entry {part.min().item():.3g} on its diagonal. Run "
                    "guide.polish(batches), or use precision=GGN() with a prior of positive curvature."
                )
        return DiagonalPosterior(local.point, precision, prior)


def likelihood_diagonal(local: LocalEnergy) -> Tensor:
    """Return the diagonal [D] of the likelihood's Gauss-Newton matrix."""
    return sum((examples.squares() for examples in local.examples()), torch.zeros_like(local.point))


class DiagonalPosterior(KroneckerPosterior):
    """A Gaussian of independent latents: one of layers, without layers.

    Attributes:
        precision: the diagonal of P, [D].
        prior: the prior's part, [D], if it is all of that.
    """

    independent = True
    stored = ("mode", "precision")

    def __init__(self, mode: Tensor, precision: Tensor, prior: Tensor | None = None) -> None:
        super().__init__(mode, precision, [], prior)
        self.precision = precision

    def reweighted(self, likelihood: float, prior: Tensor) -> "DiagonalPosterior | None":
        if self.prior is None:
            return None
        precision = likelihood * (self.precision - self.prior) + prior
        if not bool((precision > 0).all()):
            raise NotPositiveDefiniteError(
                f"the precision has an entry {precision.min().item():.3g} on its diagonal"
            )
        return DiagonalPosterior(self.mode, precision, prior)
