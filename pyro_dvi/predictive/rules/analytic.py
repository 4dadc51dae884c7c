# SPDX-License-Identifier: Apache-2.0
"""Prediction rules with one run of the model and no draws: moment propagation, and linearisation around the mode.

The propagation is an option of :class:`Moments`; its independence assumptions determine the predictive variance. A new
propagation is a class with one method, :meth:`Propagation.respond`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.distributions import arguments_kept
from pyro_dvi.curvature.reverse_delta import ReverseDeltaRecorder
from pyro_dvi.errors import GuideError, UnsupportedError
from pyro_dvi.expectations.logits import cholesky_root
from pyro_dvi.expectations.points import event_dim_of
from pyro_dvi.gaussians.normals import is_joint
from pyro_dvi.links import GaussHermite, MomentMatched, Probit, SobolSoftmax
from pyro_dvi.links.class_links import ClassLink
from pyro_dvi.links.families import joint_if_dependent, predictive_distribution
from pyro_dvi.links.noise_links import NoiseLink
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.moments.full_covariance import full_covariances
from pyro_dvi.moments.weight_uses import warned_of_repeated_uses
from pyro_dvi.predictive.engine.model_runs import Respond, Response
from pyro_dvi.predictive.engine.posterior_values import posterior_gaussians, posterior_mean
from pyro_dvi.predictive.rules.rule import PredictionRule
from pyro_dvi.runs.log_joint import AtUnconstrained
from pyro_dvi.runs.outputs import Outputs, observed_outputs
from pyro_dvi.runs.posterior_run import PosteriorMoments, propagated, twice_differentiable
from pyro_dvi.runs.predictive_of_outputs import as_pyro, integrated
from pyro_dvi.runs.uncertain import UncertainDistribution, rebuilt, uncertain_likelihoods, uncertain_part


class Propagation(ABC):
    """Propagates the variances of the weights through a model.

    Attributes:
        counts_weights_once: True if covariances between several uses of a weight are kept.
    """

    counts_weights_once: ClassVar[bool] = False

    @abstractmethod
    def respond(self, weights: Mapping[str, GaussianMoments], run: Callable[[], Response]) -> Response:
        """Run the model once and return its response; the distribution in it has moments as parameters.

        Args:
            weights: moments of the latent sites by name, filled while the model runs.
            run: runs the model with moments, once.
        """


@dataclass(frozen=True)
class Independent(Propagation):
    """Treat the units of every layer as independent, as in training; this takes one pass.

    Status: exact variances for one hidden layer. In other networks, units are correlated, because skip connections and
    convolution kernels share weights; these correlations are dropped. The variances of deep residual networks are
    therefore too small. After layer, group or instance normalisation, variances are too large if the inputs of the
    layer are nearly equal and share their noise. :func:`~pyro_dvi.diagnostics.compare_with_sampling` measures the
    errors.
    """

    def respond(self, weights: Mapping[str, GaussianMoments], run: Callable[[], Response]) -> Response:
        """Run the model."""
        return run()


@dataclass(frozen=True)
class FullCovariance(Propagation):
    """Propagate covariances between the activations of each example, as in training with ``full_covariance=True``.

    Status: moments and covariances of the outputs are exact for one hidden layer; in deeper networks, activations are
    taken to be jointly Gaussian. Only networks of linear layers and ReLU are supported; a function that would lose
    covariances raises an error. The cost grows with the square of the width.

    Source: Wu et al. (2019), "Deterministic variational inference for robust Bayesian neural networks".
    """

    def respond(self, weights: Mapping[str, GaussianMoments], run: Callable[[], Response]) -> Response:
        """Run the model."""
        with full_covariances():
            return run()


@dataclass(frozen=True)
class ReverseDelta(Propagation):
    r"""Compute output variances including the covariances due to shared weights: the smoothed reverse delta method.

    .. math:: \mathrm{Var}[f_k] \approx \sum_w (\partial m_k / \partial \bar w)^2\, \mathrm{Var}[w] + \dots

    Slopes are averages over the noise (:math:`\Phi(\mu/\sigma)` for ReLU). Paths that share a weight are summed before
    squaring, so skip connections, convolutions and tied layers keep their covariances.

    Status: exact for linear models; otherwise a first-order approximation with smoothed slopes. Means equal those of
    :class:`Independent`. Inputs are treated as deterministic: only the noise of the weights is propagated.

    The cost is one run with gradients, and one backward pass per output of an example. If a function of a weight has no
    per-example rule, or mixes examples, the cost is one backward pass per example and output. See
    :mod:`pyro_dvi.curvature.reverse_delta`.

    Raises:
        UnsupportedError: if a parameter of the observed distribution does not have one row per example, or if the model
            changed a deterministic input of a layer in place.
    """

    counts_weights_once: ClassVar[bool] = True

    def respond(self, weights: Mapping[str, GaussianMoments], run: Callable[[], Response]) -> Response:
        """Run the model, then replace the variances of the Gaussians that reach the observed site."""
        recorder = ReverseDeltaRecorder(weights)
        with torch.enable_grad(), observed_by(recorder):
            response = run()
        part = uncertain_part(response.distribution)
        if part is None:
            return response
        axis = response.axis - len(response.distribution.event_shape) + len(part.event_shape)
        num_rows = response.distribution.batch_shape[response.axis]
        parameters = dict(part.parameters)
        for name, value in part.parameters.items():
            if isinstance(value, GaussianMoments):
                parameters[name] = _pulled_back(recorder, part, name, axis, num_rows)
        new = UncertainDistribution(part.family, parameters, part.estimator)
        return replace(response, distribution=rebuilt(response.distribution, lambda _: new))


def _pulled_back(
    recorder: ReverseDeltaRecorder, part: UncertainDistribution, name: str, axis: int, num_rows: int
) -> GaussianMoments:
    """Return the moments of a parameter, computed from the Gaussian that it is a function of."""
    value = part.parameters[name]
    gaussian = value if value.link is None else value.link.inner
    axis -= event_dim_of(part.family, name) or 0
    if gaussian.dim() < -axis or gaussian.shape[axis] != num_rows:
        if not recorder.reaches(gaussian):  # one value for all examples, such as an uncertain noise scale
            return value.detach()
        raise UnsupportedError(
            f"ReverseDelta() needs one row per example, but parameter {name!r} of {part.family.__name__} has the shape "
            f"{tuple(gaussian.shape)} for {num_rows} examples: predict with Moments(propagation=Independent())"
        )
    inner = GaussianMoments(gaussian.loc.detach(), recorder.variance(gaussian, axis).detach())
    if value.link is None:
        return inner
    function: Any = value.link.function
    with torch.no_grad():
        result = function(inner)  # moments, because inner is
    return result.linked(replace(value.link, inner=inner))


@dataclass(frozen=True)
class Moments(PredictionRule):
    r"""Predict in one pass, with the means and variances of the weights propagated through the model.

    .. math:: p(y \mid x) \approx \int p(y \mid f)\, \mathcal N(f; m_f(x), v_f(x))\, \mathrm df

    This is the default rule for posteriors trained with :class:`~pyro_dvi.MomentPropagationELBO`. It works with any
    factorised Gaussian guide, and with a :class:`~pyro_dvi.LaplaceGuide` after ``guide.fit(batches, Diagonal())``.
    Predictions with Gaussian noise have mean :math:`m` and variance :math:`v + \mathrm E[\sigma^2]`. Class
    probabilities are the expectation of the softmax.

    Status: exact if every weight enters each output once, as in linear models and in networks with one hidden layer
    (apart from treating the outputs of such a network as Gaussian). In deeper networks, with convolution kernels, and
    with weights that are used twice, covariances are dropped; :func:`~pyro_dvi.diagnostics.compare_with_sampling`
    measures the effect.

    Args:
        link: maps moments of logits to class probabilities: ``SobolSoftmax()`` or ``Probit()`` of
            :mod:`pyro_dvi.links`.
        noise: maps an uncertain noise scale to a predictive distribution: ``MomentMatched()`` to a Normal,
            ``GaussHermite(n)`` to a mixture, which is more accurate and has heavier tails.
        propagation: propagates variances through the network: ``Independent()``, as in training, or
            ``FullCovariance()`` or ``ReverseDelta()``, which keep covariances.

    Raises:
        ArgumentError: if ``link``, ``noise`` or ``propagation`` is not an object of the required class.
        GuideError: if the guide is not a factorised Gaussian.
        UnsupportedError: if a function or distribution of the model has no rule.

    Source: Schmitt & Roth (2021), Eq. 19-20.
    """

    link: ClassLink = field(default_factory=SobolSoftmax)
    noise: NoiseLink = field(default_factory=MomentMatched)
    propagation: Propagation = field(default_factory=Independent)

    tells_noise_apart = False

    def __post_init__(self) -> None:
        check_choice("link", self.link, ClassLink, "SobolSoftmax() or Probit()")
        check_choice("noise", self.noise, NoiseLink, "MomentMatched() or GaussHermite(n)")
        check_choice(
            "propagation", self.propagation, Propagation, "Independent(), FullCovariance() or ReverseDelta()"
        )

    def components(self, guide: Any, inputs: tuple[Any, ...], respond: Respond) -> Iterator[Response]:
        """Yield the single component."""
        centre, marginals = posterior_gaussians(guide, inputs)
        joint = [name for name, gaussian in marginals.gaussians.items() if is_joint(gaussian.base)]
        if joint and self.propagation.counts_weights_once:
            raise UnsupportedError(
                f"{joint[0]!r} has covariances, which {self.propagation} does not propagate: use Moments()"
            )

        def predictive(part: UncertainDistribution) -> Any:
            family, given = part.family, part.parameters
            joint = joint_if_dependent(family, given)
            found = predictive_distribution(family, given, link=self.link, noise=self.noise, joint=joint)
            return as_pyro(found)

        weights = PosteriorMoments(marginals, propagated)
        of_guide = getattr(guide, "__dict__", {})  # setattr is avoided, because a module may reject it
        known = "_warned_of_repeated_uses" in of_guide or self.propagation.counts_weights_once
        recorder = nullcontext if known else warned_of_repeated_uses
        of_guide["_warned_of_repeated_uses"] = True
        with uncertain_likelihoods(), weights, recorder(weights.given):
            response = self.propagation.respond(weights.given, partial(respond, centre))
        yield replace(response, distribution=rebuilt(response.distribution, predictive))


@dataclass(frozen=True)
class Linearised(PredictionRule):
    r"""Predict from the Gaussian distribution of the outputs of the linearised model.

    .. math::
        p(y \mid x) \approx \int p(y \mid f)\, \mathcal N\bigl(f;\, f(x; \hat u),\, J P^{-1} J^\top\bigr)\,\mathrm df,
        \qquad J = \partial f(x; \hat u)/\partial u

    This is the default rule for a fitted :class:`~pyro_dvi.LaplaceGuide`. The outputs f are the unconstrained
    parameters of the observed distribution: a mean, logits, the logarithm of a rate or of a noise scale. The Gaussian
    was fitted at the mode, and drawn weights would evaluate the network far from it; linearised predictions use the
    network only at the mode.

    Status: exact for models that are linear in their latents. Given the Gaussian of f, predictions are exact for
    Normal, LogNormal and MultivariateNormal with deterministic noise, and for Bernoulli. Class probabilities are as
    accurate as ``link``. An uncertain noise scale, and its correlation with the mean, are included with ``noise``. Any
    other distribution becomes a mixture over points.

    Args:
        link: maps Gaussian logits with covariances to class probabilities: ``Probit()`` or ``SobolSoftmax(n)`` of
            :mod:`pyro_dvi.links`.
        noise: maps an uncertain noise scale to a predictive distribution: ``GaussHermite(n)`` to a mixture,
            ``MomentMatched()`` to a Normal with the same mean and variance.
        num_points: number of Sobol points if more than two parameters of an observation are uncertain and there is no
            closed form.

    Raises:
        ArgumentError: if ``link`` or ``noise`` is not an object of the required class, or ``num_points`` is less than
            one.
        GuideError: if the guide is not a LaplaceGuide, or is not fitted.

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

    tells_noise_apart = False
    draws: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice("link", self.link, ClassLink, "Probit() or SobolSoftmax(256)")
        check_choice("noise", self.noise, NoiseLink, "GaussHermite(n) or MomentMatched()")
        check_count("num_points", self.num_points)

    def components(self, guide: Any, inputs: tuple[Any, ...], respond: Respond) -> Iterator[Response]:
        """Yield the single component."""
        linearised = getattr(guide, "linearised", None)
        if linearised is None:
            raise GuideError(
                f"Linearised() requires a LaplaceGuide, not a {type(guide).__name__}: use Samples(30)"
            )
        # Any values of the latent sites are suitable here, because they are replaced when the outputs are read.
        centre = posterior_mean(guide, inputs)
        responses: list[Response] = []

        def read(named: Mapping[str, Tensor], num_rows: int) -> Outputs:
            with twice_differentiable(), AtUnconstrained(named), arguments_kept() as made:
                response = respond(centre)
            responses.append(response)
            return observed_outputs(response.site, response.distribution, response.axis, num_rows, made)

        gaussian = linearised(inputs, read, None if self.draws else self.link)
        for distribution in self._predicted(gaussian.outputs, gaussian.full_covariance):
            yield replace(responses[0], distribution=distribution, value=responses[0].value.detach())

    def _predicted(self, outputs: Outputs, covariance: Tensor) -> Iterator[Any]:
        yield integrated(outputs, covariance, self.link, self.noise, self.num_points)


@dataclass(frozen=True)
class LinearisedDraws(Linearised):
    """Draw the outputs of the linearised model, each example's independently, to score observations given the draws.

    Args:
        num_components: number of draws.
    """

    num_components: int = 1
    draws = True

    def _predicted(self, outputs: Outputs, covariance: Tensor) -> Iterator[Any]:
        outputs, root = outputs.detached(), cholesky_root(covariance.detach())
        for _ in range(self.num_components):
            shift = root @ torch.randn_like(outputs.values).unsqueeze(-1)
            yield outputs.with_values(outputs.values + shift.squeeze(-1))
