# SPDX-License-Identifier: Apache-2.0
"""What a search, or a look, has shown of a mode, so that nobody looks again."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pyro_dvi.laplace.energy.energy import Energy
from pyro_dvi.laplace.energy.passes import same_data
from pyro_dvi.laplace.point_mass import PointMass

__all__ = ["Certificate"]


@dataclass(frozen=True)
class Certificate:
    r"""That a mode is a minimum, or has no slope; nothing changes it, and any move of the mode ends it.

    Attributes:
        point: the mode, and the U that it belongs to.
        sites: those all of whose entries varied.
        data: checksum of the batches.
        curvature: ``"Hessian"`` for a minimum with a positive definite Hessian; ``"GGN"`` where there is only no slope.
        decrement: :math:`g^\top P^{-1} g` with that matrix, from above.
    """

    point: PointMass
    sites: tuple[str, ...]
    data: float
    curvature: str
    decrement: float

    def is_of(self, point: PointMass) -> bool:
        """Whether it is about this mode of this U."""
        return point.change_since(self.point) is None

    def covers(self, point: PointMass, energy: Energy) -> bool:
        """Whether it is so with these data, too; a minimum over more sites is one over fewer."""
        return (
            self.is_of(point)
            and set(energy.layout.names) <= set(self.sites)
            and same_data(self.data, energy.passes.checksum)
        )

    def state(self) -> dict[str, Any]:
        """Return tensors and plain values, for files."""
        return asdict(self)

    @staticmethod
    def from_state(state: Mapping[str, Any] | None) -> "Certificate | None":
        """Make what :meth:`state` describes."""
        return None if state is None else Certificate(**{**state, "point": PointMass(**state["point"])})
