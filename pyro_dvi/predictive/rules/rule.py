# SPDX-License-Identifier: Apache-2.0
r"""Rules of prediction: which latent values stand for the posterior.

A rule turns a posterior :math:`q` into an equally weighted mixture of predictive distributions,

.. math::
    p(y \mid x) \approx \frac1K \sum_{k=1}^K p(y \mid x, \theta_k),

and streams its components, so that :func:`~pyro_dvi.predict` can accumulate them in constant memory. A new rule is a
class with one method, :meth:`PredictionRule.components`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pyro_dvi.core.choice import check_count
from pyro_dvi.predictive.engine.run import Respond, Response
from pyro_dvi.predictive.posterior import ignores_inputs, posterior_mean, seeded_draws


class PredictionRule(ABC):
    """How a posterior becomes a predictive distribution.

    ``num_components`` says how many distributions :meth:`components` gives for a batch; ``tells_noise_apart`` whether
    each is the noise around one value of the latents, so that the rest of the uncertainty is the posterior's;
    ``averages_draws`` whether what the model draws itself, from sites that are neither in the guide nor observed, is
    averaged over as well; ``keeps_components`` whether they are few enough to be kept without being asked for.
    """

    num_components: int
    tells_noise_apart: bool = True
    averages_draws: bool = False
    keeps_components: bool = False

    @abstractmethod
    def components(
        self, guide: Callable[..., Any], inputs: tuple[Any, ...], respond: Respond
    ) -> Iterator[Response]:
        """Give the components of the mixture for a batch, one after the other.

        Random numbers come from torch's global generator, which has the same seed for every batch.

        Args:
            guide: the posterior, a Pyro guide.
            inputs: positional arguments of the model and the guide for this batch.
            respond: runs the model with the latent values that it is given, by site name.
        """


@dataclass(frozen=True)
class AtMean(PredictionRule):
    r"""Predict with every weight at its posterior mean, :math:`p(y \mid x, \mathrm{E}_q\theta)`.

    One run of the model. The rule for posteriors trained by :class:`~pyro_dvi.TaylorELBO`, whose mean is trained for
    its neighbourhood, and for MAP. For constrained sites (a positive scale, say) the mean is taken in the
    unconstrained space, which makes it the guide's median.

    Status: exact for what it says; it leaves out the posterior's width.
    """

    num_components = 1

    def components(
        self, guide: Callable[..., Any], inputs: tuple[Any, ...], respond: Respond
    ) -> Iterator[Response]:
        """Give the one component."""
        yield respond(posterior_mean(guide, inputs))


class FromDraws(PredictionRule):
    """A rule with one component for each of ``num_samples`` draws of the latents."""

    num_samples: int

    averages_draws = True

    @property
    def num_components(self) -> int:  # type: ignore[override]
        """As many as draws."""
        return self.num_samples

    def components(
        self, guide: Callable[..., Any], inputs: tuple[Any, ...], respond: Respond
    ) -> Iterator[Response]:
        """Give one component for each draw."""
        return map(respond, self.draws(guide, inputs))

    def repeats(self, guide: Callable[..., Any]) -> bool:
        """Whether every batch has the same draws, whatever its inputs."""
        return False

    @abstractmethod
    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Give the latent values of one draw after the other."""


@dataclass(frozen=True)
class Samples(FromDraws):
    r"""Average the predictions of ``num_samples`` draws from the posterior.

    The rule for posteriors trained by sampling (Pyro's ``Trace_ELBO``). The same draws serve every batch, so that
    each is one function over all inputs and the batch size does not matter.

    Status: unbiased for the probabilities (and the mean and second moment) under the posterior; their error falls
    with the root of ``num_samples``.

    Args:
        num_samples: draws from the guide; 30 predict networks well.

    Raises:
        ArgumentError: less than one draw.
    """

    num_samples: int = 30

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples)
        object.__setattr__(self, "num_samples", int(self.num_samples))  # of NumPy, say

    def repeats(self, guide: Callable[..., Any]) -> bool:
        """Whether the guide is automatic and has no function in it that looks at the inputs."""
        return ignores_inputs(guide)

    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Give the latent values of one draw after the other."""
        return seeded_draws(guide, inputs, self.num_samples)
