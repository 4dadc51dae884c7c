# SPDX-License-Identifier: Apache-2.0
"""Prediction by the members of an ensemble, each by its own rule."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from pyro_dvi.core.undisturbed import seeder
from pyro_dvi.errors import ArgumentError
from pyro_dvi.predictive.engine.run import Latents, Respond, Response
from pyro_dvi.predictive.posterior import members_of, of_member
from pyro_dvi.predictive.rules.rule import FromDraws, PredictionRule, Samples


@dataclass(frozen=True, repr=False)
class OfMembers(PredictionRule):
    r"""Predict by every member of an ensemble, and mix their predictive distributions in equal shares.

    .. math:: p(y \mid x) \approx \frac1K \sum_{k=1}^K p_k(y \mid x)

    What :func:`~pyro_dvi.predict` takes for an :class:`~pyro_dvi.EnsembleGuide`; ``method=`` names the rule of each
    member.

    Status: exact for what it says; each :math:`p_k` is what its rule makes of it.

    Args:
        rules: a rule for each member.

    Raises:
        ArgumentError: rules that give unequal numbers of distributions, which would have unequal weights.
    """

    rules: tuple[PredictionRule, ...]

    def __post_init__(self) -> None:
        counts = [rule.num_components for rule in self.rules]
        if len(set(counts)) > 1:
            raise ArgumentError(
                f"the members of the ensemble would predict by {counts} distributions, which have equal weights in "
                "its mixture: name one rule for all of them, as method=Samples(30) or method=AtMean()"
            )

    def __repr__(self) -> str:
        alike = all(rule == self.rules[0] for rule in self.rules)
        return f"{len(self.rules)} x {self.rules[0]!r}" if alike else f"OfMembers{self.rules!r}"

    @property
    def num_components(self) -> int:  # type: ignore[override]
        """Those of all members."""
        return sum(rule.num_components for rule in self.rules)

    @property
    def tells_noise_apart(self) -> bool:  # type: ignore[override]
        """Whether every member does."""
        return all(rule.tells_noise_apart for rule in self.rules)

    @property
    def keeps_components(self) -> bool:  # type: ignore[override]
        """Where there is one of each member."""
        return self.num_components == len(self.rules)

    def components(
        self, guide: Callable[..., Any], inputs: tuple[Any, ...], respond: Respond
    ) -> Iterator[Response]:
        """Give the components of one member after the other, of runs of the ensemble's model."""
        # As Components does, so that a prepared predictor has its numbers.
        seeds = torch.randint(2**31 - 1, (len(self.rules),)).tolist()
        for place, (member, rule) in enumerate(zip(members_of(guide), self.rules, strict=True)):
            with member.in_store():
                seeder()(seeds[place])
                own = list(rule.components(member.guide, inputs, partial(_respond, respond, place)))
            yield from own


def _respond(respond: Respond, place: int, latents: Latents) -> Response:
    return respond(of_member(place, latents))


def draws_weights(rule: PredictionRule) -> bool:
    """Whether each component of a rule is of a draw of the weights."""
    return all(map(draws_weights, rule.rules)) if isinstance(rule, OfMembers) else isinstance(rule, FromDraws)


def with_draws(rule: PredictionRule, count: int) -> PredictionRule:
    """Return the rule that draws about ``count`` weights in all, the same number from each member."""
    if isinstance(rule, OfMembers):
        share = max(1, count // len(rule.rules))
        return OfMembers(tuple(with_draws(own, share) for own in rule.rules))
    return Samples(count)
