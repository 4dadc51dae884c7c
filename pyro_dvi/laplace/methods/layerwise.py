# SPDX-License-Identifier: Apache-2.0
r"""Gaussians by a root of their covariance, and covariances of outputs layer by layer.

These come from a layer's inputs and gradients in place of rows of the Jacobian.

The gradient of output k with respect to a layer's weight is :math:`J_k = \sum_t \delta_{kt} a_t^\top`, with one
position t in a dense layer. What depends on the inputs a alone is then computed once for all K outputs.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from pyro_dvi.curvature.example_gradients import ExampleGradients, OuterGradients
from pyro_dvi.laplace.energy.query import Query
from pyro_dvi.laplace.methods.posterior import LaplacePosterior
from pyro_dvi.linalg.operator import gaussian_rows


class RootPosterior(LaplacePosterior):
    r"""A Gaussian by a root C of its covariance, :math:`P^{-1} = C C^\top`; also a metric of searches."""

    @abstractmethod
    def coloured(self, rows: Tensor) -> Tensor:
        r"""Return :math:`C v` for rows ``[*lead, D]``."""

    @abstractmethod
    def whitened(self, rows: Tensor) -> Tensor:
        r"""Return :math:`C^\top v` for rows ``[*lead, D]``."""

    def quadratic(self, rows: Tensor) -> Tensor:
        white = self.whitened(rows)
        return white @ white.mT

    def covariance(self, query: Query) -> Tensor:
        if not query.examples.cheap:
            return super().covariance(query)
        return self.covariance_of_examples(query.examples)

    def covariance_of_examples(self, examples: ExampleGradients) -> Tensor:
        r"""Return :math:`J_i P^{-1} J_i^\top` for each example, ``[B, K, K]``; by rows where layers do not help."""
        return torch.cat([self.quadratic(examples.rows(part)) for part in examples.chunks()])

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        return self.mode + self.coloured(gaussian_rows(count, len(self.mode), self.mode, generator))

    def solve(self, vectors: Tensor) -> Tensor:
        return self.coloured(self.whitened(vectors))


def products_at_layer(
    outer: OuterGradients,
    variances: Tensor,
    changed: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda a, delta: (a, delta),
) -> Tensor:
    r"""Return :math:`\sum_{pq} v_{pq}\,J_{kpq}\,J_{lpq}` for each example, ``[B, K, K]``.

    With one position it is :math:`\sum_p \delta_{kp}\,\delta_{lp} \sum_q v_{pq}\,a_q^2`.

    Args:
        outer: what the gradients J of a weight are made of.
        variances: v, ``[p, q]``.
        changed: another basis: new a and :math:`\delta` from those of the layer.
    """
    found = []
    for part in outer.chunks(0 if outer.is_single else outer.num_outputs * variances.numel()):
        a, delta = changed(*outer.parts(part))
        if outer.is_single:
            spread = a.square() @ variances.mT  # [m, 1, p]
            half = delta.squeeze(2).transpose(0, 1) * spread.sqrt()
        else:
            half = ((delta.transpose(0, 1).mT @ a.unsqueeze(1)) * variances.sqrt()).flatten(2)
        found.append(half @ half.mT)
    return torch.cat(found)


def products_of_diagonal(
    examples: ExampleGradients, variances: Tensor, tensors: Iterable[int] | None = None
) -> Tensor:
    r"""Return :math:`J_i \operatorname{diag}(v) J_i^\top` for each example, ``[B, K, K]``.

    Args:
        examples: J.
        variances: v, ``[D]``.
        tensors: those that count; None: all.
    """
    spans, rest, total = examples.spans, [], variances.new_zeros(())
    for k in range(len(spans)) if tensors is None else tensors:
        outer = examples.outer(k)
        if outer is None or not outer.is_whole:
            rest.append(k)
        else:
            total = total + products_at_layer(outer, outer.by_unit(variances[spans[k]]))
    if rest:
        deviations = torch.cat([variances[spans[k]] for k in rest]).sqrt()
        halves = [examples.rows(part, rest) * deviations for part in examples.chunks()]
        total = total + torch.cat([half @ half.mT for half in halves])
    return total
