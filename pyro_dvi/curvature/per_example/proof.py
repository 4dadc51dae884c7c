# SPDX-License-Identifier: Apache-2.0
r"""Proofs that layers give the gradients of single examples as the model has them.

The table of rules believes what it recognises: that a dimension of a layer's output counts examples, and that the uses
of a weight which were seen are all of them. With a weight :math:`c_i` for each output,

.. math:: \partial_u \sum_i c_i f_i = \sum_i c_i\,g_i

holds for one choice of c in general position only if every :math:`g_i` is right. Plain autograd gives the left side. A
model that mixes examples, repeats a table for each, or takes gradients inside of its own forward pass violates it.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dvi.core.recorder import is_looking, is_recording
from pyro_dvi.curvature.per_example.example_rules import Rows, Use, at_least_single
from pyro_dvi.errors import ModelError, warn

_BUDGET = 1 << 22  # entries of gradients of examples at a time
_AT_ONCE = 8  # calls in which a proof that failed for want of gradients is tried again
_INTERVAL = 1000  # calls between two proofs of a long training

Served = dict[int, list[Use]]
Deltas = tuple[Tensor | None, Tensor | None]  # gradients of the sum of the outputs, and of their weighted sum


# Rows that belong to examples ------------------------------------------------------------------------------------


def row_weights(count: int, like: Tensor, seed: int = 0) -> Tensor:
    r"""Return a weight c for each row, by which :func:`kept_apart` sees whether rows depend on each other.

    They are powers of two of both signs, so that multiplying by them rounds nothing. Up to 32 rows have 32 different
    weights; of more rows, any two have different ones with probability 31/32.

    Args:
        count: the number of rows.
        like: of the type and on the device that the weights shall have.
        seed: of the order of the weights.
    """
    places = torch.randperm(count, generator=torch.Generator().manual_seed(seed)) % 32
    return (torch.exp2(places // 2 - 8.0) * (1 - 2 * (places % 2))).to(like)


def kept_apart(plain: Tensor, weighted: Tensor, weights: Tensor) -> Tensor:
    r"""Return whether no row of a gradient comes from the output of another row, a boolean scalar.

    With :math:`M_{jb}` for what output j adds to row b, rows that come from their own outputs alone are multiplied by
    the weights of these, and others are not,

    .. math:: \delta_b(c) - c_b\,\delta_b(1) = \sum_j (c_j - c_b)\, M_{jb} .

    Args:
        plain: :math:`\delta(1)`, the gradient of the sum of the outputs, ``[B, ...]``.
        weighted: :math:`\delta(c)`, the gradient of their weighted sum.
        weights: c, from :func:`row_weights`.
    """
    if not plain.numel():
        return torch.ones((), dtype=torch.bool, device=plain.device)
    plain, weighted = (d.reshape(len(d), -1) for d in (plain, weighted))
    expected = plain * weights.to(plain).unsqueeze(1)
    error, size = (d.abs().amax(1) for d in (weighted - expected, expected))
    # Two different weights differ by half of either at least; without an influence of others only sums in a random
    # order, as on devices, and numbers too small for their type are rounded.
    rounding = torch.finfo(plain.dtype).eps
    return ~(error > rounding**0.5 * size + rounding**2 * plain.abs().max()).any()  # NaN shows nothing


# Gradients of examples -------------------------------------------------------------------------------------------


class Finding(NamedTuple):
    """The result of a proof.

    Attributes:
        wrong: numbers of the weights for which rules and model disagree.
        unproven: those that gradients, all zero or rounding errors, do not tell anything about.
        rows: where the examples are in the outputs of each use of a weight, if not in the likeliest dimension.
    """

    wrong: set[int]
    unproven: set[int]
    rows: Mapping[int, tuple[Rows, ...]] = {}

    def kept(self, uses: Served) -> Served:
        """Return the uses of the weights that are not wrong, with the rows that were found."""
        found = {k: calls for k, calls in uses.items() if k not in self.wrong}
        for k in self.rows.keys() & found.keys():
            found[k] = [use.at(rows) for use, rows in zip(found[k], self.rows[k], strict=True)]
        return found


def examined(uses: Served, values: Mapping[int, Tensor], outputs: Tensor, seed: int = 0) -> Finding:
    """Compare the gradients of examples with plain autograd, by two backward passes.

    Args:
        uses: of the weights to be proved, by their numbers.
        values: the weights by their numbers.
        outputs: f, one entry or row for each example.
        seed: of the weights c.
    """
    if not uses or not outputs.requires_grad:
        return Finding(set(), set(uses))
    if outputs.dim() > 1:  # unequal weights, under which log-probabilities do not cancel
        outputs = (
            outputs @ torch.arange(1, outputs.shape[1] + 1, device=outputs.device).to(outputs).sqrt().sin()
        )
    edges = list(dict.fromkeys(use.output for calls in uses.values() for use in calls))
    c = row_weights(len(outputs), outputs, seed)
    places: list[Any] = [*edges, *(values[k] for k in uses)]
    plain = torch.autograd.grad(
        outputs, edges, torch.ones_like(outputs), retain_graph=True, allow_unused=True
    )
    weighted = torch.autograd.grad(outputs, places, c, retain_graph=True, allow_unused=True)
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
    """Return the uses of a weight with examples where gradients show them; None if nowhere, or where they were."""
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
    """Say whether the gradients of a weight are wrong, and whether that cannot be said; booleans ``[2]``."""
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
        except RuntimeError:  # shapes that do not fit
            apart = torch.zeros_like(apart)
        largest = [x.abs().max() for x in use.contribution.operands if x.is_floating_point() and x.numel()]
        terms = terms + delta.norm() * (torch.stack(largest).max() if largest else 1.0)
    # A sum of terms that cancel is a few roundings of their size, more after normalisation. Below this bound
    # a gradient tells nothing; above it, wrong gradients are off by far more than the cube root of the rounding.
    rounding = 1000 * coarsest * terms
    size, error = torch.maximum(total.norm(), whole.norm()), (total - whole).norm()
    wrong = ~apart | (error > coarsest ** (1 / 3) * size + rounding)
    return torch.stack([wrong, ~wrong & ~(size > rounding)])  # nothing can be said of NaN, either


def _summed(use: Use, delta: Tensor, like: Tensor) -> Tensor:
    """The sum over examples of their gradients, some at a time."""
    count = max(1, _BUDGET // max(1, like.numel()))
    total = torch.zeros_like(like)
    for start in range(0, len(delta), count):
        part = slice(start, start + count)
        total += use.contribution.part(part).gradients(delta[part]).sum(0).reshape(like.shape)
    return total


class Proofs:
    """Examine every layout of each model's minibatches, and remember what was found.

    Later proofs, in calls 2, 4, 8, ..., 1000, 2000, ..., see whether that has changed.
    """

    def __init__(self) -> None:
        self._models: dict[int, tuple[Callable[[], Any], dict[Any, _Verdict]]] = {}

    def __reduce__(self) -> tuple:
        return type(self), ()  # a copy looks anew

    def proved(
        self,
        model: Any,
        key: Any,
        uses: Served,
        look: Callable[..., Finding],
        site: str,
        names: Sequence[str] = (),
    ) -> Served:
        """Return the uses of the weights that the table of rules may serve, with the rows that were found.

        Args:
            model: the model, remembered as long as it lives.
            key: the layout of the minibatch, beside the functions and shapes of the uses.
            uses: the uses of the weights, by their numbers.
            look: examines them, given a seed.
            site: the observed site, for messages.
            names: of the weights, for a warning; none without them.

        Raises:
            ModelError: a layout that was proved before is no longer right.
        """
        # Minibatches with the same graph have these in common.
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
        if reference is None or reference() is not owner:  # new, or in the place of one that is gone
            verdicts = {}
            self._models = {n: entry for n, entry in self._models.items() if entry[0]() is not None}
            self._models[id(owner)] = (weakref.ref(owner), verdicts)
        return verdicts


@dataclass
class _Verdict:
    """Everything known of the weights of a layout.

    Attributes:
        known: all findings together.
        calls: how often the question was asked.
        looks: how often it was examined.
    """

    known: Finding = Finding(set(), set())  # noqa: RUF009 (never written to)
    calls: int = 0
    looks: int = 0

    def is_due(self) -> bool:
        """Count a call, and say whether to examine it; a step that is recorded must not read the result."""
        if is_recording():
            return False
        self.calls += 1
        if is_looking():  # at one of many steps that were recorded
            return True
        waiting = bool(self.known.unproven) and self.calls <= _AT_ONCE
        return waiting or self.calls & (self.calls - 1) == 0 or self.calls % _INTERVAL == 0

    def renew(self, found: Finding, site: str) -> None:
        """Compare with what was found before."""
        news = found.wrong - self.known.wrong - self.known.unproven
        first, self.looks = self.looks == 0, self.looks + 1
        wrong = self.known.wrong | found.wrong
        self.known = Finding(wrong, found.unproven - wrong, {**self.known.rows, **found.rows})
        if news and not first:
            raise ModelError(
                f"examples of observed site {site!r} depend on rows of other examples, unlike in an earlier step, and "
                "squared gradients since then are wrong: train a model that mixes examples at times with IVON; if the "
                "model was changed on purpose, use a new objective"
            )


def warn_of_disproved(uses: Served, wrong: set[int], names: Sequence[str]) -> None:
    """Warn that weights need one backward pass per example, unless their rows were only a guess at a folded batch."""
    slow = [
        f"latent site {names[k]!r}"
        for k in sorted(wrong)
        if names and all(use.rows is not None and use.rows.each == 1 for use in uses[k])
    ]
    if slow:
        warn(
            f"{', '.join(slow)}: the per-example gradients computed layer by layer disagree with the gradient of the "
            "model, which mixes examples or takes gradients inside its forward pass. These weights get one backward "
            "pass per example: exact, but slower"
        )
