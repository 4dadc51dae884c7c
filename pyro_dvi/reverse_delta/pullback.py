# SPDX-License-Identifier: Apache-2.0
r"""Outputs of examples pulled back to the noise of the weights.

Gradients :math:`g_w` of one output of one example add up over all uses of a weight, and through the functions that make
weights of weights, before they are squared: :math:`\sum_w g_w^2\,\mathrm{Var}[w]`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.curvature.per_example import Contribution
from pyro_dvi.curvature.products import LinearMap
from pyro_dvi.curvature.rows import halves
from pyro_dvi.reverse_delta.calls import Call
from pyro_dvi.reverse_delta.rows import Shares, rows_of, shares_of

__all__ = ["Pullback", "Use", "gradients_at", "uses_behind"]

_BUDGET = 2**24  # elements of gradients of examples at a time


@dataclass(frozen=True)
class Use:
    """A use of weights that outputs depend on.

    Attributes:
        call: the function.
        shares: what each example adds to gradients; None where no rule says so.
        noise: variance of the output by noise of weights times that of inputs; None if inputs are certain.
    """

    call: Call
    shares: Shares | None
    noise: Tensor | None


def uses_behind(outputs: Tensor, calls: Sequence[Call]) -> list[Use]:
    """Return the uses of weights that outputs ``[B, K]`` depend on."""
    # Unequal weights, under which what several outputs do to a layer does not cancel by symmetry.
    weights = [torch.linspace(1, 2, n, dtype=outputs.dtype, device=outputs.device) for n in outputs.shape]
    sums = (outputs @ weights[1]) * weights[0]
    parts = halves(len(outputs), outputs.device)
    slopes = [gradients_at(calls, sums[part].sum()) for part in parts]
    found = []
    for call, *per_part in zip(calls, *slopes, strict=True):
        known = [slope for slope in per_part if slope is not None]
        if known:
            filled = [torch.zeros_like(known[0]) if slope is None else slope for slope in per_part]
            rows = rows_of(filled, parts)
            found.append(Use(call, None if rows is None else shares_of(call, rows), call.interaction()))
    return found


def gradients_at(calls: Sequence[Call], value: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a number in the outputs of calls; None where it does not depend on one."""
    if not calls:
        return ()
    places = [call.output for call in calls]
    return torch.autograd.grad(value, places, retain_graph=True, allow_unused=True)


class Pullback:
    """Variances of outputs from the noise of weights.

    Args:
        uses: the uses of weights that the outputs depend on.
        makers: the calls that make weights of others, in their order.
        examples: the number of examples.
    """

    def __init__(self, uses: Sequence[Use], makers: Sequence[Call], examples: int) -> None:
        self.fast = [(use, use.shares) for use in uses if use.shares is not None]
        self.slow = [use for use in uses if use.shares is None]
        self.makers, self.examples = makers, examples
        calls = [use.call for use in uses]
        times = Counter(key for call in (*calls, *makers) for key in call.weights)
        made = {id(call.result) for call in makers}
        self.weights = {
            key: w for call in (*calls, *makers) for key, w in call.weights.items() if key not in made
        }
        # A weight that is used once, with one row for each example, needs no gradients of these.
        self.contracted = [
            {
                key: _contracted(share, self.weights[key].variance)
                for key, share in shares.contributions.items()
                if times[key] == 1 and key in self.weights and shares.each == 1 and _is_single(share)
            }
            for _, shares in self.fast
        ]

    def variance(self, outputs: Tensor) -> Tensor:
        """Return the variance of one output of each example."""
        slopes = gradients_at([use.call for use, _ in self.fast], outputs.sum())
        with torch.no_grad():
            return self._pulled_back(outputs, slopes)

    def _pulled_back(self, outputs: Tensor, slopes: Sequence[Tensor | None]) -> Tensor:
        total = torch.zeros_like(outputs)
        deltas = []
        for (use, shares), contracted, slope in zip(self.fast, self.contracted, slopes, strict=True):
            if slope is None:
                continue
            if use.noise is not None:
                total += shares.rows.first(slope.square() * use.noise).reshape(self.examples, -1).sum(1)
            delta = shares.arrange(slope)
            total += sum(spread(delta) for spread in contracted.values())
            if len(contracted) < len(shares.contributions):
                deltas.append((shares, contracted, delta))
        if not deltas and not self.slow:
            return total
        step = max(1, _BUDGET // max(1, sum(w.variance.numel() for w in self.weights.values())))
        for start in range(0, self.examples, step):
            part = slice(start, min(start + step, self.examples))
            gradients: dict[int, Tensor] = {}
            for shares, contracted, delta in deltas:
                _add(
                    gradients, {k: g for k, g in shares.gradients(delta, part).items() if k not in contracted}
                )
            total[part] += self._without_rules(outputs, part, gradients)
            for call in reversed(self.makers):
                if id(call.result) in gradients:
                    _add(gradients, call.pulled_back(gradients.pop(id(call.result))))
            for key, gradient in gradients.items():
                total[part] += (
                    (gradient.square() * self.weights[key].variance).reshape(len(gradient), -1).sum(1)
                )
        return total

    def _without_rules(self, outputs: Tensor, part: slice, gradients: dict[int, Tensor]) -> Tensor | float:
        """Add gradients by a backward pass for each example; return what noise times noise adds."""
        if not self.slow:
            return 0.0
        seeds = torch.eye(self.examples, dtype=outputs.dtype, device=outputs.device)[part]
        slopes = LinearMap(outputs, [use.call.output for use in self.slow]).transposed(seeds)
        total: Tensor | float = 0.0
        for use, slope in zip(self.slow, slopes, strict=True):
            _add(gradients, use.call.pulled_back(slope))
            if use.noise is not None:
                total = total + (slope.square() * use.noise).reshape(len(slope), -1).sum(1)
        return total


def _add(total: dict[int, Tensor], found: Mapping[int, Tensor]) -> None:
    for key, gradient in found.items():
        total[key] = total[key] + gradient if key in total else gradient


def _is_single(share: Contribution) -> bool:
    """Whether gradients are outer products of two vectors."""
    return share.outer is not None and share.outer_inputs(slice(0, 1)).shape[1] == 1


def _contracted(share: Contribution, variance: Tensor) -> Callable[[Tensor], Tensor]:
    r""":math:`\sum_{pq} (\delta_{ip} a_{iq})^2 \mathrm{Var}[w_{pq}]` as a function of :math:`\delta`."""
    assert share.outer is not None
    of_output, inputs = share.outer.deltas, share.outer_inputs(slice(None))[:, 0].square()
    inputs_first = share.outer.inputs_first
    variance = variance.reshape((inputs.shape[1], -1) if inputs_first else (-1, inputs.shape[1]))
    terms = inputs @ (variance if inputs_first else variance.mT)
    return lambda delta: (of_output(delta)[:, 0].square() * terms).sum(1)
