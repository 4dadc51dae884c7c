# SPDX-License-Identifier: Apache-2.0
"""Gaussian outputs, arranged by the densities that they are parameters of.

An example may have several densities, one for each row of an inner plate, say. Each depends on its own outputs only,
so that integrals are over these few; below, a density is a *cell*.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.expectations.points import fixed_points
from pyro_dvi.handlers.distributions import innermost
from pyro_dvi.handlers.outputs import Outputs

__all__ = ["Cells", "root"]


@dataclass
class Cells:
    """Gaussian outputs by cell.

    Attributes:
        outputs: outputs at the mode, without graph.
        covariance: of all outputs of each example, ``[B, K, K]``.
        num_points: points of integrals over more than two numbers.
    """

    outputs: Outputs
    covariance: Tensor
    num_points: int

    @property
    def fn(self) -> Any:
        """The observed distribution at the mode."""
        return self.outputs.distribution

    @cached_property
    def base(self) -> Any:
        """What it is without wrappers."""
        return innermost(self.fn)

    @cached_property
    def is_plain(self) -> bool:
        """Whether there are no wrappers but ``to_event``."""
        fn = self.fn
        while isinstance(fn, td.Independent):
            fn = fn.base_dist
        return fn is self.base

    @cached_property
    def uncertain(self) -> set[str]:
        """Names of the parameters that have a variance."""
        variances = self.outputs.split(self.variances)
        return {
            p.name for p, v in zip(self.outputs.parameters, variances, strict=True) if bool((v > 0).any())
        }

    @property
    def variances(self) -> Tensor:
        """Of all outputs, ``[B, K]``."""
        return torch.diagonal(self.covariance, dim1=-2, dim2=-1)

    @property
    def position(self) -> int:
        """The dimension of examples in the batch shape, from the left."""
        return len(self.fn.batch_shape) + self.outputs.axis

    @cached_property
    def count(self) -> int:
        """Cells of each example."""
        return prod(self.fn.batch_shape) // len(self.outputs.values)

    def part(self, name: str, values: Tensor) -> Tensor:
        """Return the part ``[B, *shape]`` of values ``[B, K]`` that belongs to a parameter."""
        parts = self.outputs.split(values)
        return next(v for p, v in zip(self.outputs.parameters, parts, strict=True) if p.name == name)

    def places(self, *names: str) -> Tensor:
        """Return where the outputs of each cell are among the K, ``[cells, outputs of a cell]``."""
        found, start = [], 0
        for parameter in self.outputs.parameters:
            if parameter.name in names:
                places = torch.arange(start, start + parameter.size, device=self.covariance.device)
                found.append(places.reshape(self.count, -1))
            start += parameter.size
        return torch.cat(found, -1)

    def between(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return covariances ``[B, cells, n, m]`` of outputs at places ``[cells, n]`` with those at ``[cells, m]``."""
        return self.covariance[:, rows.unsqueeze(-1), columns.unsqueeze(-2)]

    def collected(self, native: Tensor) -> Tensor:
        """Return a parameter ``[*batch, *own]`` as ``[B, cells, k]``."""
        return native.movedim(self.position, 0).reshape(len(self.outputs.values), self.count, -1)

    def arranged(self, of_cells: Tensor) -> Tensor:
        """Return ``[B, cells, ...]`` as ``[*batch, ...]``."""
        others = [n for dim, n in enumerate(self.fn.batch_shape) if dim != self.position]
        shaped = of_cells.reshape(len(of_cells), *others, *of_cells.shape[2:])
        return shaped.movedim(0, self.position)

    def points(self) -> tuple[Tensor, Tensor]:
        """Return values of all outputs ``[S, B, K]`` and their weights ``[S]``."""
        places = self.places(*self.uncertain)
        half, _ = root(self.between(places, places))
        points, weights = fixed_points(half.shape[-1], half, self.num_points)
        values = self.outputs.values.repeat(len(points), 1, 1)
        values[:, :, places.reshape(-1)] += torch.einsum("btnr,sr->sbtn", half, points).flatten(2)
        return values, weights


def root(covariance: Tensor) -> tuple[Tensor, Tensor]:
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
