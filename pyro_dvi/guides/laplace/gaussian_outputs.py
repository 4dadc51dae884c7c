# SPDX-License-Identifier: Apache-2.0
"""The Gaussian over a model's outputs that linearisation gives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.handlers.outputs import Outputs

__all__ = ["GaussianOutputs"]


@dataclass(frozen=True)
class GaussianOutputs:
    r"""Outputs f of B examples, :math:`f \sim \mathcal N(\hat f, J P^{-1} J^\top)`.

    Outputs are real numbers: a mean, logits, the logarithm of a rate or of a noise scale. The first parameter of the
    observed distribution is the prediction; the others matter to :func:`~pyro_dvi.predict`.

    Attributes:
        outputs: the outputs at the mode, and the distribution around them.
        full_covariance: covariance of all K outputs of each example, ``[B, K, K]``, in squared units of the outputs.
    """

    outputs: Outputs
    full_covariance: Tensor

    @property
    def mean(self) -> Tensor:
        """Prediction at the mode, ``[B, ...]``."""
        first = self.outputs.parameters[0]
        return self.outputs.values.detach()[:, : first.size].reshape(-1, *first.shape)

    @property
    def variance(self) -> Tensor:
        """Its variance, ``[B, ...]``."""
        first = self.outputs.parameters[0]
        return torch.diagonal(self.covariance, dim1=-2, dim2=-1).reshape(-1, *first.shape)

    @property
    def covariance(self) -> Tensor:
        """Its covariance for each example, ``[B, k, k]`` with k numbers in the prediction."""
        size = self.outputs.parameters[0].size
        return self.full_covariance[:, :size, :size]
