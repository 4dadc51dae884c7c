# SPDX-License-Identifier: Apache-2.0
r"""Sums of squared per-example gradients, from rules for the uses of weights or from additional backward passes.

While the model runs, :class:`SquaredGradients` records each function that uses a latent weight. In the backward pass, a
hook on the output of the function receives the gradient :math:`\delta_i`, and the squares follow from this gradient and
the function's input. A linear layer needs one additional product,

.. math:: \sum_i g_i^2 = (\delta^2)^\top x^2, \qquad g_i = \delta_i x_i^\top .

If a weight is used several times, per-example gradients are kept until the last use, so that cross terms are exact.
Every function with a rule in :mod:`pyro_dvi.curvature.per_example` is supported.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from pyro_dvi.core.recorder import is_for_any_rows
from pyro_dvi.core.weight_parts import Places, WeightParts, WeightRecorder, name_of
from pyro_dvi.curvature.per_example.example_rules import (
    Arguments,
    Contribution,
    Use,
    at_least_single,
    has_rule,
    with_rows_of_examples,
)
from pyro_dvi.curvature.per_example.proof import Finding, Served, examined
from pyro_dvi.curvature.products import LinearMap, batched_gradients
from pyro_dvi.errors import GuideError, UnsupportedError

_BUDGET = 1 << 26  # maximum number of gradient entries of the vectorised fallback at a time
# Attributes of a tensor that do not use its values (unless they return a tensor, like ``w.T``).
_QUESTIONS = {"size", "dim", "numel", "is_floating_point", "is_complex", "stride", "is_contiguous"}
Deliver = Callable[[int, Tensor], None]


class SquaredGradients(WeightRecorder):
    """Records every use of the given tensors while the model runs, and sums squared per-example gradients.

    Args:
        values: the tensors that the model uses; None for a tensor that is transformed before its use.
        differentiable: whether squares and rows are differentiable; if not, hooks do not keep the graph alive.

    Attributes:
        values: the tensors by index, until :meth:`watch` is called.
    """

    others: ClassVar[frozenset[Callable]] = frozenset((F.batch_norm, torch.batch_norm))

    def __init__(self, values: Sequence[Tensor | None], *, differentiable: bool = False) -> None:
        super().__init__()
        self.values = {k: v for k, v in enumerate(values) if v is not None}
        self.differentiable = differentiable
        self._uses: Served = {k: [] for k in self.values}
        self._without_rule: dict[int, str] = {}  # the first function without a rule
        # Batch normalisation in training mode, with its input.
        self._normalised: list[tuple[Node, Tensor]] = []
        for k, value in self.values.items():
            self.parts.add(k, value)

    def used(self, func: Callable, args: tuple, kwargs: dict[str, Any], output: Any, found: Places) -> None:
        if not isinstance(output, Tensor):
            if name_of(func) in _QUESTIONS or getattr(func, "__name__", "") == "__get__":
                return
        elif not output.requires_grad:  # inside no_grad, so a constant of the model
            return
        if func in self.others and (args[5] if len(args) > 5 else kwargs.get("training", False)):
            self._normalised.append((output.grad_fn, args[0] if args else kwargs["input"]))
        if not found:
            return
        arguments = Arguments(args, kwargs, tuple(p for p, _ in found)).prepared(not self.differentiable)
        for place, part in found:
            if place is not None and isinstance(output, Tensor) and has_rule(func):
                edge = get_gradient_edge(output)
                self._uses[part.key].append(Use(func, place, arguments, part, output.shape, edge))
            else:
                self._without_rule.setdefault(part.key, name_of(func))

    def uses(self) -> Served:
        """Return the uses of tensors that are used only by functions with a rule."""
        return {k: uses for k, uses in self._uses.items() if uses and k not in self._without_rule}

    def served(self, num_examples: int) -> Served:
        """Return the uses of the tensors for which every use may give per-example gradients."""
        return with_rows_of_examples(self.uses(), num_examples)

    def obstacle(self, k: int) -> str:
        """Return the reason why no rules apply to tensor ``k``."""
        uses = self._uses.get(k)
        if uses is None:
            return "is transformed before the model uses it"
        names = self._without_rule.get(k) or ", ".join(dict.fromkeys(name_of(use.function) for use in uses))
        if not names:
            return "is not used by any function that records gradients"
        return f"is used by {names}, which has no rule for per-example gradients with these arguments"

    def examined(self, served: Served, outputs: Tensor, seed: int = 0) -> Finding:
        """Find the tensors in ``served`` for which the rules do not give per-example gradients.

        The check is needed because shapes can be misleading and uses can be missed; see
        :func:`~pyro_dvi.curvature.per_example.proof.examined`. For batch normalisation in training mode, which mixes
        all examples, the statistics are held constant.
        """
        if is_for_any_rows():  # a recording reads no values, and its results are compared as a whole
            return Finding(set(), set())
        with ExitStack() as undo:
            for node, x in self._normalised:
                undo.callback(node.register_hook(partial(_divided, x)).remove)
            return examined(served, self.values, outputs, seed)

    def watch(self, served: Served, deliver: Deliver) -> None:
        """Compute the sums of squares of the tensors in ``served`` in the next backward pass.

        Args:
            served: a subset of the result of :meth:`served`.
            deliver: function that is called with the index of a tensor and its sum of squares, after the tensor's last
                use.
        """
        for k, uses in served.items():
            gathered = _Gathered(len(uses) > 1)
            for use in uses:
                hook = partial(gathered.arrived, [(use.contribution, use.rows)], use.output.output_nr)
                use.output.node.register_prehook(hook)
            self.values[k].register_hook(partial(gathered.deliver, k, deliver))
        # Hooks do not refer to their node, so that the graph is not kept alive.
        self._uses, self.values, self._normalised, self.parts = {}, {}, [], WeightParts()

    def measured(self, served: Served, outputs: Tensor, cotangent: Tensor) -> dict[int, Tensor]:
        r"""Return :math:`\sum_i (w_i\,\partial f_i)^2` for the tensors in ``served``, with a separate backward pass.

        Args:
            served: a subset of the result of :meth:`served`.
            outputs: f, one entry per example.
            cotangent: w, of the same shape.
        """
        edges = [use.output for uses in served.values() for use in uses]
        if not edges or not outputs.requires_grad:
            return {k: torch.zeros_like(self.values[k]) for k in served}
        again = self.differentiable
        options: Any = {"retain_graph": True, "create_graph": again, "allow_unused": True}
        deltas = iter(torch.autograd.grad(outputs, edges, cotangent, **options))
        found = {}
        for k, uses in served.items():
            passed = [(use, delta) for use in uses if (delta := next(deltas)) is not None]
            reached = [(use.contribution, use.arranged(delta)) for use, delta in passed]
            found[k] = squares_of(reached, again) if reached else torch.zeros_like(self.values[k])
        return found


def squares_of(uses: Sequence[tuple[Contribution, Tensor]], differentiable: bool = False) -> Tensor:
    """Return the sum of squares of a weight, given all its uses with the arranged gradients of their outputs."""
    with torch.set_grad_enabled(differentiable):
        if len(uses) == 1 and not differentiable:
            return uses[0][0].squares(uses[0][1])
        gradients = [use.gradients(delta) for use, delta in uses]
        return sum(gradients[1:], gradients[0]).square().sum(0)


class _Gathered:
    """The accumulated squares of a weight with one use, or per-example gradients of a weight with several uses."""

    def __init__(self, several: bool) -> None:
        self._several = several
        self._total: Tensor | None = None

    @torch.no_grad()
    def arrived(self, waiting: list[Any], place: int, deltas: tuple[Tensor | None, ...]) -> None:
        """Add a use, and release its tensors of the forward pass, as autograd does."""
        if not waiting:
            raise GuideError(
                "squared gradients are computed only in the first backward pass of a loss: evaluate the loss again"
            )
        (use, rows), delta = waiting.pop(), deltas[place]
        if delta is None:
            return
        arranged = rows.first(at_least_single(delta.detach()))
        found = use.gradients(arranged) if self._several else use.squares(arranged)
        self._total = found if self._total is None else self._total + found

    def deliver(self, k: int, deliver: Deliver, gradient: Tensor) -> None:
        """Deliver the sum of squares once."""
        total, self._total = self._total, None
        if total is not None and self._several:
            total = total.square().sum(0)
        deliver(k, torch.zeros_like(gradient) if total is None else total.to(gradient.dtype))


def _divided(x: Tensor, inputs: tuple[Tensor | None, ...], outputs: tuple[Tensor, ...]) -> tuple | None:
    """Return the gradient of ``x``: the gradient of the output divided by the standard deviation of its channel.

    No gradient passes through the statistics, because they mix rows, and none passes through the weight.
    """
    if inputs[0] is None:
        return None
    variance = x.detach().var([k for k in range(x.dim()) if k != 1], correction=0, keepdim=True)
    gradient = outputs[0].to(x.dtype) * (variance + 1e-5).rsqrt()
    # A hook must keep the dtype, which autocast may have lowered.
    return gradient.to(inputs[0].dtype), *inputs[1:]


# Without rules ---------------------------------------------------------------------------------------------------


def squares_without_rules(outputs: Tensor, cotangent: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    r"""Return :math:`\sum_i (w_i\,\partial_u f_i)^2` for every value, for any model.

    This takes one backward pass per example, or per element of u if there are far fewer elements.

    Args:
        outputs: f, one entry per example.
        cotangent: w, of the same shape.
        values: the tensors u; ``outputs`` need not depend on all of them.
    """
    totals = [torch.zeros_like(v) for v in values]
    outputs, cotangent = outputs.reshape(-1), cotangent.reshape(-1)
    few = [k for k, value in enumerate(values) if 8 * value.numel() <= len(outputs)]
    many = [k for k in range(len(values)) if k not in few]
    for k in few:
        try:
            basis = torch.eye(values[k].numel()).to(values[k]).reshape(-1, *values[k].shape)
            columns = LinearMap(outputs, [values[k]]).forward([basis])
            totals[k] = (columns * cotangent).square().sum(1).reshape(values[k].shape)
        except (RuntimeError, UnsupportedError):  # the model is not twice differentiable
            many = [*many, k]
    if many:
        found = pass_per_example(outputs, cotangent, [values[k] for k in many])
        for k, squares in zip(many, found, strict=True):
            totals[k] = squares
    return totals


def pass_per_example(
    outputs: Tensor, cotangent: Tensor, values: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor]:
    """Return the sums of :func:`squares_without_rules` from one backward pass per example."""
    outputs, cotangent = outputs.reshape(-1), cotangent.reshape(-1)
    totals = [torch.zeros_like(v) for v in values]
    together = max(1, min(64, _BUDGET // max(1, sum(v.numel() for v in values))))
    for rows in torch.arange(len(outputs), device=outputs.device).split(together):
        seeds = F.one_hot(rows, len(outputs)).to(outputs) * cotangent
        found = batched_gradients(outputs, values, seeds, together, create_graph=create_graph)
        totals = [total + g.square().sum(0) for total, g in zip(totals, found, strict=True)]
    return totals
