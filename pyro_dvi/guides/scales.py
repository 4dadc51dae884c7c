# SPDX-License-Identifier: Apache-2.0
"""Covariance families of the mean-field guide: which standard deviations are free."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import torch
from torch import Tensor
from torch.distributions import ExpTransform, constraints, transform_to

from pyro_dvi.core.choice import check_count, check_positive
from pyro_dvi.errors import ArgumentError


class _ExpPositive(constraints.greater_than):  # type: ignore[misc]
    """Positive numbers, of which an optimizer sees the logarithm.

    Torch's own transform to positive numbers adds zero and multiplies by one after the exponential: two passes over all
    weights in every step, and a third one backwards.
    """


exp_positive = _ExpPositive(0.0)
_EXP = ExpTransform()


@transform_to.register(_ExpPositive)
def _to_exp_positive(constraint: _ExpPositive) -> ExpTransform:
    return _EXP


class ScaleFamily(ABC):
    """A way to parameterise posterior standard deviations.

    Adding one: say in which shape the learned scales of a site are stored, or that they are fixed.
    """

    learned: ClassVar[bool] = True

    @abstractmethod
    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        """Return the scales of a site at the start, in the shape in which they are stored.

        Args:
            loc: the site's initial mean, in unconstrained space.
            prior_scale: standard deviation of its prior, broadcastable to ``loc``.
            event_dim: number of event dimensions of ``loc``; those to their left belong to plates.
        """


@dataclass(frozen=True)
class _FromPrior(ScaleFamily):
    """Standard deviations that start as a fraction of the prior's."""

    log_offset: float = -3.0

    def __post_init__(self) -> None:
        if not -20 <= self.log_offset <= 5:
            raise ArgumentError(
                f"log_offset is log(posterior scale / prior scale) at the start, got {self.log_offset}: try -3"
            )


class PerWeight(_FromPrior):
    r"""One standard deviation per weight, :math:`\log\sigma = \log s - 3` at the start.

    Args:
        log_offset: initial :math:`\log(\sigma/s)` with the prior's standard deviation s.

    Source: Unlu & Aitchison (2021), section 4.
    """

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        return (prior_scale * torch.full_like(loc, self.log_offset).exp()).contiguous()


class PerSite(_FromPrior):
    r"""One standard deviation shared by all weights of a site (per plate element for local latents).

    Args:
        log_offset: initial :math:`\log(\sigma/s)` with the prior's standard deviation s (its mean over the site).
    """

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        scales = prior_scale.expand_as(loc)
        axes = tuple(range(loc.dim() - event_dim, loc.dim()))
        shared = scales.mean(axes, keepdim=True) if axes else scales
        return (shared * torch.full_like(shared, self.log_offset).exp()).contiguous()


@dataclass(frozen=True)
class SGDStepSize(ScaleFamily):
    r"""One fixed variance for every weight, that of SGD with this step size: :math:`\sigma^2 = \eta / 2M`.

    Together with ``TaylorELBO(curvature=MinibatchGradient())`` only the means are learned, on the objective
    :math:`\tfrac NM[\log p - \tfrac{\eta}{4M}\sum_\lambda g_\lambda^2] - \beta\,\mathrm{(weight\ decay)}` with the
    summed minibatch gradient g.

    Args:
        lr: step size :math:`\eta` of SGD on the mean loss.
        batch_size: M.

    Source: Unlu & Aitchison (2021), Eq. 29 (arXiv), there with the mean gradient :math:`g / M`, which is the same.
    """

    learned: ClassVar[bool] = False

    lr: float
    batch_size: int

    def __post_init__(self) -> None:
        check_positive("lr", self.lr)
        check_count("batch_size", self.batch_size)

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        return loc.new_full((), sqrt(self.lr / (2 * self.batch_size)))
