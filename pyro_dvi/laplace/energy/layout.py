# SPDX-License-Identifier: Apache-2.0
"""Between one long vector and the tensors of sites."""

from collections.abc import Mapping, Sequence
from math import prod

import torch
from torch import Tensor

__all__ = ["Layout"]


class Layout:
    """The order of sites in a flat vector.

    Attributes:
        shapes: shape of each site by name, in order.
        size: D, the length of the vector.

    Example:
        >>> layout = Layout({"w": torch.Size([2, 2]), "b": torch.Size([2])})
        >>> layout.split(torch.arange(6.0))[1]
        tensor([4., 5.])
    """

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.shapes = dict(shapes)
        self._sizes = [prod(shape) for shape in self.shapes.values()]
        self.size = sum(self._sizes)

    @property
    def names(self) -> list[str]:
        """Sites in order."""
        return list(self.shapes)

    def flatten(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the vector ``[*lead, D]`` of tensors ``[*lead, *site]``, which come in order."""
        lead = tensors[0].shape[: tensors[0].dim() - len(next(iter(self.shapes.values())))]
        return torch.cat([t.reshape((*lead, -1)) for t in tensors], -1)

    def split(self, vector: Tensor) -> list[Tensor]:
        """Return the tensors ``[*lead, *site]`` in order of a vector ``[*lead, D]``."""
        parts = vector.split(self._sizes, -1)
        return [p.reshape((*vector.shape[:-1], *s)) for p, s in zip(parts, self.shapes.values(), strict=True)]

    def named(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the tensors by site."""
        return dict(zip(self.shapes, self.split(vector), strict=True))
