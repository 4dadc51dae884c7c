# SPDX-License-Identifier: Apache-2.0
r"""Prediction rules: which latent values represent the posterior.

A rule turns a posterior :math:`q` into an equally weighted mixture of predictive distributions,

.. math::
    p(y \mid x) \approx \frac1K \sum_{k=1}^K p(y \mid x, \theta_k),

and streams its components, so that :func:`~pyro_dvi.predict` can accumulate them in constant memory. A new rule is a
class with one method, :meth:`PredictionRule.components`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from pyro_dvi.core.arguments import check_count, with_missing
from pyro_dvi.core.undisturbed import reseeded, seeder
from pyro_dvi.errors import ArgumentError
from pyro_dvi.predictive.engine.model_runs import Latents, Respond, Response
from pyro_dvi.predictive.engine.posterior_values import (
    ignores_inputs,
    members_of,
    of_member,
    posterior_mean,
    seeded_draws,
)
from pyro_dvi.runs.sites import AllRows


class PredictionRule(ABC):
    """Maps a posterior to a predictive distribution.

    ``num_components`` is the number of distributions that :meth:`components` yields for a batch. ``tells_noise_apart``
    is true if each distribution is conditioned on one value of the latents: it then contains only the noise, and the
    remaining uncertainty is due to the posterior. ``averages_draws`` is true if the rule also averages over values that
    the model draws at sites that are neither in the guide nor observed. ``keeps_components`` is true if there are few
    enough distributions to keep them by default.
    """

    num_components: int = 1
    tells_noise_apart: bool = True
    averages_draws: bool = False
    keeps_components: bool = False

    @abstractmethod
    def components(self, guide: Any, inputs: tuple[Any, ...], respond: Respond) -> Iterator[Response]:
        """Yield the components of the mixture for a batch, one by one.

        Random numbers come from torch's global generator, which is seeded in the same way for every batch.

        Args:
            guide: the posterior, a Pyro guide.
            inputs: positional arguments of the model, and of the guide, for this batch.
            respond: runs the model with latent values, given by site name.
        """


@dataclass(frozen=True)
class AtMean(PredictionRule):
    r"""Predict with every weight at its posterior mean, :math:`p(y \mid x, \mathrm{E}_q\theta)`.

    It needs one run of the model. It is the default rule for MAP estimates, and for posteriors trained with
    :class:`~pyro_dvi.TaylorELBO`, which evaluates the likelihood at the mean. For constrained sites (such as a positive
    scale), the mean is taken in unconstrained space; in constrained space, it is the median.

    Status: exact at the mean; ignores the posterior variance.
    """

    def components(self, guide: Any, inputs: tuple[Any, ...], respond: Respond) -> Iterator[Response]:
        """Yield the single component."""
        yield respond(posterior_mean(guide, inputs))


class FromDraws(PredictionRule):
    """A rule with one component for each of ``num_samples`` draws of the latents."""

    num_samples: int

    averages_draws = True

    @property
    def num_components(self) -> int:  # type: ignore[override]
        """The number of draws."""
        return self.num_samples

    def components(self, guide: Any, inputs: tuple[Any, ...], respond: Respond) -> Iterator[Response]:
        """Yield one component for each draw."""
        return map(respond, self.draws(guide, inputs))

    def repeats(self, guide: Callable[..., Any]) -> bool:
        """Return True if every batch has the same draws, whatever its inputs."""
        return True

    @abstractmethod
    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Yield the latent values of each draw."""


@dataclass(frozen=True)
class Samples(FromDraws):
    r"""Average the predictions of ``num_samples`` draws from the posterior.

    It is the default rule for posteriors trained with sampled weights, as with Pyro's ``Trace_ELBO``. Every batch uses
    the same draws, so each draw is one function of all inputs, and the batch size does not affect the predictions.

    Status: unbiased for probabilities, means and second moments under the posterior; the error is inversely
    proportional to the square root of ``num_samples``.

    Args:
        num_samples: number of draws from the guide; 30 are sufficient for networks.

    Raises:
        ArgumentError: if ``num_samples`` is less than one.
    """

    num_samples: int = 30

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples)
        object.__setattr__(self, "num_samples", int(self.num_samples))  # accepts NumPy integers too

    def repeats(self, guide: Callable[..., Any]) -> bool:
        """Return True for an automatic guide that contains no function of the inputs."""
        return ignores_inputs(guide)

    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Yield the latent values of each draw."""
        return seeded_draws(guide, inputs, self.num_samples)


@dataclass(frozen=True, repr=False)
class OfMembers(PredictionRule):
    r"""Predict with every member of an ensemble, and mix the predictive distributions with equal weights.

    .. math:: p(y \mid x) \approx \frac1K \sum_{k=1}^K p_k(y \mid x)

    It is the default rule for an :class:`~pyro_dvi.training.EnsembleGuide`. The members predict with the rule
    ``method`` that :func:`~pyro_dvi.predict` received, or else with their own rules.

    Status: the mixture is exact; its components :math:`p_k` are as accurate as the rules of the members.

    Args:
        rules: one rule per member.

    Raises:
        ArgumentError: if the rules have different numbers of components, so that members would have unequal weights.
    """

    rules: tuple[PredictionRule, ...]

    def __post_init__(self) -> None:
        counts = [rule.num_components for rule in self.rules]
        if len(set(counts)) > 1:
            raise ArgumentError(
                f"the prediction rules of the members average {counts} distributions, but must all average the same "
                "number: choose one rule for all members, such as method=Samples(30)"
            )

    def __repr__(self) -> str:
        alike = all(rule == self.rules[0] for rule in self.rules)
        return f"{len(self.rules)} x {self.rules[0]!r}" if alike else f"OfMembers{self.rules!r}"

    @property
    def num_components(self) -> int:  # type: ignore[override]
        """The total number of components of all members."""
        return sum(rule.num_components for rule in self.rules)

    @property
    def tells_noise_apart(self) -> bool:  # type: ignore[override]
        """True if the rules of all members separate noise from posterior uncertainty."""
        return all(rule.tells_noise_apart for rule in self.rules)

    @property
    def keeps_components(self) -> bool:  # type: ignore[override]
        """True if each member has one component."""
        return self.num_components == len(self.rules)

    def components(self, guide: Any, inputs: tuple[Any, ...], respond: Respond) -> Iterator[Response]:
        """Yield the components of one member after another, from runs of the ensemble's model."""
        # The seeds are those that Components uses, so that a predictor gives the same results.
        seeds = torch.randint(2**31 - 1, (len(self.rules),)).tolist()
        for place, (member, rule) in enumerate(zip(members_of(guide), self.rules, strict=True)):
            with member.in_store():
                seeder()(seeds[place])
                own = list(rule.components(member.guide, inputs, partial(_respond, respond, place)))
            yield from own


def _respond(respond: Respond, place: int, latents: Latents) -> Response:
    return respond(of_member(place, latents))


def draws_weights(rule: PredictionRule) -> bool:
    """Return True if each component of a rule comes from a draw of the weights."""
    return all(map(draws_weights, rule.rules)) if isinstance(rule, OfMembers) else isinstance(rule, FromDraws)


def with_draws(rule: PredictionRule, count: int) -> PredictionRule:
    """Return a rule with about ``count`` draws of the weights in total; all members contribute the same number."""
    if isinstance(rule, OfMembers):
        share = max(1, count // len(rule.rules))
        return OfMembers(tuple(with_draws(own, share) for own in rule.rules))
    return Samples(count)


@dataclass(frozen=True)
class PriorSamples(FromDraws):
    """Average the predictions of draws from the model's prior.

    For every draw, the model runs with the draw's own seed and with the inputs of the first batch, so that each draw is
    one function of all inputs.

    Args:
        num_samples: number of draws.
        model: the Pyro model.
        inputs: its arguments for the first batch, without the observation.
        sites: names of its latent sites.
    """

    num_samples: int
    model: Callable[..., Any] = field(repr=False)
    inputs: tuple[Any, ...] = field(repr=False)
    sites: Collection[str] = field(repr=False)

    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Yield the latent values of the draws, which do not depend on the posterior or on the inputs of this batch."""
        for _ in reseeded(self.num_samples):
            with AllRows():
                inputs = with_missing(self.model, self.inputs)
                nodes: Any = poutine.trace(self.model).get_trace(*inputs).nodes
            yield {name: nodes[name]["value"] for name in self.sites if name in nodes}
