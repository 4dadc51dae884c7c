# SPDX-License-Identifier: Apache-2.0
"""Covariances of all that is uncertain in one density: between classes, elements of a vector, a mean and its noise."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.expectations.gaussian import are_dependent, event_dim_of, gaussian_of
from pyro_dvi.expectations.points import fixed_points, gauss_hermite
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.joint import covariance_of, joint_noise_followed


@dataclass(frozen=True)
class Joint:
    """The Gaussians behind the parameters of each density, together; their moments alone take them as independent.

    Attributes:
        covariance: of the n uncertain numbers of each density, ``[*batch, n, n]``.
        sizes: how many of them each parameter has, in order.
        event_shape: of a density whose numbers are those of ``to_event``; empty where each number has its own.
        num_points: Sobol points of averages over more than two numbers.
    """

    covariance: Tensor
    sizes: Mapping[str, int]
    event_shape: torch.Size = torch.Size()  # noqa: RUF009 (a tuple)
    num_points: int = 512

    def between(self, first: str, second: str) -> Tensor:
        """Return the covariances ``[*batch, n, m]`` of two parameters."""
        return self._part(self._part(self.covariance, first, -2), second, -1)

    def spread(self, name: str) -> Tensor:
        """Return variances ``[*batch]`` of single numbers, covariances ``[*batch, n, n]`` of those of an event."""
        return self._spread(
            self.between(name, name) if name in self.sizes else torch.zeros_like(self.covariance)
        )

    def points(self, parameters: Mapping[str, GaussianMoments]) -> tuple[dict[str, Tensor], Tensor]:
        """Return values ``[S, *shape]`` of all uncertain parameters, and weights ``[S]``."""
        half, _ = _root(self.covariance)
        points, weights = fixed_points(half.shape[-1], half, self.num_points)
        shifts = _combined(half, points)
        return {n: _shifted(parameters[n], self._part(shifts, n, -1)) for n in self.sizes}, weights

    def given_scale(
        self, loc: Tensor, scale: GaussianMoments, num_nodes: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""Return what the mean is at points of the Gaussian h behind the noise scale.

        .. math:: f \mid h \sim \mathcal N\bigl(\hat f + C (h - \hat h), \Sigma_{f \mid h}\bigr)

        Args:
            loc: mean :math:`\hat f`, ``[*batch, *event]``.
            scale: of the noise, of the same shape.
            num_nodes: of Gauss and Hermite, where h is one number.

        Returns:
            The mean ``[S, *batch, *event]``, its spread as by :meth:`spread`, the scale ``[S, *batch, *event]`` and
            weights ``[S]``.
        """
        half, inverse = _root(self.between("scale", "scale"))
        rank = half.shape[-1]
        if rank == 1:
            points, weights = gauss_hermite(num_nodes, half)
            points = points.unsqueeze(-1)
        else:
            points, weights = fixed_points(rank, half, self.num_points)
        scales = _shifted(scale, _combined(half, points))
        if "loc" not in self.sizes:
            return loc.expand(scales.shape), self.spread("loc"), scales, weights
        gain = self.between("loc", "scale") @ inverse
        covariance = self.between("loc", "loc") - gain @ gain.mT
        rounding = torch.diagonal(covariance, dim1=-2, dim2=-1).clamp_max(0)  # of the difference
        loc = loc + _combined(gain, points).reshape(-1, *loc.shape)
        return loc, self._spread(covariance - torch.diag_embed(rounding)), scales, weights

    def _spread(self, covariance: Tensor) -> Tensor:
        return covariance if self.event_shape else covariance[..., 0, 0]

    def _part(self, of_all: Tensor, name: str, dim: int) -> Tensor:
        """The numbers of a parameter among those of all."""
        return of_all.split(list(self.sizes.values()), dim)[list(self.sizes).index(name)]


def joint_if_dependent(family: type, parameters: Mapping[str, Any]) -> Joint | None:
    """Return the covariances of parameters that are outputs of one last layer; None where they are independent."""
    if not are_dependent(family, parameters):
        return None
    gaussians = {k: gaussian_of(p) for k, p in parameters.items() if isinstance(p, GaussianMoments)}
    with joint_noise_followed():
        vectors = [g if event_dim_of(family, name) else g.unsqueeze(-1) for name, g in gaussians.items()]
        batch = torch.broadcast_shapes(*[v.shape[:-1] for v in vectors])
        vectors = [v.expand(*batch, v.shape[-1]) for v in vectors]
    sizes = {name: v.shape[-1] for name, v in zip(gaussians, vectors, strict=True)}
    return Joint(covariance_of(*vectors), sizes)


def _combined(half: Tensor, points: Tensor) -> Tensor:
    """Return ``[S, *batch, n]`` of R ``[*batch, n, r]`` and points ``[S, r]``."""
    return torch.einsum("...nr,sr->s...n", half, points)


def _shifted(parameter: GaussianMoments, shift: Tensor) -> Tensor:
    """Return values of a parameter where the Gaussian behind it is off its mean."""
    inner = gaussian_of(parameter)
    values = inner.loc + shift.reshape(-1, *inner.shape)
    return values if parameter.link is None else parameter.link.function(values)


def _root(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return R ``[..., n, r]`` with R Rᵀ the covariances ``[..., n, n]``, and the transpose of its pseudo-inverse.

    r is the largest of their ranks, so that outputs which move together (a common noise scale) count once.
    """
    values, vectors = torch.linalg.eigh(covariance)
    values, vectors = values.flip(-1), vectors.flip(-1)
    tolerance = 4 * values.shape[-1] * torch.finfo(values.dtype).eps * values[..., :1].clamp_min(0)
    kept = values > tolerance
    rank = max(1, int(kept.sum(-1).max()))
    deviations = torch.where(kept, values.clamp_min(0).sqrt(), values.new_zeros(()))[..., :rank].unsqueeze(-2)
    inverses = torch.where(
        deviations > 0, 1 / deviations.clamp_min(torch.finfo(values.dtype).tiny), deviations
    )
    return vectors[..., :rank] * deviations, vectors[..., :rank] * inverses
