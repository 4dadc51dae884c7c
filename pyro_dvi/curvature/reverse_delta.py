# SPDX-License-Identifier: Apache-2.0
r"""The smoothed reverse delta method: output variances that account for shared weights.

Forward propagation of variances treats the elements of a layer as independent. It misses correlations that are due to
skip connections, and correlations between positions that share a kernel. This method instead differentiates each output
of each example with respect to the weights:

.. math::
    \mathrm{Var}[f_k] \approx \sum_w \Bigl(\frac{\partial m_k}{\partial \bar w}\Bigr)^2 \mathrm{Var}[w]
        + \sum_y \Bigl(\frac{\partial m_k}{\partial \bar y}\Bigr)^2 \mathrm{Var}_{xw}[y].

The derivatives are those of the *means*: variances are held constant, and the mean of a layer is a function of the mean
of the layer before it. For ReLU, the derivative is :math:`\Phi(\mu/\sigma)`, the smoothed step. The second sum is over
the functions y that use weights. :math:`\mathrm{Var}_{xw}` is the part of the variance of y that is due to the product
of the noise in weights and inputs; if y is a product, this part is :math:`\mathrm{Var}[x]\,\mathrm{Var}[w]`.

Status: exact for linear models; otherwise first order in the noise, but with derivatives averaged over the noise. Only
the noise of weights is included: inputs that are moments themselves are treated as deterministic, except in products
with a weight.

Cost: one backward pass per output and, for weights that are shared by positions or used several times, per-example
gradients from the rules of :mod:`pyro_dvi.curvature.per_example`. If a function has no such rule, or if its rows do not
belong to single examples, it needs one backward pass per example and output.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyro_dvi.curvature.per_example.example_rules import Contribution, Use, with_rows_of_examples
from pyro_dvi.curvature.per_example.proof import examined
from pyro_dvi.curvature.products import LinearMap
from pyro_dvi.curvature.weight_calls import Call, Slot, hold_variances
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.value import GaussianMoments

_BUDGET = 2**24  # maximum number of elements of per-example gradients at a time
# Functions that may copy a weight for each example.
_COPYING = (torch.Tensor.expand, torch.Tensor.repeat)


@dataclass(frozen=True)
class Traced:
    """A function call that takes weights, and on whose result the outputs depend.

    Attributes:
        call: the call.
        uses: the uses of each weight, if rules give per-example gradients; otherwise None.
        noise: variance of the output that is due to the product of the noise in weights and inputs; None if the inputs
            are deterministic.
    """

    call: Call
    uses: dict[int, Use] | None
    noise: Tensor | None

    def arranged(self, slope: Tensor) -> Tensor:
        """Return the gradient of the output with the examples in its first dimension."""
        assert self.uses is not None
        return next(iter(self.uses.values())).arranged(slope)


def calls_behind(outputs: Tensor, calls: Sequence[Call], weights: dict[int, Tensor]) -> list[Traced]:
    """Return the calls on which outputs ``[B, K]`` depend, with the rules that were verified for them.

    Args:
        outputs: means of the outputs.
        calls: calls with weights and other arguments.
        weights: means of the weights, and of functions of weights only, by id.
    """
    # The factors are unequal, so that the effects of several outputs on a layer do not cancel by symmetry.
    sums = outputs @ torch.linspace(1, 2, outputs.shape[1], dtype=outputs.dtype, device=outputs.device)
    slopes = gradients_at(calls, sums.sum())
    reached = [call for call, slope in zip(calls, slopes, strict=True) if slope is not None]
    by_weight: dict[int, list[tuple[Call, Use]]] = defaultdict(list)
    for call in reached:
        for key, use in call.uses().items():
            by_weight[key].append((call, use))
    served = with_rows_of_examples({k: [u for _, u in pairs] for k, pairs in by_weight.items()}, len(outputs))
    served = examined(served, weights, sums).kept(served)
    uses = {(id(use.output), k): use for k, several in served.items() for use in several}
    traced = []
    for call in reached:
        own = {key: uses[id(call.output), key] for key in call.weights if (id(call.output), key) in uses}
        right = len(own) == len(call.weights) and all(use.contribution.bilinear for use in own.values())
        same = len({use.rows for use in own.values()}) == 1
        traced.append(Traced(call, own if right and same else None, call.interaction()))
    return traced


def gradients_at(calls: Sequence[Call], value: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of a scalar with respect to the outputs of calls; None for outputs without effect on it."""
    if not calls:
        return ()
    places = [call.output for call in calls]
    return torch.autograd.grad(value, places, retain_graph=True, allow_unused=True)


class Pullback:
    """Variances of outputs due to the noise of weights.

    Args:
        traced: the calls on which the outputs depend.
        makers: the calls that compute weights from other weights, in order.
        examples: the number of examples.
    """

    def __init__(self, traced: Sequence[Traced], makers: Sequence[Call], examples: int) -> None:
        calls = [*(one.call for one in traced), *makers]
        times = Counter(key for call in calls for key in call.weights)
        made = {id(call.result) for call in makers}
        self.weights = {k: w for call in calls for k, w in call.weights.items() if k not in made}
        self.makers, self.examples = makers, examples
        self.fast = [one for one in traced if one.uses is not None]
        self.slow = [one for one in traced if one.uses is None]
        # Weights with a single use whose gradients are outer products of two vectors need no per-example gradients.
        self.contracted = {
            (id(one.call), key): _contracted(use.contribution, self.weights[key].variance)
            for one in self.fast
            for key, use in (one.uses or {}).items()
            if key in self.weights and times[key] == 1 and _is_single(use.contribution)
        }

    def variance(self, outputs: Tensor) -> Tensor:
        """Return the variance of one output for each example."""
        slopes = gradients_at([one.call for one in self.fast], outputs.sum())
        reached = [(one, slope) for one, slope in zip(self.fast, slopes, strict=True) if slope is not None]
        with torch.no_grad():
            total = torch.zeros_like(outputs)
            rest: list[tuple[int, Contribution, Tensor]] = []
            for one, slope in reached:
                if one.noise is not None:
                    noise = one.arranged(slope.square() * one.noise)
                    total += noise.reshape(len(noise), -1).sum(1)
                delta = one.arranged(slope)
                for key, use in (one.uses or {}).items():
                    spread = self.contracted.get((id(one.call), key))
                    if spread is None:
                        rest.append((key, use.contribution, delta))
                    else:
                        total += spread(delta)
            if rest or self.slow:
                size = sum(weight.variance.numel() for weight in self.weights.values())
                for part in torch.arange(self.examples).split(max(1, _BUDGET // max(1, size))):
                    rows = slice(int(part[0]), int(part[-1]) + 1)
                    total[rows] += self._by_gradients(outputs, rest, rows)
        return total

    def _by_gradients(
        self, outputs: Tensor, rest: Sequence[tuple[int, Contribution, Tensor]], part: slice
    ) -> Tensor | float:
        """Return the contributions of the other weights to variances of some examples, from per-example gradients."""
        total: Tensor | float = 0.0
        gradients: dict[int, Tensor] = {}
        for key, share, delta in rest:
            _add(gradients, {key: share.part(part).gradients(delta[part])})
        if self.slow:  # these take a backward pass per example
            seeds = torch.eye(self.examples, dtype=outputs.dtype, device=outputs.device)[part]
            slopes = LinearMap(outputs, [one.call.output for one in self.slow]).transposed(seeds)
            for one, slope in zip(self.slow, slopes, strict=True):
                _add(gradients, one.call.pulled_back(slope))
                if one.noise is not None:
                    total = total + (slope.square() * one.noise).reshape(len(slope), -1).sum(1)
        for call in reversed(self.makers):
            if id(call.result) in gradients:
                _add(gradients, call.pulled_back(gradients.pop(id(call.result))))
        for key, g in gradients.items():
            total = total + (g.square() * self.weights[key].variance).reshape(len(g), -1).sum(1)
        return total


def _add(total: dict[int, Tensor], found: Mapping[int, Tensor]) -> None:
    for key, gradient in found.items():
        total[key] = total[key] + gradient if key in total else gradient


def _is_single(share: Contribution) -> bool:
    """Return whether gradients are outer products of two vectors."""
    return share.outer is not None and share.outer_inputs(slice(0, 1)).shape[1] == 1


def _contracted(share: Contribution, variance: Tensor) -> Callable[[Tensor], Tensor]:
    r"""Return :math:`\sum_{pq} (\delta_{ip} a_{iq})^2 \mathrm{Var}[w_{pq}]` as a function of :math:`\delta`."""
    assert share.outer is not None
    of_output, inputs = share.outer.deltas, share.outer_inputs(slice(None))[:, 0].square()
    inputs_first = share.outer.inputs_first
    variance = variance.reshape((inputs.shape[1], -1) if inputs_first else (-1, inputs.shape[1]))
    terms = inputs @ (variance if inputs_first else variance.mT)
    return lambda delta: (of_output(delta)[:, 0].square() * terms).sum(1)


class ReverseDeltaRecorder:
    """Observes a run with moments, then computes the variances of its outputs.

    Use it for one run only, with :func:`~pyro_dvi.moments.dispatch.observed_by` and gradients enabled.

    Args:
        weights: latent weights by name; further weights may be added while the model runs.

    Example:
        >>> from pyro_dvi.moments.dispatch import observed_by
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
        self._made: dict[int, GaussianMoments] = {}  # functions of weights only
        self._calls: list[Call] = []
        # For each active rule: the number of calls before it, and whether the model records gradients.
        self._starts: list[tuple[int, bool]] = []
        self._versions: list[tuple[Tensor, int]] = []

    # While the model runs ------------------------------------------------------------------------------------

    def entering(self) -> None:
        """Record that a rule is about to be called.

        Gradients are enabled, because weights are uncertain even if the model stops gradients with ``no_grad``,
        ``detach`` or an autograd.Function.
        """
        self._starts.append((len(self._calls), torch.is_grad_enabled()))
        torch.set_grad_enabled(True)
        for weight in self._weights.values():
            if not weight._loc.requires_grad:
                weight._loc = weight._loc.detach().requires_grad_()

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Hold variances constant, and record calls with weights."""
        start, recording = self._starts.pop()
        torch.set_grad_enabled(recording)
        if func in (torch.detach, torch.Tensor.detach):
            return args[0]
        outputs = hold_variances(func, args, kwargs, result)
        known = {id(weight) for weight in self._weights.values()} | self._made.keys()
        weights = {id(a): a for a in tree_leaves((args, kwargs)) if id(a) in known}
        inside = {key for call in self._calls[start:] for key in call.weights}
        if weights.keys() <= inside or not outputs:  # no weights, or already recorded inside its rule
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
        if func is F.embedding:  # padding rows have noise but no gradient
            args, kwargs = args[:2], {name: a for name, a in kwargs.items() if name in ("input", "weight")}
        copies: dict[int, Any] = {}

        def held(argument: Any) -> Any:
            if id(argument) in weights:
                return Slot(id(argument))
            if not isinstance(argument, Tensor | GaussianMoments):
                return argument
            return copies.setdefault(id(argument), self._held(argument))

        args, kwargs = tree_map(held, (args, kwargs))
        alone = not copies and func not in _COPYING
        without_history = {key: self._held(weight) for key, weight in weights.items()}
        for place, part in enumerate(result if isinstance(result, tuple | list) else (result,)):
            if not any(part is output for output in outputs):
                continue
            if alone:
                self._made[id(part)] = part
            elif not part._loc.requires_grad:
                part._loc = part._loc.detach().requires_grad_()
            self._calls.append(
                Call(_not_in_place(func), args, kwargs, without_history, place, part, part._loc, alone)
            )

    def _held(self, argument: Any) -> Any:
        """Return a detached copy of an argument with its current value."""
        if isinstance(argument, GaussianMoments):
            # Its detach() would be a view.
            return GaussianMoments(argument.loc.detach(), argument.variance.detach())
        held = argument.detach()
        self._versions.append((held, held._version))
        return held

    # After the run -------------------------------------------------------------------------------------------

    @torch.enable_grad()
    def reaches(self, out: GaussianMoments) -> bool:
        """Return whether a weight affects ``out`` through a function that also has other arguments."""
        if not out.loc.requires_grad:
            return False
        return any(slope is not None for slope in gradients_at(self._uses(), out.loc.sum()))

    @torch.enable_grad()
    def variance(self, out: GaussianMoments, examples: int) -> Tensor:
        """Return the variances of outputs of the run, in the shape of the outputs.

        Args:
            out: moments computed in the run, or the Gaussian from which they were computed.
            examples: the dimension of the examples in ``out``.

        Raises:
            UnsupportedError: a deterministic input of a layer was changed in place after its use, or a weight affects
                the outputs in a way that was not recorded.
        """
        if any(tensor._version != version for tensor, version in self._versions):
            raise UnsupportedError(
                "layer inputs are changed in place after their use: in the model, write x = x + y instead of x += y"
            )
        loc = out.loc
        if not loc.requires_grad:
            return out.variance
        rows = loc.movedim(examples, 0)
        size = rows.shape
        rows = rows.reshape(len(rows), -1)
        makers = [call for call in self._calls if call.alone]
        weights = {id(weight): weight._loc for weight in self._weights.values()}
        made = {id(call.result): call.output for call in makers}
        traced = calls_behind(rows, self._uses(), weights | made)
        if not traced:
            return out.variance
        # The second attempt uses a backward pass per example.
        for trusted in (traced, [replace(one, uses=None) for one in traced]):
            pullback = Pullback(trusted, makers, len(rows))
            variance = torch.stack([pullback.variance(column) for column in rows.unbind(1)], 1)
            if self._is_proved(rows[-1, -1], variance[-1, -1], traced):
                return variance.reshape(size).movedim(0, examples)
        raise UnsupportedError(
            "the reverse delta method did not record how a weight affects the outputs, so variances would be too "
            "small: predict with Moments(propagation=Independent()) or Samples(n)."
        )

    def _is_proved(self, output: Tensor, variance: Tensor, traced: Sequence[Traced]) -> bool:
        """Return whether an output's variance is at least that from plain gradients (padding has no gradient)."""
        weights = list(self._weights.values())
        places = [*(weight._loc for weight in weights), *(one.call.output for one in traced)]
        spreads = [*(weight.variance for weight in weights), *(one.noise for one in traced)]
        slopes = torch.autograd.grad(output, places, retain_graph=True, allow_unused=True)
        pairs = [(g, v) for g, v in zip(slopes, spreads, strict=True) if g is not None and v is not None]
        plain = sum((g.square() * v).sum() for g, v in pairs)
        return bool(plain <= variance * (1 + torch.finfo(variance.dtype).eps ** (1 / 3)))

    def _uses(self) -> list[Call]:
        return [call for call in self._calls if not call.alone]


def _not_in_place(func: Callable) -> Callable:
    """Return the out-of-place form of a function."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return getattr(torch.Tensor, name[:-1], func) if in_place else func
