# SPDX-License-Identifier: Apache-2.0
"""A guide at the minimum of U nearby."""

from dataclasses import dataclass
from typing import Any

import pytest
from torch import Tensor

from pyro_dvi.laplace import LaplaceGuide
from pyro_dvi.linalg.minimise import minimise_newton
from tests.laplace.problems import Batches, guide_at

pretrained = pytest.mark.filterwarnings("ignore:.*means of rows of the covariance:pyro_dvi.errors.DviWarning")


@dataclass
class _Smooth:
    energy: Any

    def value_and_gradient(self, x: Tensor) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self.energy.at(x).value_and_gradient
        return result

    def product(self, x: Tensor, vectors: Tensor) -> Tensor:
        result: Tensor = self.energy.at(x).hessian(vectors)
        return result


def at_minimum(guide: LaplaceGuide, batches: Batches, model: Any, **options: Any) -> LaplaceGuide:
    """The guide at the minimum of U nearby."""
    energy = guide.energy(batches)
    found = minimise_newton(_Smooth(energy), energy.start, tolerance=1e-14, max_steps=2000)
    assert found.converged, found.reason
    return guide_at(model, batches[0], energy.layout.named(found.x), **options)
