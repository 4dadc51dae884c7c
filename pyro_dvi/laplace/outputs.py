# SPDX-License-Identifier: Apache-2.0
"""The Gaussian over a model's outputs that linearisation gives."""

from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.errors import ArgumentError
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.posterior import LaplacePosterior
from pyro_dvi.runs.outputs import Outputs


@dataclass(frozen=True)
class GaussianOutputs:
    r"""Outputs f of B examples, :math:`f \sim \mathcal N(\hat f, J P^{-1} J^\top)`.

    Outputs are real numbers: a mean, logits, the logarithm of a rate or of a noise scale. The location of the
    observed distribution is the prediction, also where it is certain; the others matter to :func:`~pyro_dvi.predict`.

    Attributes:
        outputs: the outputs at the mode, and the distribution around them.
        full_covariance: covariance of all K outputs of each example, ``[B, K, K]``, in squared units of the outputs.
        full_joint_covariance: of all outputs of all examples, ``[B, K, B, K]``; None unless asked for.
    """

    outputs: Outputs
    full_covariance: Tensor
    full_joint_covariance: Tensor | None = None

    @classmethod
    @torch.enable_grad()  # Jacobians need it, whoever asks
    def of(cls, posterior: LaplacePosterior, query: Query, *, joint: bool = False) -> "GaussianOutputs":
        """Return those of a query; with ``joint`` also over all its examples."""
        outputs = query.outputs.detached()
        if not joint:
            return cls(outputs, posterior.covariance(query).detach())
        count, size = query.num_rows, query.size
        whole = posterior.joint_covariance(query).detach().reshape(count, size, count, size)
        rows = torch.arange(count, device=whole.device)
        return cls(outputs, whole[rows, :, rows], whole)

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

    @property
    def joint_covariance(self) -> Tensor:
        """Its covariance over all examples, ``[B k, B k]``, example by example.

        Raises:
            ArgumentError: it was not asked for.
        """
        if self.full_joint_covariance is None:
            raise ArgumentError("ask for the covariance between examples: guide.predictive(x, joint=True)")
        size = self.outputs.parameters[0].size
        whole = self.full_joint_covariance[:, :size, :, :size]
        return whole.reshape(len(whole) * size, -1)
