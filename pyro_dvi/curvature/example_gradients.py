# SPDX-License-Identifier: Apache-2.0
r"""Explicit gradients of the outputs of single examples, :math:`J_{ik} = \partial_u f_{ik}`.

One backward pass per output k gives the gradients of all examples at every layer. The layer's rule
(:mod:`pyro_dvi.curvature.per_example`) computes rows of J from these gradients. For tensors without a rule, rows are
computed from products with J.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, combinations_with_replacement
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.core.recorder import is_for_any_rows, structural
from pyro_dvi.curvature.per_example.example_rules import Contribution, Rows, Use, at_least_single
from pyro_dvi.curvature.per_example.proof import Served, warn_of_disproved
from pyro_dvi.curvature.products import LinearMap, gradients_at, vectors_together
from pyro_dvi.curvature.squared_gradients import (
    SquaredGradients,
    pass_per_example,
    squares_of,
    squares_without_rules,
)

_KEPT = 1 << 26  # maximum number of stored gradient entries at layers
_CHUNK = 1 << 23  # entries of rows of J computed at a time
_CACHE = 1 << 19  # entries that fit into a processor's cache
_PRODUCTS = 1 << 24  # entries of products of factors computed at a time


class OuterGradients:
    r"""A weight that is used once, with gradients :math:`\sum_t \delta_{ikt} a_{it}^\top`.

    Args:
        contribution: contribution of each example to the gradient.
        deltas: gradients of the layer's output, ``[K, B, ...]``.
        entries: indices of the entries of the flat weight to include in rows; None means all.

    Attributes:
        inputs_first: whether the weight has its inputs in its first dimension.
        num_outputs: K.
        num_examples: B.
        is_whole: whether rows have all entries of the weight.
    """

    def __init__(self, contribution: Contribution, deltas: Tensor, entries: Tensor | None = None) -> None:
        assert contribution.outer is not None
        self.inputs_first = contribution.outer.inputs_first
        self._inputs, self._of_output = contribution.outer_inputs, contribution.outer.deltas
        self._deltas, self._entries = deltas, entries
        self.num_outputs, self.num_examples = deltas.shape[:2]
        self.is_whole = entries is None

    @property
    def is_single(self) -> bool:
        """Whether each gradient is a single outer product, of which all entries are included."""
        return self.is_whole and self._inputs(slice(0, 1)).shape[1] == 1

    @property
    def inputs(self) -> Tensor:
        """The inputs a ``[B, T, q]``."""
        return self._inputs(slice(None))

    def chunks(self, size: int = 0) -> Iterator[slice]:
        """Yield groups of examples to process together; ``size`` is the additional memory per example."""
        if is_for_any_rows():
            yield slice(None)
            return
        a, delta = self.parts(slice(0, 1))
        together = _CACHE if delta.device.type == "cpu" else _CHUNK
        count = max(1, together // (a.numel() + delta.numel() + size))
        for start in range(0, self.num_examples, count):
            yield slice(start, start + count)

    def parts(self, part: slice) -> tuple[Tensor, Tensor]:
        """Return the inputs a ``[m, T, q]`` and the gradients delta ``[K, m, T, p]`` of some examples."""
        delta = self._deltas[:, part]
        if is_for_any_rows():  # torch.export cannot tell that a dimension of K m can be split
            return self._inputs(part), torch.vmap(self._of_output)(delta)
        return self._inputs(part), self._of_output(delta.flatten(0, 1)).unflatten(0, delta.shape[:2])

    def factors(self, part: slice, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
        """Return inputs a ``[m, q]`` and delta ``[m, K, p]`` of examples whose gradients are single outer products."""
        a, delta = self.parts(part)
        return a.squeeze(1).to(dtype), delta.squeeze(2).transpose(0, 1).to(dtype)

    def by_unit(self, entries: Tensor) -> Tensor:
        """Reshape values for the entries of whole units, ``[size, ...]``, to ``[p, q, ...]``."""
        if self.inputs_first:
            return entries.unflatten(0, (self._num_inputs, -1)).transpose(0, 1)
        return entries.unflatten(0, (-1, self._num_inputs))

    @cached_property
    def _num_inputs(self) -> int:
        return self._inputs(slice(0, 1)).shape[-1]

    def rows(self, part: slice) -> Tensor:
        """Return the gradients ``[m, K, size]``."""
        a, delta = self.parts(part)
        if self._entries is None:
            found = (delta.permute(1, 0, 3, 2).flatten(1, 2) @ a).unflatten(1, (len(delta), -1))
            return (found.mT if self.inputs_first else found).flatten(2)
        left, right = (a, delta) if self.inputs_first else (delta, a)
        i, j = self._entries // right.shape[-1], self._entries % right.shape[-1]
        count = max(1, _CHUNK // max(1, delta[:, 0, :, 0].numel() * len(i)))  # examples at a time
        pairs = zip(left.split(count, -3), right.split(count, -3), strict=True)
        return torch.cat([(x[..., i] * y[..., j]).sum(-2) for x, y in pairs], -2).transpose(0, 1)


class ExampleGradients:
    r"""The Jacobian of outputs f with respect to several tensors, example by example.

    Status: exact. Two backward passes verify that the layers' rules give the gradients of single examples.

    Args:
        recorder: the context in which the model ran; it has the tensors u.
        outputs: f, ``[B, K]``, a node of the graph of these tensors. If outputs have weights, f must include them.
        entries: for each tensor, by its index, the indices of the entries to include in rows. Tensors that are missing
            are included with all entries; so are all tensors if this is None.
        names: names of the tensors, for warnings.
        served: uses of tensors whose rules were verified before; None means that rules are verified now.
        weights: weights of the examples in Kronecker factors, ``[B]``, zero for examples without observations; outputs
            include their square roots. None means ones.

    Attributes:
        sizes: number of entries of a row for each tensor.
        size: D, number of entries of a row.
        spans: the slice of each tensor in a row.
    """

    def __init__(
        self,
        recorder: SquaredGradients,
        outputs: Tensor,
        entries: Mapping[int, Tensor] | None = None,
        names: Sequence[str] = (),
        served: Served | None = None,
        weights: Tensor | None = None,
    ) -> None:
        self.recorder, self.values, self.outputs = recorder, list(recorder.values.values()), outputs
        self._entries = {} if entries is None else entries
        self.weights = outputs.new_ones(len(outputs)) if weights is None else weights
        if served is None:
            served = recorder.served(len(outputs))
            found = recorder.examined(served, outputs)
            warn_of_disproved(served, found.wrong, names)
            served = found.kept(served)
        self._uses = served
        numbers = {k: v.numel() for k, v in enumerate(self.values)}
        self.sizes = [len(self._entries[k]) if k in self._entries else n for k, n in numbers.items()]
        self.size, ends = sum(self.sizes), accumulate(self.sizes)
        self.spans = [slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True)]

    @property
    def held(self) -> int:
        """Number of gradient entries at layers that must be stored to compute rows."""
        places = {use.output: use.shape.numel() for uses in self._uses.values() for use in uses}
        return self.outputs.shape[1] * sum(places.values())

    @property
    def cheap(self) -> bool:
        """Whether rules compute most of a row, and the gradients that they need fit into memory."""
        covered = sum(self.sizes[k] for k in self._uses)
        return 2 * covered > self.size and self.held <= _KEPT

    def squares(self, tensors: Sequence[int] | None = None) -> Tensor:
        r"""Return :math:`\sum_{ik} J_{ik}^2`, [D]; zero for tensors not in ``tensors``.

        Args:
            tensors: indices of the tensors to include; None means all.
        """
        total = self.values[0].new_zeros(self.size)

        def add(k: int, found: Tensor) -> None:
            total[self.spans[k]] += found.reshape(-1)[self._entries.get(k, slice(None))]

        wanted = range(len(self.values)) if tensors is None else tensors
        uses = {k: self._uses[k] for k in wanted if k in self._uses}
        at_once = max(1, _KEPT * self.outputs.shape[1] // max(1, self.held))
        for units in self._units.split(at_once) if uses else ():
            deltas = self._deltas if len(units) == len(self._units) else self._deltas_of(units)
            for k, calls in uses.items():
                reached = _arranged(calls, deltas)
                for n in range(len(units)) if reached else ():
                    of_unit = [(use.contribution, delta[n]) for use, delta in reached]
                    add(k, squares_of(of_unit, self.recorder.differentiable))
        rest = [k for k in wanted if k not in uses]
        for output in self.outputs.unbind(1) if rest else ():
            given = output, torch.ones_like(output), [self.values[k] for k in rest]
            if self.recorder.differentiable:
                others = pass_per_example(*given, create_graph=True)
            else:
                others = squares_without_rules(*given)
            for k, found in zip(rest, others, strict=True):
                add(k, found)
        return total

    def outer(self, k: int) -> OuterGradients | None:
        """Return the outer products of tensor ``k``; None if it has no such rule or several uses."""
        uses = self._uses.get(k, [])
        if len(uses) > 1 or any(use.contribution.outer is None for use in uses):
            return None
        reached = _arranged(uses, self._deltas)
        return OuterGradients(uses[0].contribution, reached[0][1], self._entries.get(k)) if reached else None

    def shared(self, k: int) -> OuterGradients | None:
        r"""Return the outer products of tensor ``k`` with the :math:`\delta` of one example, if all have the same.

        This holds in a last layer whose outputs are those of the model. For many outputs, it saves memory.
        """
        uses = self._uses.get(k, [])
        if len(uses) != 1 or uses[0].contribution.outer is None or uses[0].rows != Rows(0, len(self.outputs)):
            return None
        probe = torch.arange(1.0, 1 + len(self._units)).cos().to(self.outputs).unsqueeze(0)
        delta = self._deltas_of(probe)[uses[0].output]
        if delta is None or not structural((delta == delta[:, :1]).all()):
            return None
        parts = [self._deltas_of(units)[uses[0].output][:, :1].clone() for units in self._units.split(64)]
        return OuterGradients(uses[0].contribution, at_least_single(torch.cat(parts)), self._entries.get(k))

    @cached_property
    def single(self) -> dict[int, OuterGradients]:
        """The tensors whose gradients are single outer products."""
        found = {k: self.outer(k) for k in range(len(self.values))}
        return {k: outer for k, outer in found.items() if outer is not None and outer.is_single}

    def call_of(self, k: int) -> Any:
        """Return the output of the only call that uses a tensor, or None; weight and bias share their call."""
        uses = self._uses.get(k, [])
        return uses[0].output if len(uses) == 1 else None

    def chunks(self) -> Iterator[slice]:
        """Yield parts of the examples whose rows can be computed together."""
        if is_for_any_rows():
            yield slice(None)
            return
        count = max(1, _CHUNK // max(1, self.outputs.shape[1] * self.size))
        for start in range(0, len(self.outputs), count):
            yield slice(start, min(start + count, len(self.outputs)))

    def rows(self, part: slice, tensors: Sequence[int] | None = None) -> Tensor:
        """Return J of some examples, ``[m, K, size]``, with columns in the order of the tensors (None: all)."""
        wanted = range(len(self.values)) if tensors is None else tensors
        outer = {k: self.outer(k) for k in wanted}
        whole = {k: self._whole[k][part] for k in wanted if k in self._whole}
        missing = [k for k in wanted if outer[k] is None and k not in whole]
        whole.update(zip(missing, self._by_products(part, missing), strict=True))
        columns = [
            whole[k][..., self._entries.get(k, slice(None))] if found is None else found.rows(part)
            for k, found in outer.items()
        ]
        return torch.cat(columns, -1)

    @cached_property
    def _units(self) -> Tensor:
        """One-hot cotangents of the outputs, ``[K, K]``."""
        return torch.eye(self.outputs.shape[1]).to(self.outputs)

    @cached_property
    def _deltas(self) -> dict:
        """Gradients ``[K, B, ...]`` of all outputs at each use; None if a use has no gradient."""
        return self._deltas_of(self._units)

    def _deltas_of(self, units: Tensor) -> dict:
        edges = list(dict.fromkeys(use.output for uses in self._uses.values() for use in uses))
        # The graph saved about two numbers per number that passes through it.
        saved = 2 * self.held // len(self._units) * self.outputs.element_size()
        seeds = units.unsqueeze(1).repeat(1, len(self.outputs), 1)
        together = len(units) if is_for_any_rows() else vectors_together(saved, seeds.device)
        found = gradients_at(self.outputs, edges, seeds, together, create_graph=self.recorder.differentiable)
        return dict(zip(edges, found, strict=True))

    @cached_property
    def _whole(self) -> dict[int, Tensor]:
        """J ``[B, K, size]`` of all examples, for tensors that are small or have no rule for parts."""
        found = {}
        rows, outputs = self.outputs.shape
        for k, value in enumerate(self.values):
            if self.outer(k) is not None:
                continue
            uses = self._uses.get(k)
            if uses is not None and rows * outputs * value.numel() <= _KEPT:
                found[k] = self._by_rules(uses, value)
            elif 8 * value.numel() <= rows * outputs and not self.recorder.differentiable:
                basis = torch.eye(value.numel()).to(value).reshape(-1, *value.shape)
                found[k] = LinearMap(self.outputs, [value]).forward([basis]).movedim(0, -1)
        return found

    def _by_rules(self, uses: list[Use], value: Tensor) -> Tensor:
        total = self.outputs.new_zeros(*self.outputs.shape, value.numel())
        for use, deltas in _arranged(uses, self._deltas):
            rows = [use.contribution.gradients(delta).reshape(len(delta), -1) for delta in deltas]
            total += torch.stack(rows, 1).to(total)
        return total

    def _by_products(self, part: slice, tensors: list[int]) -> list[Tensor]:
        if not tensors:
            return []
        rows, outputs = self.outputs.shape
        places = torch.arange(rows * outputs).reshape(rows, outputs)[part].flatten()
        seeds = F.one_hot(places, rows * outputs).to(self.outputs).reshape(-1, rows, outputs)
        jacobian = LinearMap(self.outputs, [self.values[k] for k in tensors])
        found = jacobian.transposed(seeds, create_graph=self.recorder.differentiable)
        return [g.reshape(-1, outputs, g[0].numel()) for g in found]


def _arranged(uses: Sequence[Use], deltas: Mapping[Any, Tensor | None]) -> list[tuple[Use, Tensor]]:
    """Return the uses that receive gradients, with these gradients ``[K, B, ...]``."""
    found = []
    for use in uses:
        delta = deltas[use.output]
        if delta is not None and use.rows == Rows(0, delta.shape[1]):
            found.append((use, at_least_single(delta)))
        elif delta is not None:
            found.append((use, torch.stack([use.arranged(one) for one in delta])))
    return found


def by_examples(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Tensor]:
    """Gather the products w f of pairs (f, w) ``[*batch_shape, K]`` into one tensor ``[B, K]`` for each size B.

    In gradients of these tensors, w is treated as a constant factor of f, but the gradients are functions of w.
    """
    groups: dict[int, list[Tensor]] = {}
    for f, w in pairs:
        rows = len(f) if f.dim() > 1 else 1
        groups.setdefault(rows, []).append(_Weighted.apply(f, w).reshape(rows, -1))
    return [torch.cat(group, 1) for group in groups.values()]


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, f: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w)
        return f * w

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.saved_tensors[0], None


# The Gauss-Newton matrix ----------------------------------------------------------------------------------------


def add_gauss_newton_matrix(examples: ExampleGradients, total: Tensor) -> None:
    r"""Add :math:`G = \sum_{ik} J_{ik}^\top J_{ik}` to ``total`` [D, D] in place.

    If gradients are outer products, :math:`J_{ik} = \delta_{ik} a_i^\top`, the block of two layers is

    .. math::
        G_{(p,q),(p',q')} = \sum_i \Bigl(\sum_k \delta_{ikp}\,\delta'_{ikp'}\Bigr)\,a_{iq}\,a'_{iq'},

    This is a sum over examples. With rows of J, the sum would run over examples and outputs.

    Args:
        examples: J of B examples with K outputs.
        total: matrix in the order of the concatenated tensors of ``examples``.
    """
    spans, layers = examples.spans, examples.single
    _add_strip(examples, total, [spans[k] for k in range(len(spans)) if k not in layers])
    for (k, one), (other, two) in combinations_with_replacement(layers.items(), 2):
        block = _block(one, two, total)
        total[spans[k], spans[other]] += block
        if k != other:
            total[spans[other], spans[k]] += block.mT


def _add_strip(examples: ExampleGradients, total: Tensor, spans: list[slice]) -> None:
    """Add rows and columns of tensors whose gradients are not single outer products, computed from rows of J."""
    if not spans:
        return
    columns = torch.cat([torch.arange(span.start, span.stop) for span in spans]).to(total.device)
    strip = total.new_zeros(len(columns), total.shape[1])
    for part in examples.chunks():
        rows = examples.rows(part).flatten(0, 1).to(total)
        strip.addmm_(rows[:, columns].mT, rows)
    total[columns] += strip
    others = torch.ones(total.shape[1], dtype=torch.bool, device=total.device)
    others[columns] = False
    total[others.nonzero(), columns] += strip[:, others].mT


def _block(one: OuterGradients, two: OuterGradients, like: Tensor) -> Tensor:
    """Return the block of two layers, in the order of their weights and in the dtype of ``like``."""
    (a, delta), (b, gamma) = one.factors(slice(0, 1)), two.factors(slice(0, 1))
    p, r, q, s = (x.shape[-1] for x in (delta, gamma, a, b))
    total = like.new_zeros(p * r, q * s)
    count = max(1, _PRODUCTS // (p * r + q * s))
    for start in range(0, one.num_examples, count):
        part = slice(start, start + count)
        (a, delta), (b, gamma) = one.factors(part, like.dtype), two.factors(part, like.dtype)
        left = torch.einsum("mki,mkj->mij", delta, gamma).flatten(1)
        total.addmm_(left.mT, torch.einsum("mi,mj->mij", a, b).flatten(1))
    rows = (2, 0) if one.inputs_first else (0, 2)
    columns = (3, 1) if two.inputs_first else (1, 3)
    return total.reshape(p, r, q, s).permute(*rows, *columns).reshape(p * q, r * s)
