# SPDX-License-Identifier: Apache-2.0
"""The empirical Fisher information: squared per-example gradients of the observed labels."""

from collections.abc import Sequence

from torch import Tensor

from pyro_dvi.curvature.base import Curvature, half_sum
from pyro_dvi.curvature.likelihood import Linearisation
from pyro_dvi.curvature.per_example import PerExampleRecorder, summed_squared_gradients

__all__ = ["EmpiricalFisher"]


class EmpiricalFisher(Curvature):
    r"""Sum over examples of squared gradients at the observed labels.

    .. math:: c_\lambda = \sum_s \mathrm{scale}_s \sum_i \bigl(\partial_\lambda \log p_s(y_{si} \mid u)\bigr)^2

    Status: deterministic, and equal to the Fisher information only where the model is right about the labels: it
    vanishes on examples that are fitted perfectly. An example is an element of the site's batch shape. Dense,
    convolutional and bias weights cost about one extra pass; weights used otherwise one backward pass per example.

    Source: Unlu & Aitchison (2021), section 3; Kunstner et al. (2019) on its limits.

    Example:
        >>> EmpiricalFisher()
        EmpiricalFisher()
    """

    def recorder(self, used_values: Sequence[Tensor | None]) -> PerExampleRecorder:
        return PerExampleRecorder(used_values)

    def penalty(self, likelihood: Linearisation) -> Tensor:
        total = None
        for site in (*likelihood.sites, *likelihood.factors):
            log_prob = site.log_prob(site.value)
            root = (log_prob.new_ones(()) * site.scale**0.5).expand_as(log_prob)
            squares = summed_squared_gradients(likelihood, log_prob, root)
            total = squares if total is None else [a + b for a, b in zip(total, squares, strict=True)]
        assert total is not None
        return half_sum(likelihood.scales, total)

    def __repr__(self) -> str:
        return "EmpiricalFisher()"
