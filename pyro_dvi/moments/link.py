# SPDX-License-Identifier: Apache-2.0
"""How moments came about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from pyro_dvi.moments.value import GaussianMoments

__all__ = ["Link"]


@dataclass(frozen=True)
class Link:
    """How moments came from Gaussian ones: ``function(inner)``, so that likelihoods can integrate over the Gaussian.

    Attributes:
        inner: the Gaussian.
        function: the map from its values to those of the moments.
        name: its name if it is one torch function and nothing else ("exp", "softmax", ...); else None.
        elementwise: whether each element depends on one element of ``inner``, of the same shape.
        uniform: whether ``function`` is the same at each element, so that it still holds after elements moved.
        moved: whether each element depends on one element of ``inner``, but of another place or shape.
    """

    inner: GaussianMoments
    function: Callable[[Tensor], Tensor]
    name: str | None = None
    elementwise: bool = True
    uniform: bool = True
    moved: bool = False

    @property
    def separate(self) -> bool:
        """Whether each element depends on one element of ``inner``, wherever that is."""
        return self.elementwise or self.moved
