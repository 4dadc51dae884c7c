# SPDX-License-Identifier: Apache-2.0
"""The run of a model with moments, and the pullback of its outputs to the weights."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.curvature.per_example import Contribution
from pyro_dvi.curvature.products import LinearMap
from pyro_dvi.curvature.rows import halves
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.value import GaussianMoments
from pyro_dvi.moments.weight_uses import leaves_of
from pyro_dvi.reverse_delta.calls import Call, Slot, hold_variances
from pyro_dvi.reverse_delta.rows import Rows, Shares, rows_of, shares_of

__all__ = ["ReverseDeltaRecorder"]

# Functions of a weight alone that may give each example a copy.
_COPYING = (torch.Tensor.expand, torch.Tensor.repeat)
_BUDGET = 2**24  # elements of per-example gradients at a time


class ReverseDeltaRecorder:
    """Observe a run with moments, then give the variances of its outputs.

    Use with :func:`~pyro_dvi.moments.observed_by`, with gradients enabled, and only for one run.

    Args:
        weights: latent weights by name; may be filled while the model runs.

    Example:
        >>> from pyro_dvi.moments import observed_by
        >>> weight = GaussianMoments(torch.ones(1, 2), torch.full((1, 2), 0.1))
        >>> recorder = ReverseDeltaRecorder({"weight": weight})
        >>> with observed_by(recorder):
        ...     h = torch.nn.functional.linear(torch.ones(3, 2), weight)
        ...     y = h + h.relu()
        >>> y.variance[0], recorder.variance(y, 0)[0]
        (tensor([0.4000]), tensor([0.8000]))
    """

    def __init__(self, weights: Mapping[str, GaussianMoments]) -> None:
        self._weights = weights
        self._made: dict[int, GaussianMoments] = {}  # functions of weights alone
        self._calls: list[Call] = []
        self._starts: list[int] = []  # of each rule that is at work, the number of calls before
        self._versions: list[tuple[Tensor, int]] = []

    # While the model runs ------------------------------------------------------------------------------------

    def entering(self) -> None:
        """Note that a rule is about to be called."""
        self._starts.append(len(self._calls))

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Hold variances constant, and note calls with weights."""
        start = self._starts.pop()
        outputs = hold_variances(func, args, kwargs, result)
        known = {id(weight) for weight in self._weights.values()} | self._made.keys()
        weights = {id(a): a for a in leaves_of(args, kwargs) if id(a) in known}
        inside = {key for call in self._calls[start:] for key in call.weights}
        if weights.keys() <= inside or not outputs:  # of no weights; or its rule called what uses them
            return result
        del self._calls[start:]
        self._note(func, args, kwargs, result, outputs, weights)
        return result

    def _note(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        result: Any,
        outputs: list[GaussianMoments],
        weights: dict[int, Any],
    ) -> None:
        if func is F.embedding:  # a row of padding has no gradient, but its noise
            args, kwargs = args[:2], {name: a for name, a in kwargs.items() if name in ("input", "weight")}
        copies: dict[int, Any] = {}

        def held(argument: Any) -> Any:
            if id(argument) in weights:
                return Slot(id(argument))
            if isinstance(argument, list | tuple):
                return type(argument)(map(held, argument))
            if not isinstance(argument, Tensor | GaussianMoments):
                return argument
            return copies.setdefault(id(argument), self._held(argument))

        args, kwargs = tuple(map(held, args)), {name: held(a) for name, a in kwargs.items()}
        alone = not copies and func not in _COPYING
        without_history = {key: self._held(weight) for key, weight in weights.items()}
        for place, part in enumerate(result if isinstance(result, tuple | list) else (result,)):
            if not any(part is output for output in outputs):
                continue
            if alone:
                self._made[id(part)] = part
            elif not part._loc.requires_grad:
                part._loc = part._loc.detach().requires_grad_()
            self._calls.append(Call(func, args, kwargs, without_history, place, part, part._loc, alone))

    def _held(self, argument: Any) -> Any:
        """An argument as it is now, without its history."""
        if isinstance(argument, GaussianMoments):
            return GaussianMoments(
                argument.loc.detach(), argument.variance.detach()
            )  # detach() would be a view
        held = argument.detach()
        self._versions.append((held, held._version))
        return held

    # Afterwards ----------------------------------------------------------------------------------------------

    @torch.enable_grad()
    def reaches(self, out: GaussianMoments) -> bool:
        """Whether the noise of a weight reaches ``out`` through a function of other things as well."""
        if not out.loc.requires_grad:
            return False
        return any(slope is not None for slope in _gradients(out.loc.sum(), self._uses()))

    @torch.enable_grad()
    def variance(self, out: GaussianMoments, examples: int) -> Tensor:
        """Return variances of outputs of the run, of their shape.

        Args:
            out: moments that the run computed, or a Gaussian behind them.
            examples: the dimension that counts examples.

        Raises:
            UnsupportedError: a certain input of a layer was changed in place after its use.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise UnsupportedError(
                "the reverse delta method: the input of a layer was changed in place after its use. Let the model "
                "write x = x + y instead of x += y for a tensor that a layer used."
            )
        loc = out.loc
        if not loc.requires_grad:
            return out.variance
        rows = loc.movedim(examples, 0)
        size = rows.shape
        rows = rows.reshape(len(rows), -1)
        uses = self._reached(rows)
        if not uses:
            return out.variance
        pullback = _Pullback(uses, [call for call in self._calls if call.alone], len(rows))
        variance = torch.stack([pullback.variance(column) for column in rows.unbind(1)], 1)
        return variance.reshape(size).movedim(0, examples)

    def _uses(self) -> list[Call]:
        return [call for call in self._calls if not call.alone]

    def _reached(self, rows: Tensor) -> "list[_Use]":
        """The uses of weights that outputs depend on, with the rows of examples in them."""
        # Unequal weights, under which what several outputs do to a layer does not cancel by symmetry.
        weights = [torch.linspace(1, 2, n, dtype=rows.dtype, device=rows.device) for n in rows.shape]
        outputs = (rows @ weights[1]) * weights[0]
        uses, parts = self._uses(), halves(len(rows), rows.device)
        slopes = [_gradients(outputs[part].sum(), uses) for part in parts]
        found = []
        with torch.no_grad():
            for call, *per_part in zip(uses, *slopes, strict=True):
                known = [slope for slope in per_part if slope is not None]
                if known:
                    filled = [torch.zeros_like(known[0]) if slope is None else slope for slope in per_part]
                    place = rows_of(filled, parts)
                    shares = None if place is None else shares_of(call, place)
                    found.append(_Use(call, place, shares, call.interaction()))
        return found


@dataclass(frozen=True)
class _Use:
    """A use of weights that outputs depend on.

    Attributes:
        call: the function.
        rows: where examples are in its output.
        shares: what each of them adds to gradients; None where no rule says so.
        noise: variance of the output by noise of weights times that of inputs.
    """

    call: Call
    rows: Rows | None
    shares: Shares | None
    noise: Tensor | None


class _Pullback:
    """Variances of outputs from the noise of weights.

    Args:
        uses: the uses of weights that the outputs depend on.
        makers: the calls that make weights of others, in their order.
        examples: the number of examples.
    """

    def __init__(self, uses: Sequence[_Use], makers: Sequence[Call], examples: int) -> None:
        self.fast = [use for use in uses if use.shares is not None]
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
                for key, share in use.shares.contributions.items()
                if times[key] == 1 and key in self.weights and use.shares.each == 1 and _is_single(share)
            }
            for use in self.fast
        ]

    def variance(self, outputs: Tensor) -> Tensor:
        """Return the variance of one output of each example."""
        slopes = _gradients(outputs.sum(), [use.call for use in self.fast])
        with torch.no_grad():
            return self._pulled_back(outputs, slopes)

    def _pulled_back(self, outputs: Tensor, slopes: Sequence[Tensor | None]) -> Tensor:
        total = torch.zeros_like(outputs)
        deltas = []
        for use, contracted, slope in zip(self.fast, self.contracted, slopes, strict=True):
            if slope is None:
                continue
            if use.noise is not None:
                total += use.rows.first(slope.square() * use.noise).reshape(self.examples, -1).sum(1)
            delta = use.shares.arrange(slope)
            total += sum(spread(delta) for spread in contracted.values())
            if len(contracted) < len(use.shares.contributions):
                deltas.append((use.shares, contracted, delta))
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
        total = 0.0
        for use, slope in zip(self.slow, slopes, strict=True):
            _add(gradients, use.call.pulled_back(slope))
            if use.noise is not None:
                total = total + (slope.square() * use.noise).reshape(len(slope), -1).sum(1)
        return total


def _gradients(value: Tensor, calls: Sequence[Call]) -> tuple[Tensor | None, ...]:
    if not calls:
        return ()
    places = [call.output for call in calls]
    return torch.autograd.grad(value, places, retain_graph=True, allow_unused=True)


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
