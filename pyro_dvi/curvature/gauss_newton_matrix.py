# SPDX-License-Identifier: Apache-2.0
r"""The Gauss-Newton matrix as a matrix, :math:`G = \sum_{ik} J_{ik}^\top J_{ik}`, J being that of weighted outputs.

With gradients that are outer products, :math:`J_{ik} = \delta_{ik} a_i^\top`, the block of two layers is

.. math::
    G_{(p,q),(p',q')} = \sum_i \Bigl(\sum_k \delta_{ikp}\,\delta'_{ikp'}\Bigr)\,a_{iq}\,a'_{iq'},

one product over examples where rows of J would need one over examples and outputs.
"""

from itertools import combinations_with_replacement

import torch
from torch import Tensor

from pyro_dvi.curvature.example_gradients import ExampleGradients, OuterGradients

_CHUNK = 1 << 24  # entries of products of factors that are formed at a time


def add_gauss_newton_matrix(examples: ExampleGradients, total: Tensor) -> None:
    """Add G to ``total`` [D, D] in place.

    Args:
        examples: J of B examples with K outputs.
        total: laid out like the examples' tensors, one after the other.
    """
    spans, layers = examples.spans, examples.single
    _add_strip(examples, total, [spans[k] for k in range(len(spans)) if k not in layers])
    for (k, one), (other, two) in combinations_with_replacement(layers.items(), 2):
        block = _own_block(one) if k == other else _block(one, two)
        total[spans[k], spans[other]] += block
        if k != other:
            total[spans[other], spans[k]] += block.mT


def _add_strip(examples: ExampleGradients, total: Tensor, spans: list[slice]) -> None:
    """Add the rows and columns of tensors whose gradients are no single outer products, from rows of J."""
    if not spans:
        return
    columns = torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(total.device)
    strip = total.new_zeros(len(columns), total.shape[1])
    for part in examples.chunks():
        rows = examples.rows(part).flatten(0, 1)
        strip.addmm_(rows[:, columns].mT, rows)
    total[columns] += strip
    others = torch.ones(total.shape[1], dtype=torch.bool, device=total.device)
    others[columns] = False
    total[others.nonzero(), columns] += strip[:, others].mT


def _own_block(layer: OuterGradients) -> Tensor:
    """The block of a layer with itself, from pairs of units in one order only."""
    total, pairs = None, None
    for part in _chunks(layer, layer):
        a, delta = layer.factors(part)
        if pairs is None:
            p, q = delta.shape[-1], a.shape[-1]
            pairs = [torch.triu_indices(n, n, device=a.device) for n in (p, q)]
        (i, j), (r, s) = pairs
        left = torch.einsum("mki,mkj->mij", delta, delta)[:, i, j]
        product = left.mT @ (a[:, r] * a[:, s])
        total = product if total is None else total.add_(product)
    assert total is not None and pairs is not None
    places = [_pair_places(n, pair) for n, pair in zip((p, q), pairs, strict=True)]
    block = total[places[0]][:, places[1]].reshape(p, p, q, q)
    return _laid_out(block, layer, layer)


def _block(one: OuterGradients, two: OuterGradients) -> Tensor:
    total = None
    for part in _chunks(one, two):
        a, delta = one.factors(part)
        b, gamma = two.factors(part)
        left = torch.einsum("mki,mkj->mij", delta, gamma).flatten(1)
        right = torch.einsum("mi,mj->mij", a, b).flatten(1)
        product = left.mT @ right
        total = product if total is None else total.add_(product)
    assert total is not None
    sizes = (delta.shape[-1], gamma.shape[-1], a.shape[-1], b.shape[-1])
    return _laid_out(total.reshape(sizes), one, two)


def _chunks(one: OuterGradients, two: OuterGradients) -> list[slice]:
    a, delta = one.factors(slice(0, 1))
    b, gamma = two.factors(slice(0, 1))
    entries = delta.shape[-1] * gamma.shape[-1] + a.shape[-1] * b.shape[-1]
    count = max(1, _CHUNK // entries)
    return [slice(start, start + count) for start in range(0, one.num_examples, count)]


def _pair_places(n: int, pairs: Tensor) -> Tensor:
    """Where the pair (i, j), or (j, i), stands in the list of pairs, for all n * n of them."""
    places = torch.empty(n, n, dtype=torch.long, device=pairs.device)
    order = torch.arange(pairs.shape[1], device=pairs.device)
    places[pairs[0], pairs[1]] = order
    places[pairs[1], pairs[0]] = order
    return places.reshape(-1)


def _laid_out(block: Tensor, one: OuterGradients, two: OuterGradients) -> Tensor:
    """Bring ``[p, p', q, q']`` into the order of the weights."""
    first = (2, 0) if one.inputs_first else (0, 2)
    second = (3, 1) if two.inputs_first else (1, 3)
    block = block.permute(*first, *second)
    return block.reshape(block.shape[0] * block.shape[1], -1)
