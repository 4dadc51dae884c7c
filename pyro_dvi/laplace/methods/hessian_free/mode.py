# SPDX-License-Identifier: Apache-2.0
"""The contract of a mode of Hessian-free Laplace: which tilted fits there are, and how variances are read off them."""

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from pyro_dvi.laplace.energy.energy import LocalEnergy
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.hessian_free.tilted_energy import Tilt
from pyro_dvi.laplace.methods.hessian_free.two_fits import Fits, TwoFits

__all__ = ["Mode", "PretrainedMode"]


class Mode(ABC):
    """Which functions U is tilted by.

    Attributes:
        reusable: whether the fits serve other queries of the same site.
    """

    reusable: bool = False

    def check(self, local: LocalEnergy) -> None:  # noqa: B027 (most suit every model)
        """Refuse models that the mode is not made for."""

    @abstractmethod
    def fits(self, two_fits: TwoFits, query: Query) -> Iterable[Fits | None]:
        """Solve the tilted problems."""

    @abstractmethod
    def responses(self, fits: Iterable[Fits | None], query: Query) -> Tensor:
        """Return ``[B, K, K]`` of either sign, read off the fits."""


class PretrainedMode(Mode):
    r"""One pair of fits for each output k, tilted by its mean over an evaluation set of M inputs.

    .. math:: r_k(u) = \frac1M \sum_j f_k(x_j; u), \qquad
        \frac{\partial f_k(x; u_\lambda)}{\partial\lambda} \to \frac1M \sum_j \operatorname{Cov}(f_k(x), f_k(x_j))

    One pair of fits serves any number of inputs, but what it gives is the mean of a row of the covariance matrix, not
    its diagonal: right for inputs that are as correlated with the evaluation set as with themselves, too small by the
    mean correlation otherwise, and negative where that is negative.
    """

    @abstractmethod
    def tilts(self, local: LocalEnergy, query: Query) -> list[Tilt]:
        """Return one tilt for each output."""

    def fits(self, two_fits: TwoFits, query: Query) -> list[Fits | None]:
        """Fit once for each output."""
        return list(two_fits.of(self.tilts(two_fits.local, query)))

    def responses(self, fits: Iterable[Fits | None], query: Query) -> Tensor:
        """Return the row means."""
        slopes = [torch.zeros_like(query.mean) if pair is None else pair.slope(query.at) for pair in fits]
        found = torch.stack(slopes, -1)  # derivatives [B, K] by the tilt of each output
        return 0.5 * (found + found.mT)
