# SPDX-License-Identifier: Apache-2.0
"""How the variances of a prediction come from those of the weights.

Propagation is a choice of :class:`~pyro_dvi.predictive.rules.moments.Moments`: what it takes as independent decides how
wide the predictions are. A new one is a class with one method, :meth:`Propagation.respond`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from pyro_dvi.curvature.reverse_delta.recorder import ReverseDeltaRecorder
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.gaussian import event_dim_of
from pyro_dvi.gaussians.joint_normal import is_joint
from pyro_dvi.moments import GaussianMoments, observed_by
from pyro_dvi.predictive.engine.run import Response
from pyro_dvi.runs.latents import Marginals
from pyro_dvi.runs.uncertain import UncertainDistribution, uncertain_part, with_uncertain_part


class Propagation(ABC):
    """How the variances of the weights are propagated through a model.

    Attributes:
        counts_weights_once: whether a weight that is used several times is the same weight each time.
    """

    counts_weights_once: ClassVar[bool] = False

    def check(self, marginals: Marginals) -> None:
        """Refuse a posterior with covariances, unless the propagation is one that keeps them.

        Raises:
            UnsupportedError: names the propagation.
        """
        joint = [name for name, gaussian in marginals.gaussians.items() if is_joint(gaussian.base)]
        if joint:
            raise UnsupportedError(
                f"{type(self).__name__} takes weights as independent, and {joint[0]!r} of the guide has covariances: "
                "predict with Moments(), whose propagation keeps those of a last layer, or with Samples(n)"
            )

    @abstractmethod
    def respond(self, weights: Mapping[str, GaussianMoments], run: Callable[[], Response]) -> Response:
        """Return the response of one run of the model, whose distribution holds moments.

        Args:
            weights: the moments of the latent sites by name, filled while the model runs.
            run: runs the model with moments, once.
        """


@dataclass(frozen=True)
class Independent(Propagation):
    """Take the units of every layer as independent, as training does; one pass.

    Status: exact variances for one hidden layer. Elsewhere units are correlated, since skip connections and kernels
    that act at many positions share weights, and the correlations are dropped. Variances of deep residual networks come
    out too small; those behind layer, group or instance normalisation can come out too large, where its inputs are
    nearly equal and share their noise. :func:`~pyro_dvi.compare_with_sampling` says how much.
    """

    def check(self, marginals: Marginals) -> None:
        """Take any."""

    def respond(self, weights: Mapping[str, GaussianMoments], run: Callable[[], Response]) -> Response:
        """Run the model."""
        return run()


@dataclass(frozen=True)
class ReverseDelta(Propagation):
    r"""Variances of the outputs with the covariances that shared weights cause: the smoothed reverse delta method.

    .. math:: \mathrm{Var}[f_k] \approx \sum_w (\partial m_k / \partial \bar w)^2\, \mathrm{Var}[w] + \dots

    Slopes are averages over the noise (:math:`\Phi(\mu/\sigma)` for a rectifier). Paths that share a weight add up
    before the square, so skip connections, convolutions and tied layers keep their covariances.

    Status: exact for linear models, a first-order approximation with smoothed slopes otherwise. Means are those of
    :class:`Independent`. Inputs count as certain: only the noise of weights is pulled back.

    Cost: one backward pass for each output of an example besides one run with gradients; a pass for each example where
    a function of a weight has no rule for gradients of examples, or rows that are not those of single examples. See
    :mod:`pyro_dvi.curvature.reverse_delta`.

    Raises:
        UnsupportedError: a parameter of the observed distribution has no row for each example, or the model changed a
            certain input of a layer in place.
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
        parameters = {
            name: _pulled_back(recorder, part, name, value, axis, num_rows)
            if isinstance(value, GaussianMoments)
            else value
            for name, value in part.parameters.items()
        }
        new = UncertainDistribution(part.family, parameters, part.estimator)
        return replace(response, distribution=with_uncertain_part(response.distribution, new))


def _pulled_back(
    recorder: ReverseDeltaRecorder,
    part: UncertainDistribution,
    name: str,
    value: GaussianMoments,
    axis: int,
    num_rows: int,
) -> GaussianMoments:
    """Moments of a parameter from those of the Gaussian behind it."""
    gaussian = value if value.link is None else value.link.inner
    axis -= event_dim_of(part.family, name) or 0
    if gaussian.dim() < -axis or gaussian.shape[axis] != num_rows:
        if not recorder.reaches(gaussian):  # one number for all examples, as an uncertain noise scale
            return value.detach()
        raise UnsupportedError(
            f"the reverse delta method: parameter {name!r} of {part.family.__name__} has the shape "
            f"{tuple(gaussian.shape)}, without a row for each of {num_rows} examples. Predict with "
            "Moments(propagation=Independent())."
        )
    inner = GaussianMoments(gaussian.loc.detach(), recorder.variance(gaussian, axis).detach())
    if value.link is None:
        return inner
    function: Any = value.link.function
    with torch.no_grad():
        result = function(inner)  # moments, of moments
    return result.linked(replace(value.link, inner=inner))
