# SPDX-License-Identifier: Apache-2.0
r"""Outputs of examples pulled back to the noise of the weights.

Gradients :math:`g_w` of one output of one example add up over all uses of a weight, and through the functions that make
weights of weights, before they are squared: :math:`\sum_w g_w^2\,\mathrm{Var}[w]`.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pyro_dvi.curvature.per_example import Contribution
from pyro_dvi.curvature.products import LinearMap
from pyro_dvi.curvature.reverse_delta.calls import Call
from pyro_dvi.curvature.reverse_delta.rows import Shares, rows_of, shares_of
from pyro_dvi.curvature.rows import row_weights

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
    # Unequal numbers, under which what several outputs do to a layer does not cancel by symmetry.
    sums = outputs @ torch.linspace(1, 2, outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    weights = row_weights(len(outputs), outputs)
    slopes = [gradients_at(calls, total.sum()) for total in (sums, sums * weights)]
    found = []
    for call, plain, weighted in zip(calls, *slopes, strict=True):
        if plain is not None and weighted is not None:
            rows = rows_of(plain, weighted, weights)
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
        calls = [*(use.call for use in uses), *makers]
        times = Counter(key for call in calls for key in call.weights)
        made = {id(call.result) for call in makers}
        self.weights = {k: w for call in calls for k, w in call.weights.items() if k not in made}
        once = {key for key in self.weights if times[key] == 1}
        self.makers, self.examples = makers, examples
        self.fast = [_ByRules(use, use.shares, once) for use in uses if use.shares is not None]
        self.slow = [use for use in uses if use.shares is None]

    def variance(self, outputs: Tensor) -> Tensor:
        """Return the variance of one output of each example."""
        slopes = gradients_at([ruled.use.call for ruled in self.fast], outputs.sum())
        reached = [(r, slope) for r, slope in zip(self.fast, slopes, strict=True) if slope is not None]
        with torch.no_grad():
            total = torch.zeros_like(outputs)
            for ruled, slope in reached:
                total += ruled.without_gradients(slope)
            deltas = [(r.shares, r.shares.arrange(slope)) for r, slope in reached if r.shares.contributions]
            if deltas or self.slow:
                size = sum(weight.variance.numel() for weight in self.weights.values())
                for part in torch.arange(self.examples).split(max(1, _BUDGET // max(1, size))):
                    rows = slice(int(part[0]), int(part[-1]) + 1)
                    total[rows] += self._by_gradients(outputs, deltas, rows)
        return total

    def _by_gradients(
        self, outputs: Tensor, deltas: Sequence[tuple[Shares, Tensor]], part: slice
    ) -> Tensor | float:
        """What is left for some examples, by their gradients."""
        total: Tensor | float = 0.0
        gradients: dict[int, Tensor] = {}
        for shares, delta in deltas:
            _add(gradients, shares.gradients(delta, part))
        if self.slow:  # by a backward pass for each example
            seeds = torch.eye(self.examples, dtype=outputs.dtype, device=outputs.device)[part]
            slopes = LinearMap(outputs, [use.call.output for use in self.slow]).transposed(seeds)
            for use, slope in zip(self.slow, slopes, strict=True):
                _add(gradients, use.call.pulled_back(slope))
                if use.noise is not None:
                    total = total + (slope.square() * use.noise).reshape(len(slope), -1).sum(1)
        for call in reversed(self.makers):
            if id(call.result) in gradients:
                _add(gradients, call.pulled_back(gradients.pop(id(call.result))))
        for key, g in gradients.items():
            total = total + (g.square() * self.weights[key].variance).reshape(len(g), -1).sum(1)
        return total


class _ByRules:
    """A use whose gradients of examples have rules.

    Args:
        use: the use.
        shares: what each example adds.
        once: weights that are used once. Those with one row for each example need no gradients of these.
    """

    def __init__(self, use: Use, shares: Shares, once: set[int]) -> None:
        self.use, self._all = use, shares
        self._contracted = {
            key: _contracted(share, use.call.weights[key].variance)
            for key, share in shares.contributions.items()
            if key in once and shares.each == 1 and _is_single(share)
        }
        rest = {k: share for k, share in shares.contributions.items() if k not in self._contracted}
        self.shares = replace(shares, contributions=rest)

    def without_gradients(self, slope: Tensor) -> Tensor:
        """Return what noise times noise adds, and weights that need no gradients."""
        delta = self._all.arrange(slope)
        total = sum((spread(delta) for spread in self._contracted.values()), slope.new_zeros(()))
        if self.use.noise is None:
            return total
        noise = self._all.rows.first(slope.square() * self.use.noise)
        return total + noise.reshape(len(noise), -1).sum(1)


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
