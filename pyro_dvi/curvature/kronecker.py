# SPDX-License-Identifier: Apache-2.0
r"""Kronecker factors of the Fisher information, from the inputs of a layer and the gradients at its outputs.

.. math::
    G_{\text{layer}} \approx B \otimes A, \qquad A = \sum_{i,t} c_i\, a_{it} a_{it}^\top, \qquad
    B = \frac{1}{T \sum_i c_i} \sum_{i,k,t} \delta_{ikt} \delta_{ikt}^\top

The weights c of examples are their scales, and zero for examples without observations.

Source: Martens & Grosse (2015); Grosse & Martens (2016), Eq. 25-27, for convolutions.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.example_gradients import ExampleGradients


class KroneckerFactors:
    """Factors of dense and convolutional layers that are used once, and the diagonal of all other tensors.

    Args:
        examples: gradients of the first batch, from which the layers are found.

    Attributes:
        layers: the factors.
        rest: indices of the tensors outside all layers.
        diagonal: sums of squared gradients of the tensors in ``rest``, ``[D]``; zero for all others.
    """

    def __init__(self, examples: ExampleGradients) -> None:
        numbers = range(len(examples.values))
        outer = {k: found for k in numbers if (found := examples.outer(k)) is not None}
        calls: dict[Any, list[int]] = {}
        for k in sorted(outer, key=lambda k: -examples.values[k].dim()):  # weights before their biases
            calls.setdefault(examples.call_of(k), []).append(k)
        self.layers: list[KroneckerLayer] = []
        for k, *others in calls.values():
            spans, device = [examples.spans[n] for n in (k, *others[:1])], examples.outputs.device
            weight, *bias = (torch.arange(span.start, span.stop, device=device) for span in spans)
            places = torch.cat([outer[k].by_unit(weight), *(b.unsqueeze(-1) for b in bias)], -1)
            self.layers.append(KroneckerLayer((k, *others[:1]), places))
        self.rest = [k for k in numbers if k not in outer]
        self.diagonal: Tensor | float = 0.0

    def add(self, examples: ExampleGradients) -> None:
        """Add a batch."""
        for layer in self.layers:
            layer.add(examples)
        if self.rest:
            self.diagonal = self.diagonal + examples.squares(self.rest)


@dataclass(eq=False)
class KroneckerLayer:
    r"""Sums for the Kronecker factors :math:`B \otimes A` of the Fisher information of a layer's weights W ``[p, q]``.

    Attributes:
        tensors: index of the weight and, if the layer has a bias, index of the bias. The input of the bias, 1, is then
            the last of the q inputs.
        places: positions of W in a flat vector, ``[p, q]``; None if they are not needed.
        inputs: A, the weighted sum of :math:`a a^\top` over examples and positions, ``[q, q]``.
        deltas: the sum of :math:`\delta \delta^\top` over the same terms, ``[p, p]``; B is this sum divided by
            ``positions``.
        positions: sum of the weights of the terms in A.
    """

    tensors: tuple[int, ...]
    places: Any = None
    inputs: Any = 0.0
    deltas: Any = 0.0
    positions: Any = 0

    def add(self, examples: ExampleGradients) -> None:
        """Add a batch."""
        outer = examples.outer(self.tensors[0])
        if outer is None:  # no gradient in this batch
            return
        for part in outer.chunks():
            a, delta = outer.parts(part)
            if len(self.tensors) > 1:  # the bias has an input of 1
                a = F.pad(a, (0, 1), value=1.0)
            weights = examples.weights[part].to(a).reshape(-1, 1, 1)
            self.positions += weights.sum() * a.shape[1]
            self.inputs = self.inputs + _gram(a * weights.sqrt())
            self.deltas = self.deltas + _gram(delta)


def nearest_product(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return r ``[p, 1]`` and c ``[q]`` such that log(r c) is nearest to the logarithm of a positive matrix."""
    logs = matrix.log()
    r = (logs.mean(1, keepdim=True) - logs.mean() / 2).exp()
    return r, (logs.mean(0) - logs.mean() / 2).exp()


def damped_factors(rows: Tensor, columns: Tensor, prior: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return factors whose Kronecker product approximates :math:`B \otimes A` plus a prior precision.

    .. math::
        \Bigl(B + \frac{1}{\pi} \operatorname{diag}(r)\Bigr) \otimes \bigl(A + \pi \operatorname{diag}(c)\bigr), \qquad
        \delta \approx r c^\top, \qquad
        \pi^2 = \frac{\operatorname{tr} A / \sum_j c_j}{\operatorname{tr} B / \sum_i r_i}

    If all weights have the same prior precision :math:`\gamma`, these are the paper's factors, with
    :math:`r = c = \sqrt\gamma`.

    Args:
        rows: B, ``[p, p]``.
        columns: A, ``[q, q]``.
        prior: :math:`\delta`, ``[p, q]``.

    Source: Martens & Grosse (2015), section 6.3.
    """
    r, c = nearest_product(prior)
    r = r.squeeze(-1)
    tiny = torch.finfo(rows.dtype).tiny ** 0.5  # for weights without a gradient
    ratio = (columns.trace() / c.sum()).clamp_min(tiny) / (rows.trace() / r.sum()).clamp_min(tiny)
    pi = ratio.sqrt()
    return rows + (r / pi).diag(), columns + (pi * c).diag()


def _gram(rows: Tensor) -> Tensor:
    """Return the sum of x x' over rows x ``[..., T, n]``; long runs of rows are not copied."""
    if rows.shape[-2] < rows.shape[-1]:
        rows = rows.flatten(0, -2)
    return (rows.mT @ rows).reshape(-1, rows.shape[-1], rows.shape[-1]).sum(0)
