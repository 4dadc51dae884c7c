# SPDX-License-Identifier: Apache-2.0
"""Prediction by moment propagation: one pass, no draws."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from pyro_dvi.core.choice import check_choice, check_count
from pyro_dvi.core.devices import reseeded
from pyro_dvi.links import ClassLink, MomentMatched, NoiseLink, SobolSoftmax, predictive_distribution
from pyro_dvi.links.joint import joint_if_dependent
from pyro_dvi.moments.weight_uses import warned_of_repeated_uses
from pyro_dvi.predictive.engine.run import Respond, Response
from pyro_dvi.predictive.posterior import posterior_gaussians
from pyro_dvi.predictive.rules.propagation import Independent, Propagation
from pyro_dvi.predictive.rules.rule import PredictionRule
from pyro_dvi.runs.moment_run import PosteriorMoments, propagated, reparameterised
from pyro_dvi.runs.predictive_of_outputs import as_pyro
from pyro_dvi.runs.uncertain import predictive_of, uncertain_likelihoods

_LOOKED_AT: WeakValueDictionary[int, Any] = WeakValueDictionary()  # guides that were predicted with


@dataclass(frozen=True)
class Moments(PredictionRule):
    r"""Predict in one pass, by the means and variances of the weights propagated through the model.

    .. math:: p(y \mid x) \approx \int p(y \mid f)\, \mathcal N(f; m_f(x), v_f(x))\, \mathrm df

    The rule for posteriors trained by :class:`~pyro_dvi.MomentPropagationELBO`; it serves any factorised Gaussian
    guide, and a :class:`~pyro_dvi.LaplaceGuide` after ``guide.fit(batches, Diagonal())``. Numbers with Gaussian noise
    have mean :math:`m` and variance :math:`v + \mathrm E[\sigma^2]`; class probabilities are the average softmax.

    Status: exact where every weight enters each output once, as in linear models and, up to the Gaussian form of the
    output, networks with one hidden layer. Deeper networks, shared kernels and weights that are used twice drop
    covariances (:func:`~pyro_dvi.compare_with_sampling` says how much).

    Args:
        link: from moments of logits to probabilities: ``SobolSoftmax()``, ``Probit()``, ``LaplaceBridge()`` of
            :mod:`pyro_dvi.links`.
        noise: from an uncertain noise scale to a predictive: ``MomentMatched()``, a Normal, or ``GaussHermite(n)``, a
            mixture that keeps the heavier tails and is the sharper of the two.
        num_samples: draws of latents that are transformed to their support (a positive noise scale, say); None passes
            on their moments, and integrates the likelihood over the Gaussian behind them.
        propagation: how variances come through the network: ``Independent()``, as in training, or
            ``ReverseDelta()``, which keeps covariances.

    Raises:
        ArgumentError: less than one draw, or links that are no objects of their kind.
        GuideError: the guide is not a factorised Gaussian.
        UnsupportedError: a function or distribution of the model has no rule.

    Source: Schmitt & Roth (2021), Eq. 19-20.
    """

    link: ClassLink = field(default_factory=SobolSoftmax)
    noise: NoiseLink = field(default_factory=MomentMatched)
    num_samples: int | None = None
    propagation: Propagation = field(default_factory=Independent)

    tells_noise_apart = False

    def __post_init__(self) -> None:
        if self.num_samples is not None:
            check_count("num_samples", self.num_samples)
            object.__setattr__(self, "num_samples", int(self.num_samples))  # of NumPy, say
        check_choice("link", self.link, ClassLink, "SobolSoftmax() or Probit()")
        check_choice("noise", self.noise, NoiseLink, "MomentMatched() or GaussHermite(n)")
        check_choice("propagation", self.propagation, Propagation, "Independent() or ReverseDelta()")

    @property
    def num_components(self) -> int:  # type: ignore[override]
        """One, or as many as draws of what cannot be propagated."""
        return self.num_samples or 1

    def components(
        self, guide: Callable[..., Any], inputs: tuple[Any, ...], respond: Respond
    ) -> Iterator[Response]:
        """Give the one component, or one for each draw of what cannot be propagated."""
        centre, marginals = posterior_gaussians(guide, inputs)
        self.propagation.check(marginals)

        def predictive(family: type, parameters: Mapping[str, Any]) -> Any:
            joint = joint_if_dependent(family, parameters)
            return as_pyro(
                predictive_distribution(family, parameters, link=self.link, noise=self.noise, joint=joint)
            )

        stand_in = propagated if self.num_samples is None else reparameterised
        # A seed for each draw, as in Samples: how many numbers the model draws at its observed site is then no matter.
        for _ in reseeded(self.num_components):
            weights = PosteriorMoments(marginals, stand_in)
            known = _LOOKED_AT.get(id(guide)) is guide or self.propagation.counts_weights_once
            recorder = nullcontext if known else warned_of_repeated_uses
            _LOOKED_AT[id(guide)] = guide
            with uncertain_likelihoods(), weights, recorder(weights.given):
                response = self.propagation.respond(weights.given, partial(respond, centre))
            yield replace(response, distribution=predictive_of(response.distribution, predictive))
