# SPDX-License-Identifier: Apache-2.0
r"""Sums of squared per-example gradients as a by-product of one backward pass.

While the model runs, :class:`SquaredGradients` notes each layer that uses a latent weight. In the backward pass a hook
on the layer's output sees its gradient :math:`\delta_i`, and the squares follow from it and the layer's input; for a
linear layer with one product more,

.. math:: \sum_i g_i^2 = (\delta^2)^\top x^2, \qquad g_i = \delta_i x_i^\top .

A weight that is used several times keeps its per-example gradients until the last use has come by, so that cross terms
are exact.

Every function with a rule in :mod:`pyro_dvi.curvature.per_example` is served.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.core.weight_parts import WeightParts
from pyro_dvi.curvature.per_example.example_rules import Contribution, Rows
from pyro_dvi.curvature.per_example.proof import Finding, examined
from pyro_dvi.curvature.per_example.uses import Use, WeightUses, at_least_single
from pyro_dvi.curvature.products import LinearMap, batched_gradients
from pyro_dvi.errors import GuideError, UnsupportedError

_BUDGET = 1 << 26  # entries of gradients that the vectorised fallback may hold at a time
Deliver = Callable[[int, Tensor], None]


class SquaredGradients(WeightUses):
    """Note every use of the given tensors, for squares that are numbers.

    Attributes:
        values: these tensors by their numbers, until :meth:`watch` is called.
    """

    def __init__(self, values: Sequence[Tensor | None]) -> None:
        super().__init__(values)
        self.values = {k: v for k, v in enumerate(values) if v is not None}

    def prepared(self, argument: Any) -> Any:
        """Cut tensors out of the graph: it must not be held by its own hooks."""
        return super().prepared(argument.detach() if isinstance(argument, Tensor) else argument)

    def watch(self, served: dict[int, list[Use]], deliver: Deliver) -> None:
        """Let the next backward pass deliver the sums of squares of the tensors in ``served``.

        Args:
            served: a part of what :meth:`served` returned.
            deliver: called with the index of a tensor and its sum of squares, once all its uses have come by.
        """
        for k, uses in served.items():
            gathered = _Gathered(len(uses) > 1)
            for use in uses:
                hook = partial(gathered.arrived, [(use.contribution, use.rows)], use.output.output_nr)
                use.output.node.register_prehook(hook)
            self.values[k].register_hook(partial(_deliver, k, gathered, deliver))
        # Hooks hold what they need, and not their node; the graph must not be held twice.
        self._weights, self.values, self._normalised, self.parts = {}, {}, [], WeightParts()

    def measured(self, served: dict[int, list[Use]], outputs: Tensor, cotangent: Tensor) -> dict[int, Tensor]:
        r"""Return :math:`\sum_i (w_i\,\partial f_i)^2` for the tensors in ``served``, by a backward pass of its own.

        Args:
            served: a part of what :meth:`served` returned.
            outputs: f, one entry per example.
            cotangent: w of the same shape.
        """
        edges = [use.output for uses in served.values() for use in uses]
        if not edges or not outputs.requires_grad:
            return {k: torch.zeros_like(self.values[k]) for k in served}
        deltas = iter(torch.autograd.grad(outputs, edges, cotangent, retain_graph=True, allow_unused=True))
        found = {k: torch.zeros_like(self.values[k]) for k in served}
        for k, uses in served.items():
            passed = [(use, delta) for use in uses if (delta := next(deltas)) is not None]
            reached = [(use.contribution, use.arranged(delta)) for use, delta in passed]
            if reached:
                found[k] = squares_of(*zip(*reached, strict=True))
        return found

    def examined(self, served: dict[int, list[Use]], outputs: Tensor, seed: int = 0) -> Finding:
        """Say for which tensors in ``served`` the rules do not give the gradients of single examples.

        Shapes can deceive, and uses can stay unseen: see :mod:`pyro_dvi.curvature.per_example.proof`.

        Args:
            served: a part of what :meth:`served` returned.
            outputs: one entry per example.
            seed: see :func:`~pyro_dvi.curvature.per_example.proof.examined`.
        """
        return examined(served, self.values, outputs, seed)


def squares_of(uses: Sequence[Contribution], deltas: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of a weight, given the arranged gradients of the outputs of all its uses."""
    gathered = _Gathered(len(uses) > 1)
    for use, delta in zip(uses, deltas, strict=True):
        gathered.add(use, delta)
    squares = gathered.squares()
    assert squares is not None
    return squares


class _Gathered:
    """What has come by of the uses of one weight."""

    def __init__(self, several: bool) -> None:
        self._several = several
        self._gradients: Tensor | None = None
        self._squares: Tensor | None = None

    def add(self, use: Contribution, delta: Tensor) -> None:
        with torch.no_grad():
            if not self._several:
                self._squares = use.squares(delta)
                return
            gradients = use.gradients(delta)
            self._gradients = gradients if self._gradients is None else self._gradients + gradients

    def arrived(
        self, waiting: list[tuple[Contribution, Rows | None]], place: int, deltas: tuple[Tensor | None, ...]
    ) -> None:
        """Add a use, and let go of what it holds of the forward pass, as autograd does."""
        if not waiting:
            raise GuideError(
                "squared gradients come of the first backward pass of a loss only: evaluate it anew"
            )
        use, rows = waiting.pop()
        delta = deltas[place]
        if delta is not None and rows is not None:
            self.add(use, rows.first(at_least_single(delta.detach())))

    def squares(self) -> Tensor | None:
        """The sum of squares, once."""
        squares, gradients = self._squares, self._gradients
        self._squares = self._gradients = None
        return gradients.square().sum(0) if gradients is not None else squares


def _deliver(k: int, gathered: _Gathered, deliver: Deliver, gradient: Tensor) -> None:
    squares = gathered.squares()
    deliver(k, torch.zeros_like(gradient) if squares is None else squares.to(gradient.dtype))


def passes_of(outputs: Tensor, values: Sequence[Tensor]) -> int:
    """Backward passes that :func:`squares_without_rules` takes."""
    few, many = _split(outputs.numel(), values)
    return sum(values[k].numel() + 1 for k in few) + (outputs.numel() if many else 0)


def squares_without_rules(outputs: Tensor, cotangent: Tensor, values: Sequence[Tensor]) -> list[Tensor]:
    r"""Return :math:`\sum_i (w_i\,\partial_u f_i)^2` for every value, whatever the model.

    By a backward pass per example, or per element of u where these are far fewer.

    Args:
        outputs: f, one entry per example.
        cotangent: w of the same shape.
        values: the tensors u, which ``outputs`` may or may not depend on.
    """
    totals = [torch.zeros_like(v) for v in values]
    outputs, cotangent = outputs.reshape(-1), cotangent.reshape(-1)
    few, many = _split(len(outputs), values)
    for k in few:
        try:
            totals[k] = _pass_per_element(outputs, cotangent, values[k])
        except (RuntimeError, UnsupportedError):  # the model cannot be differentiated twice
            many = [*many, k]
    if many:
        found = pass_per_example(outputs, cotangent, [values[k] for k in many])
        for k, squares in zip(many, found, strict=True):
            totals[k] = squares
    return totals


def _split(num_examples: int, values: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    few = [k for k, value in enumerate(values) if 8 * value.numel() <= num_examples]
    return few, [k for k in range(len(values)) if k not in few]


def _pass_per_element(outputs: Tensor, cotangent: Tensor, value: Tensor) -> Tensor:
    """By columns of the Jacobian."""
    basis = torch.eye(value.numel(), dtype=value.dtype, device=value.device).reshape(-1, *value.shape)
    columns = LinearMap(outputs, [value]).forward([basis])
    return (columns * cotangent).square().sum(1).reshape(value.shape)


def pass_per_example(
    outputs: Tensor, cotangent: Tensor, values: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor]:
    """As :func:`squares_without_rules`, by a backward pass per example, maybe to be differentiated again."""
    outputs, cotangent = outputs.reshape(-1), cotangent.reshape(-1)
    totals = [torch.zeros_like(v) for v in values]
    together = max(1, min(64, _BUDGET // max(1, sum(v.numel() for v in values))))
    for rows in torch.arange(len(outputs), device=outputs.device).split(together):
        seeds = F.one_hot(rows, len(outputs)).to(outputs) * cotangent
        found = batched_gradients(outputs, values, seeds, together, create_graph=create_graph)
        totals = [total + g.square().sum(0) for total, g in zip(totals, found, strict=True)]
    return totals
