# SPDX-License-Identifier: Apache-2.0
r"""The smoothed reverse delta method: variances of outputs that know which weights they share.

Variances that flow forward take the elements of a layer as independent, and lose what a skip connection, or positions
that share a kernel, have in common. Here each output is pulled back to the weights instead:

.. math::
    \mathrm{Var}[f_k] \approx \sum_w \Bigl(\frac{\partial m_k}{\partial \bar w}\Bigr)^2 \mathrm{Var}[w] + \dots

The slopes are those of the *moments*: variances are held, and the mean of a layer is a function of the mean of the
layer before it. For a rectifier that slope is :math:`\Phi(\mu/\sigma)`, the smoothed step. The dots are the noise of
weights times that of inputs, see :mod:`pyro_dvi.moments.weight_spread`.

Status: exact for linear models; to first order in the noise, but with slopes averaged over it, for all others. Only the
noise of weights counts: inputs that are moments themselves are taken as certain, but for where they meet a weight.

Cost: one backward pass for each output and, for shared weights, a gradient for each example.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments.tensor_like import name_of
from pyro_dvi.moments.value import GaussianMoments
from pyro_dvi.moments.weight_spread import Spread, Weight, spread_rule_for
from pyro_dvi.moments.weight_uses import WeightUses, parts_of

__all__ = ["ReverseDeltaRecorder"]


@dataclass
class _Use:
    """One call of a function with weights among its arguments."""

    func: Callable
    names: list[str]
    args: tuple
    kwargs: dict[str, Any]
    output: Tensor
    problem: str | None = None

    def refuse(self, problem: str) -> UnsupportedError:
        return UnsupportedError(
            f"the reverse delta method: {name_of(self.func)} uses the weight {' and '.join(map(repr, self.names))} "
            f"{problem}. Predict with Moments(propagation=Independent()), or write the layer as F.linear, a "
            "convolution, x @ w, a broadcast x + b or x * w, an embedding or the affine part of a norm, with each "
            "weight used once (pyro_dvi.moments.weight_spread.spread_rule adds a function)."
        )


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
        self._weights = WeightUses(weights)
        self._uses: list[_Use] = []
        self._versions: list[tuple[Tensor, int]] = []

    # While the model runs ------------------------------------------------------------------------------------

    def entering(self) -> None:
        """Note that a rule is about to be called."""
        self._weights.entering()

    def __call__(self, func: Callable, args: tuple, kwargs: dict[str, Any], result: Any) -> Any:
        """Hold variances constant, and note the uses of weights."""
        found = self._weights.found(func, args, kwargs, result)
        known = self._weights.names()
        outputs = [p for p in parts_of(result) if id(p) not in known and not any(p is a for a in args)]
        for part in outputs:
            part._variance = part.variance.detach()
            if found and not part._loc.requires_grad:
                part._loc = part._loc.detach().requires_grad_()
        if found:
            self._note(func, args, kwargs, outputs, found)
        return result

    def _note(
        self,
        func: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        outputs: list[GaussianMoments],
        found: list[tuple[int, str]],
    ) -> None:
        problem = None
        if len({key for key, _ in found}) < len(found) or any(key in self._weights.used for key, _ in found):
            problem = "a second time"
        elif spread_rule_for(func) is None or len(outputs) != 1:
            problem = "in a way that has no rule"
        self._weights.used.update(key for key, _ in found)
        names = [name for _, name in found]
        for part in outputs:
            kept = {key: self._held(a) for key, a in kwargs.items()}
            self._uses.append(_Use(func, names, tuple(map(self._held, args)), kept, part.loc, problem))

    def _held(self, argument: Any) -> Any:
        """An argument as it is now, without its history."""
        if isinstance(argument, Tensor):
            held = argument.detach()
            self._versions.append((held, held._version))
            return held
        if not isinstance(argument, GaussianMoments):
            return argument
        if id(argument) in self._weights.names():
            return Weight(argument.loc.detach(), argument.variance.detach())
        return GaussianMoments(argument.loc.detach(), argument.variance.detach())  # detach() would be a view

    # Afterwards ----------------------------------------------------------------------------------------------

    @torch.enable_grad()
    def reaches(self, out: GaussianMoments) -> bool:
        """Whether the noise of a weight reaches ``out`` through a function."""
        if not out.loc.requires_grad:
            return False
        slopes = _gradients(out.loc.sum(), [use.output for use in self._uses])
        return any(slope is not None for slope in slopes)

    @torch.enable_grad()
    def variance(self, out: GaussianMoments, examples: int) -> Tensor:
        """Return variances of outputs of the run, of their shape.

        Args:
            out: moments that the run computed, or a Gaussian behind them.
            examples: the dimension that counts examples, which must not depend on each other.

        Raises:
            UnsupportedError: a weight is used in a way that has no rule, or twice, or where no dimension counts
                the examples; or a certain input of a layer was changed in place after its use.
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
        # One example by itself shows which uses it depends on, and which of their rows are its own.
        weights = torch.linspace(1, 2, rows.shape[1], dtype=rows.dtype, device=rows.device)
        probe = _gradients((weights * rows[0]).sum(), [use.output for use in self._uses])
        reached = [(use, slope) for use, slope in zip(self._uses, probe, strict=True) if slope is not None]
        if not reached:
            return out.variance
        with torch.no_grad():
            spreads = [_spread(use, slope, len(rows)) for use, slope in reached]
        outputs = [use.output for use, _ in reached]
        variance = torch.zeros_like(rows)
        for k in range(rows.shape[1]):
            slopes = _gradients(rows[:, k].sum(), outputs)
            with torch.no_grad():
                for spread, delta in zip(spreads, slopes, strict=True):
                    if delta is not None:
                        variance[:, k] += spread(delta)
        return variance.detach().reshape(size).movedim(0, examples)


def _gradients(value: Tensor, places: list[Tensor]) -> tuple[Tensor | None, ...]:
    if not places:
        return ()
    return torch.autograd.grad(value, places, retain_graph=True, allow_unused=True)


def _spread(use: _Use, slope: Tensor, num_examples: int) -> Spread:
    if use.problem is not None:
        raise use.refuse(use.problem)
    rule = spread_rule_for(use.func)
    assert rule is not None
    for axis in range(slope.dim()):
        if slope.shape[axis] != num_examples or bool(slope.narrow(axis, 1, num_examples - 1).any()):
            continue
        spread = rule(*use.args, **use.kwargs, examples=axis)
        if spread is not None:
            return spread
    raise use.refuse(
        f"for an output of shape {tuple(slope.shape)}, in which no dimension counts the {num_examples} examples"
    )
