# SPDX-License-Identifier: Apache-2.0
r"""Gaussian noise around a Gaussian mean, with a noise scale that is certain or not.

With the logarithm h of the scale Gaussian as well, the mean given h is Gaussian,

.. math::
    p(y) = \int \mathcal N\bigl(y;\, \hat f + C (h - \hat h),\; \Sigma_{f \mid h} + e^{2h}\bigr)\,
        \mathcal N(h; \hat h, \Sigma_h)\,\mathrm dh,

so that points are needed for h alone.
"""

from typing import Any

import pyro.distributions as dist
import torch
from torch import Size, Tensor
from torch import distributions as td

from pyro_dvi.expectations.points import fixed_points, gauss_hermite
from pyro_dvi.links.mixture import weighted_mixture
from pyro_dvi.predictive.cells import Cells, root

__all__ = ["normal", "normal_vectors"]

_NODES = 20  # Gauss-Hermite, for one uncertain noise scale


def normal(cells: Cells) -> Any:
    """Return the predictive distribution of a Normal or LogNormal without event dimensions.

    Status: exact in the Gaussian of the outputs if the scale is certain; else as exact as the points.
    """
    mean, covariance, scale, weights = _given_scale(cells)
    total = (covariance[..., 0, 0] + scale[..., 0].square()).sqrt()
    loc, total = (cells.arranged(v.movedim(0, -1)) for v in (mean[..., 0], total))
    cls = type(cells.base)
    if len(weights) == 1:
        return cls(loc[..., 0], total[..., 0])
    return weighted_mixture(weights, cls(loc, total))


def normal_vectors(cells: Cells) -> Any:
    """Return the predictive distribution of a Normal with event dimensions, of full covariance; status as above."""
    mean, covariance, scale, weights = _given_scale(cells)
    total = covariance + torch.diag_embed(scale.square())
    loc, total = cells.arranged(mean.movedim(0, 2)), cells.arranged(total.movedim(0, 2))
    if len(weights) == 1:
        found: Any = dist.MultivariateNormal(loc[..., 0, :], covariance_matrix=total[..., 0, :, :])
    else:
        found = weighted_mixture(weights, td.MultivariateNormal(loc, covariance_matrix=total))
    shape = cells.fn.event_shape
    return found if len(shape) == 1 else ShapedNormal(found, shape)


class ShapedNormal(td.TransformedDistribution):
    """Gaussian vectors, or a mixture of them, as matrices or tensors.

    Args:
        vectors: the distribution of the vectors.
        shape: of one observation.
    """

    def __init__(self, vectors: td.Distribution, shape: Size) -> None:
        super().__init__(vectors, [td.ReshapeTransform(vectors.event_shape, shape)], validate_args=False)

    @property
    def mean(self) -> Tensor:
        """Mean of each element."""
        return self.base_dist.mean.reshape(*self.batch_shape, *self.event_shape)

    @property
    def variance(self) -> Tensor:
        """Variance of each element."""
        return self.base_dist.variance.reshape(*self.batch_shape, *self.event_shape)


def _given_scale(cells: Cells) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean [S, B, cells, k], covariance [1, B, cells, k, k], scale [S, B, cells, k] and weights [S] at points of h."""
    mean = cells.collected(cells.base.loc).unsqueeze(0)
    scale = cells.collected(cells.base.scale).unsqueeze(0)
    of_mean = cells.places("loc") if "loc" in cells.uncertain else None
    covariance = mean.new_zeros(*mean.shape, mean.shape[-1])
    if of_mean is not None:
        covariance = cells.between(of_mean, of_mean).unsqueeze(0)
    if "scale" not in cells.uncertain:
        return mean, covariance, scale, mean.new_ones(1)
    of_scale = cells.places("scale")
    half, inverse = root(cells.between(of_scale, of_scale))
    rank = half.shape[-1]
    if rank == 1:
        points, weights = gauss_hermite(_NODES, half)
        points = points.unsqueeze(-1)
    else:
        points, weights = fixed_points(rank, half, cells.num_points)
    scale = scale * torch.einsum("btnr,sr->sbtn", half, points).exp()
    if of_mean is not None:
        gain = cells.between(of_mean, of_scale) @ inverse
        mean = mean + torch.einsum("btnr,sr->sbtn", gain, points)
        covariance = _without_rounding(covariance - gain @ gain.mT)
    return mean, covariance, scale, weights


def _without_rounding(covariance: Tensor) -> Tensor:
    """Lift variances that a difference made a little less than zero."""
    diagonal = torch.diagonal(covariance, dim1=-2, dim2=-1)
    return covariance + torch.diag_embed(-diagonal.clamp_max(0))
