# SPDX-License-Identifier: Apache-2.0
r"""Checks that the rules of layers give the per-example gradients of the model.

The rules assume that one dimension of a layer's output indexes examples, and that all uses of a weight were recorded.
With a factor :math:`c_i` for each output,

.. math:: \partial_u \sum_i c_i f_i = \sum_i c_i\,g_i

holds for a generic c only if every :math:`g_i` is correct. Plain autograd computes the left side. Models that mix
examples, repeat a table for each example, or take gradients inside their forward pass violate the identity.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dvi.core.recorder import is_comparing, is_recording
from pyro_dvi.curvature.per_example.example_rules import Rows, Use, at_least_single
from pyro_dvi.errors import ModelError, warn

_BUDGET = 1 << 22  # maximum number of entries of per-example gradients at a time
_AT_ONCE = 8  # number of calls in which a check that lacked gradients is repeated
_INTERVAL = 1000  # number of calls between two checks in a long training run

Served = dict[int, list[Use]]
Deltas = tuple[Tensor | None, Tensor | None]  # gradients of the sum and of the weighted sum of the outputs


# Rows that belong to examples ------------------------------------------------------------------------------------


def row_weights(count: int, like: Tensor, seed: int = 0) -> Tensor:
    r"""Return a weight c for each row; :func:`kept_apart` uses them to detect whether rows depend on each other.

    The weights are powers of two with either sign, so multiplying by them is exact. Up to 32 rows have distinct
    weights; with more rows, any two weights differ with probability 31/32.

    Args:
        count: the number of rows.
        like: tensor with the dtype and device of the weights.
        seed: seed for the order of the weights.
    """
    places = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % 32
    return (torch.exp2(places // 2 - 8.0) * (1 - 2 * (places % 2))).to(like)


def kept_apart(plain: Tensor, weighted: Tensor, weights: Tensor) -> Tensor:
    r"""Return, as a boolean scalar, whether every row of a gradient depends only on the output of the same row.

    Let :math:`M_{jb}` be the contribution of output j to row b of the gradient. If row b depends only on its own
    output, weighting the outputs multiplies the row by :math:`c_b`; otherwise, this difference is not zero:

    .. math:: \delta_b(c) - c_b\,\delta_b(1) = \sum_j (c_j - c_b)\, M_{jb} .

    Args:
        plain: :math:`\delta(1)`, the gradient of the sum of the outputs, ``[B, ...]``.
        weighted: :math:`\delta(c)`, the gradient of the weighted sum.
        weights: c, from :func:`row_weights`.
    """
    if not plain.numel():
        return torch.ones((), dtype=torch.bool, device=plain.device)
    plain, weighted = (d.reshape(len(d), -1) for d in (plain, weighted))
    expected = plain * weights.to(plain).unsqueeze(1)
    error, size = (d.abs().amax(1) for d in (weighted - expected, expected))
    # Distinct weights differ by at least half of either. If rows are independent, the only differences are rounding
    # errors from nondeterministic summation order (on GPUs) and from denormal numbers.
    rounding = torch.finfo(plain.dtype).eps
    return ~(error > rounding**0.5 * size + rounding**2 * plain.abs().max()).any()  # NaN is inconclusive


# Gradients of examples -------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """The result of a check.

    Attributes:
        wrong: indices of the weights for which the rules disagree with the model.
        unproven: indices of the weights for which the check is inconclusive, because gradients are zero or rounding
            errors.
        rows: the dimension of the examples in the outputs of each use of a weight, if it is not the most likely one.
    """

    wrong: set[int]
    unproven: set[int]
    rows: Mapping[int, tuple[Rows, ...]] = {}

    def kept(self, uses: Served) -> Served:
        """Return the uses of the weights that are not wrong, with their rows."""
        found = {k: calls for k, calls in uses.items() if k not in self.wrong}
        for k in self.rows.keys() & found.keys():
            found[k] = [use.at(rows) for use, rows in zip(found[k], self.rows[k], strict=True)]
        return found


def examined(uses: Served, values: Mapping[int, Tensor], outputs: Tensor, seed: int = 0) -> Finding:
    """Compare per-example gradients with plain autograd, using two backward passes.

    Args:
        uses: uses of the weights to check, by index.
        values: the weights by index.
        outputs: f, one entry or row per example.
        seed: seed for the weights c.
    """
    if not uses or not outputs.requires_grad:
        return Finding(set(), set(uses))
    if outputs.dim() > 1:  # unequal weights, so that log-probabilities do not cancel
        numbers = torch.arange(1, outputs.shape[1] + 1, device=outputs.device)
        outputs = outputs @ numbers.to(outputs).sqrt().sin()
    edges = list(dict.fromkeys(use.output for calls in uses.values() for use in calls))
    c = row_weights(len(outputs), outputs, seed)
    places: list[Any] = [*edges, *(values[k] for k in uses)]
    options: Any = {"retain_graph": True, "allow_unused": True}
    plain = torch.autograd.grad(outputs, edges, torch.ones_like(outputs), **options)
    weighted = torch.autograd.grad(outputs, places, c, **options)
    deltas: dict[Any, Deltas] = dict(zip(edges, zip(plain, weighted, strict=False), strict=True))
    wholes = dict(zip(uses, weighted[len(edges) :], strict=True))
    found = _compared(uses, deltas, wholes, c)
    moved = {k: _found_elsewhere(uses[k], deltas, c) for k in found.wrong}
    others = {k: calls for k, calls in moved.items() if calls is not None}
    if not others:
        return found
    again = _compared(others, deltas, wholes, c)
    rows = {
        k: tuple(use.rows for use in calls if use.rows) for k, calls in others.items() if k not in again.wrong
    }
    return Finding(found.wrong - rows.keys(), found.unproven | again.unproven, rows)


def _found_elsewhere(calls: list[Use], deltas: Mapping[Any, Deltas], c: Tensor) -> list[Use] | None:
    """Return the uses of a weight with the dimension of examples found from gradients; None without a new finding."""
    found = []
    for use in calls:
        plain, weighted = deltas[use.output]
        if plain is None or weighted is None:
            found.append(use)
            continue
        candidates = use.candidates(len(c))
        shown = (u for u in candidates if bool(kept_apart(u.arranged(plain), u.arranged(weighted), c)))
        if (chosen := next(shown, None)) is None:
            return None
        found.append(chosen)
    return None if [use.rows for use in found] == [use.rows for use in calls] else found


def _compared(
    uses: Served, deltas: Mapping[Any, Deltas], wholes: Mapping[int, Tensor | None], c: Tensor
) -> Finding:
    with torch.no_grad():
        compared = [
            _comparison([(use, *deltas[use.output]) for use in calls], wholes[k], c)
            for k, calls in uses.items()
        ]
    found = list(zip(uses, torch.stack(compared).tolist(), strict=True))
    return Finding({k for k, (wrong, _) in found if wrong}, {k for k, (_, unproven) in found if unproven})


def _comparison(
    calls: list[tuple[Use, Tensor | None, Tensor | None]], whole: Tensor | None, c: Tensor
) -> Tensor:
    """Return whether the gradients of a weight are wrong, and whether the check is inconclusive; booleans ``[2]``."""
    reached = [(use, plain, delta) for use, plain, delta in calls if plain is not None and delta is not None]
    if whole is None:
        return torch.tensor([bool(reached), not reached], device=c.device)
    whole = at_least_single(whole)
    total, terms = torch.zeros_like(whole), whole.new_zeros(())
    apart, coarsest = torch.ones((), dtype=torch.bool, device=c.device), torch.finfo(whole.dtype).eps
    for use, plain, delta in reached:
        coarsest = max(coarsest, torch.finfo(delta.dtype).eps)
        plain, delta = use.arranged(plain), use.arranged(delta)
        apart = apart & kept_apart(plain, delta, c)
        try:
            total += _summed(use, delta, whole)
        except RuntimeError:  # shapes do not match
            apart = torch.zeros_like(apart)
        largest = [x.abs().max() for x in use.contribution.operands if x.is_floating_point() and x.numel()]
        terms = terms + delta.norm() * (torch.stack(largest).max() if largest else 1.0)
    # Sums of cancelling terms have errors of a few roundings, and more after normalisation. Below this bound, a
    # gradient is inconclusive; above it, the error of a wrong gradient is far larger than the cube root of the rounding
    # error.
    rounding = 1000 * coarsest * terms
    size, error = torch.maximum(total.norm(), whole.norm()), (total - whole).norm()
    wrong = ~apart | (error > coarsest ** (1 / 3) * size + rounding)
    return torch.stack([wrong, ~wrong & ~(size > rounding)])  # NaN is also inconclusive


def _summed(use: Use, delta: Tensor, like: Tensor) -> Tensor:
    """Return the sum of per-example gradients, computed in parts."""
    count = max(1, _BUDGET // max(1, like.numel()))
    total = torch.zeros_like(like)
    for start in range(0, len(delta), count):
        part = slice(start, start + count)
        total += use.contribution.part(part).gradients(delta[part]).sum(0).reshape(like.shape)
    return total


class Proofs:
    """Checks for each model and each layout of its minibatches, with cached results.

    A check is repeated in calls 2, 4, 8, ..., 1000, 2000, ..., to detect changes.
    """

    def __init__(self) -> None:
        self._models: dict[int, tuple[Callable[[], Any], dict[Any, _Verdict]]] = {}

    def __reduce__(self) -> tuple:
        return type(self), ()  # a copy checks again

    def proved(
        self,
        model: Any,
        key: Any,
        uses: Served,
        look: Callable[..., Finding],
        site: str,
        names: Sequence[str] = (),
    ) -> Served:
        """Return the uses of the weights to which the rules apply, with their rows.

        Args:
            model: the model; results are cached as long as it is alive.
            key: the layout of the minibatch, apart from the functions and shapes of the uses.
            uses: the uses of the weights, by index.
            look: function from a seed to the result of a check.
            site: name of the observed site, for messages.
            names: names of the weights, for warnings; if empty, there is no warning.

        Raises:
            ModelError: a layout that passed an earlier check fails now.
        """
        # Minibatches with the same graph share their results.
        layout = tuple((k, use.function, use.shape) for k, calls in uses.items() for use in calls)
        verdict = self._verdicts_on(model).setdefault((key, layout), _Verdict())
        if verdict.is_due():
            before = verdict.known.wrong
            verdict.renew(look(verdict.looks), site)
            warn_of_disproved(uses, verdict.known.wrong - before, names)
        return verdict.known.kept(uses)

    def _verdicts_on(self, model: Any) -> "dict[Any, _Verdict]":
        owner = getattr(model, "__self__", model)  # a bound method is a new object at every access
        reference, verdicts = self._models.get(id(owner), (None, {}))
        # A new model, or one with the id of a deleted model.
        if reference is None or reference() is not owner:
            verdicts = {}
            self._models = {n: entry for n, entry in self._models.items() if entry[0]() is not None}
            self._models[id(owner)] = (weakref.ref(owner), verdicts)
        return verdicts


@dataclass
class _Verdict:
    """The results for the weights of a layout.

    Attributes:
        known: all findings combined.
        calls: number of calls.
        looks: number of checks.
    """

    known: Finding = Finding(set(), set())  # noqa: RUF009 (never written to)
    calls: int = 0
    looks: int = 0

    def is_due(self) -> bool:
        """Count a call, and return whether a check is due."""
        if is_recording():
            return False
        self.calls += 1
        if is_comparing():  # a replay of a recorded step, which must not read the result
            return True
        waiting = bool(self.known.unproven) and self.calls <= _AT_ONCE
        return waiting or self.calls & (self.calls - 1) == 0 or self.calls % _INTERVAL == 0

    def renew(self, found: Finding, site: str) -> None:
        """Combine a finding with earlier ones, and raise if they contradict."""
        news = found.wrong - self.known.wrong - self.known.unproven
        first, self.looks = self.looks == 0, self.looks + 1
        wrong = self.known.wrong | found.wrong
        self.known = Finding(wrong, found.unproven - wrong, {**self.known.rows, **found.rows})
        if news and not first:
            raise ModelError(
                f"examples of observed site {site!r} depend on rows of other examples, unlike in an earlier step, so "
                "squared gradients since then are wrong: train with IVON or, after changing the model, a new objective"
            )


def warn_of_disproved(uses: Served, wrong: set[int], names: Sequence[str]) -> None:
    """Warn that weights need one backward pass per example, unless their examples were guessed from folded rows."""
    slow = [
        f"latent site {names[k]!r}"
        for k in sorted(wrong)
        if names and all(use.rows is not None and use.rows.each == 1 for use in uses[k])
    ]
    if slow:
        warn(
            f"{', '.join(slow)}: the per-example gradients computed layer by layer disagree with the gradient of the "
            "model, because the model mixes examples or takes gradients inside its forward pass. These weights "
            "therefore take one backward pass per example, which is exact but slower"
        )
