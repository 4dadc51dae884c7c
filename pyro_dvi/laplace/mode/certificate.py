# SPDX-License-Identifier: Apache-2.0
"""What a search, or a look, has shown of a mode, so that nobody looks again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.passes import same_data
from pyro_dvi.laplace.point_mass import PointMass


@dataclass(frozen=True)
class Certificate:
    r"""That a mode is a minimum, or has no slope; nothing changes it, and any move of the mode ends it.

    Attributes:
        point: the mode, and the U that it belongs to, with its data and its model.
        sites: those all of whose entries varied.
        curvature: ``"Hessian"`` for a minimum with a positive definite Hessian; ``"GGN"`` where there is only no slope.
        decrement: :math:`g^\top P^{-1} g` with that matrix, from above.
    """

    point: PointMass
    sites: tuple[str, ...]
    curvature: str
    decrement: float

    def is_of(self, point: PointMass) -> bool:
        """Whether it is about this mode of this U."""
        return point.change_since(self.point) is None

    def covers(self, energy: Energy, model: Callable[..., Any], latents: dict[str, Tensor]) -> bool:
        """Whether it is so with these data, and the model as it is now; a minimum over more sites is one over fewer.

        Args:
            energy: U.
            model: the model, with every scale as it is written.
            latents: the mode, constrained.
        """
        return (
            set(energy.layout.names) <= set(self.sites)
            and same_data(self.point.data, energy.passes.checksum)
            and (self.point.model is None or not self.point.model.differences(model, latents))
        )

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values, for files."""
        return {**vars(self), "point": self.point.state()}

    @staticmethod
    def from_state(state: Mapping[str, Any] | None) -> "Certificate | None":
        """Make what :meth:`state` describes."""
        if state is None:
            return None
        return Certificate(**{**state, "point": PointMass.from_state(state["point"])})
