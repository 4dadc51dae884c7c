# SPDX-License-Identifier: Apache-2.0
"""Prediction by a model that is linear in its latents around the mode: the rule for Laplace's approximation."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.distributions import arguments_kept
from pyro_dvi.errors import GuideError
from pyro_dvi.links import GaussHermite, Probit
from pyro_dvi.links.class_links import ClassLink
from pyro_dvi.links.noise_links import NoiseLink
from pyro_dvi.predictive.engine.model_runs import Respond, Response
from pyro_dvi.predictive.engine.posterior_values import posterior_mean
from pyro_dvi.predictive.rules.rule import PredictionRule
from pyro_dvi.runs.log_joint import AtUnconstrained
from pyro_dvi.runs.outputs import Outputs, observed_outputs
from pyro_dvi.runs.posterior_run import twice_differentiable
from pyro_dvi.runs.predictive_of_outputs import integrated


@dataclass(frozen=True)
class Linearised(PredictionRule):
    r"""Predict from the Gaussian that linearisation gives to the outputs of the model.

    .. math::
        p(y \mid x) \approx \int p(y \mid f)\, \mathcal N\bigl(f;\, f(x; \hat u),\, J P^{-1} J^\top\bigr)\,\mathrm df,
        \qquad J = \partial f(x; \hat u)/\partial u

    The rule for a fitted :class:`~pyro_dvi.LaplaceGuide`. Outputs f are the parameters of the observed distribution as
    real numbers: a mean, logits, the logarithm of a rate or of a noise scale. Draws of the weights would be passed
    through the network far from where the Gaussian was fitted; linearised predictions stay at the mode.

    Status: exact for models that are linear in their latents. Given the Gaussian of f: exact for Normal, LogNormal and
    MultivariateNormal with certain noise and for Bernoulli; class probabilities as exact as ``link``; an uncertain
    noise scale as ``noise`` says, together with its correlation with the mean; any other distribution as a mixture over
    points.

    Args:
        link: from Gaussian logits, with their covariance, to class probabilities: ``Probit()`` or
            ``SobolSoftmax(n)`` of :mod:`pyro_dvi.links`.
        noise: from an uncertain noise scale to a predictive: ``GaussHermite(n)``, a mixture, or ``MomentMatched()``, a
            Normal of the same mean and variance.
        num_points: Sobol points where more than two numbers of one observation are uncertain and there is no closed
            form.

    Raises:
        ArgumentError: ``link`` or ``noise`` is no object of its kind, or less than one point.
        GuideError: the guide is no LaplaceGuide, or not fitted.

    Source: Immer, Korzepa & Bauer (2021), "Improving predictions of Bayesian neural nets via local linearization".

    Example:
        >>> import torch, pyro_dvi as dvi
        >>> net = dvi.to_bayesian_(torch.nn.Linear(1, 1, bias=False))
        >>> guide = dvi.LaplaceGuide(dvi.regressor(net, num_data=3, noise_scale=1.0))
        >>> batches = [(torch.ones(3, 1), torch.zeros(3, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> _ = guide.fit(batches)
        >>> dvi.predict(
        ...     guide.model, guide, torch.full((1, 1), 2.0)
        ... ).variance  # of function and noise
        tensor([2.0000])
    """

    link: ClassLink = field(default_factory=Probit)
    noise: NoiseLink = field(default_factory=lambda: GaussHermite(20))
    num_points: int = 256

    num_components = 1
    tells_noise_apart = False

    def __post_init__(self) -> None:
        check_choice("link", self.link, ClassLink, "Probit() or SobolSoftmax(256)")
        check_choice("noise", self.noise, NoiseLink, "GaussHermite(n) or MomentMatched()")
        check_count("num_points", self.num_points)

    def components(
        self, guide: Callable[..., Any], inputs: tuple[Any, ...], respond: Respond
    ) -> Iterator[Response]:
        """Give the one component."""
        linearised = getattr(guide, "linearised", None)
        if linearised is None:
            raise GuideError(
                f"Linearised() predicts from a LaplaceGuide, not from a {type(guide).__name__}: use AtMean(), "
                "Moments() or Samples(30)"
            )
        # Any value of every latent site: those that are read replace it.
        centre = posterior_mean(guide, inputs)
        responses: list[Response] = []

        def read(named: Mapping[str, Tensor], num_rows: int) -> Outputs:
            with twice_differentiable(), AtUnconstrained(named), arguments_kept() as made:
                response = respond(centre)
            responses.append(response)
            return observed_outputs(response.site, response.distribution, response.axis, num_rows, made)

        gaussian = linearised(inputs, read)
        distribution = integrated(
            gaussian.outputs, gaussian.full_covariance, self.link, self.noise, self.num_points
        )
        first = responses[0]
        yield replace(first, distribution=distribution, value=first.value.detach())
