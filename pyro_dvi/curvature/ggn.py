# SPDX-License-Identifier: Apache-2.0
"""The exact diagonal of the generalised Gauss-Newton matrix."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pyro_dvi.curvature.base import Curvature, half_sum
from pyro_dvi.curvature.information import expected_information, of_site
from pyro_dvi.curvature.likelihood import Linearisation
from pyro_dvi.curvature.per_example import PerExampleRecorder, summed_squared_gradients

__all__ = ["GGN"]


class GGN(Curvature):
    r"""Expected Fisher information in closed form: the diagonal without sampled labels.

    .. math::
        c_\lambda = \sum_s \mathrm{scale}_s \sum_{i,k} \bigl(w_{ik}\,\partial_\lambda f_{ik}\bigr)^2

    with the parameters f of each observed distribution and the factors w of their Fisher information.

    Status: exact for the expected Fisher information, which equals the generalised Gauss-Newton diagonal for
    exponential families in natural parameters. Under training-mode batch normalisation each example counts through
    its own row of the activations only. Costs one backward pass per distribution parameter (ten classes: ten)
    for dense and convolutional weights.

    Source: Unlu & Aitchison (2021), Eq. 13-15; Martens (2020) for the equivalence.

    Example:
        >>> GGN()
        GGN()
    """

    def recorder(self, used_values: Sequence[Tensor | None]) -> PerExampleRecorder:
        return PerExampleRecorder(used_values)

    def penalty(self, likelihood: Linearisation) -> Tensor:
        likelihood.require_labels("GGN")
        total = [torch.zeros_like(u) for u in likelihood.values]
        for site in likelihood.sites:
            for f, w in of_site(expected_information(site.fn, site.name), site):
                for output, weight in zip(f.unbind(-1), w.unbind(-1), strict=True):
                    squares = summed_squared_gradients(likelihood, output, weight)
                    total = [a + b for a, b in zip(total, squares, strict=True)]
        return half_sum(likelihood.scales, total)

    def __repr__(self) -> str:
        return "GGN()"
