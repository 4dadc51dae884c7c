# SPDX-License-Identifier: Apache-2.0
"""The run of a model with moments, and the variances of its outputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from pyro_dvi.curvature.reverse_delta.calls import Call, Slot, hold_variances
from pyro_dvi.curvature.reverse_delta.pullback import Pullback, Use, gradients_at, uses_behind
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.value import GaussianMoments

# Functions of a weight alone that may give each example a copy.
_COPYING = (torch.Tensor.expand, torch.Tensor.repeat)


class ReverseDeltaRecorder:
    """Observe a run with moments, then give the variances of its outputs.

    Use with :func:`~pyro_dvi.moments.dispatch.observed_by`, with gradients enabled, and only for one run.

    Args:
        weights: latent weights by name; may be filled while the model runs.

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
        self._made: dict[int, GaussianMoments] = {}  # functions of weights alone
        self._calls: list[Call] = []
        # Of each rule that is at work: the number of calls before, and whether the model records gradients.
        self._starts: list[tuple[int, bool]] = []
        self._versions: list[tuple[Tensor, int]] = []

    # While the model runs ------------------------------------------------------------------------------------

    def entering(self) -> None:
        """Note that a rule is about to be called.

        Weights vary where the model stops gradients, too: by ``no_grad``, ``detach`` or a custom autograd.Function.
        """
        self._starts.append((len(self._calls), torch.is_grad_enabled()))
        torch.set_grad_enabled(True)
        for weight in self._weights.values():
            if not weight._loc.requires_grad:
                weight._loc = weight._loc.detach().requires_grad_()

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Hold variances constant, and note calls with weights."""
        start, recording = self._starts.pop()
        torch.set_grad_enabled(recording)
        if func in (torch.detach, torch.Tensor.detach):
            return args[0]
        outputs = hold_variances(func, args, kwargs, result)
        known = {id(weight) for weight in self._weights.values()} | self._made.keys()
        weights = {id(a): a for a in tree_leaves((args, kwargs)) if id(a) in known}
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
        """An argument as it is now, without its history."""
        if isinstance(argument, GaussianMoments):
            # Its own detach() would be a view.
            return GaussianMoments(argument.loc.detach(), argument.variance.detach())
        held = argument.detach()
        self._versions.append((held, held._version))
        return held

    # Afterwards ----------------------------------------------------------------------------------------------

    @torch.enable_grad()
    def reaches(self, out: GaussianMoments) -> bool:
        """Whether the noise of a weight reaches ``out`` through a function of other things as well."""
        if not out.loc.requires_grad:
            return False
        return any(slope is not None for slope in gradients_at(self._uses(), out.loc.sum()))

    @torch.enable_grad()
    def variance(self, out: GaussianMoments, examples: int) -> Tensor:
        """Return variances of outputs of the run, of their shape.

        Args:
            out: moments that the run computed, or a Gaussian behind them.
            examples: the dimension that counts examples.

        Raises:
            UnsupportedError: a certain input of a layer was changed in place after its use; or a weight acts in a way
                that was not seen.
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
        uses = uses_behind(rows, self._uses())
        if not uses:
            return out.variance
        makers = [call for call in self._calls if call.alone]
        for trusted in (uses, [replace(use, shares=None) for use in uses]):  # else by a pass for each example
            pullback = Pullback(trusted, makers, len(rows))
            variance = torch.stack([pullback.variance(column) for column in rows.unbind(1)], 1)
            if self._is_proved(rows[-1, -1], variance[-1, -1], uses):
                return variance.reshape(size).movedim(0, examples)
        raise UnsupportedError(
            "the reverse delta method: a weight acts on the outputs in a way that was not seen, and variances would be "
            "too small. Predict with Moments(propagation=Independent()) or Samples(n)."
        )

    def _is_proved(self, output: Tensor, variance: Tensor, uses: Sequence[Use]) -> bool:
        """Whether the plain gradient of an output finds no more than its variance; a row of padding has none."""
        weights = list(self._weights.values())
        places = [*(weight._loc for weight in weights), *(use.call.output for use in uses)]
        spreads = [*(weight.variance for weight in weights), *(use.noise for use in uses)]
        slopes = torch.autograd.grad(output, places, retain_graph=True, allow_unused=True)
        pairs = [(g, v) for g, v in zip(slopes, spreads, strict=True) if g is not None and v is not None]
        plain = sum((g.square() * v).sum() for g, v in pairs)
        return bool(plain <= variance * (1 + torch.finfo(variance.dtype).eps ** (1 / 3)))

    def _uses(self) -> list[Call]:
        return [call for call in self._calls if not call.alone]


def _not_in_place(func: Callable) -> Callable:
    """The form of a function that can be called again."""
    name = getattr(func, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    return getattr(torch.Tensor, name[:-1], func) if in_place else func
