# SPDX-License-Identifier: Apache-2.0
r"""Predictive distributions :math:`\int p(y \mid \theta)\,q(\theta)\,\mathrm d\theta` of uncertain parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch import distributions as td

from pyro_dvi.choice import check_choice
from pyro_dvi.expectations.bernoulli import is_gaussian_logit
from pyro_dvi.expectations.categorical import gaussian_logits
from pyro_dvi.expectations.gaussian import are_distinct, gaussian_of
from pyro_dvi.expectations.logistic import logit_of_expected_sigmoid
from pyro_dvi.expectations.numerical import evaluation
from pyro_dvi.expectations.rules import find_rule
from pyro_dvi.links.classes import ClassLink, SobolSoftmax, average_logits
from pyro_dvi.links.mixture import mixture_over_points
from pyro_dvi.links.noise import MomentMatched, NoiseLink
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.value import loc_of, variance_of
from pyro_dvi.registry import registering

__all__ = ["predictive_distribution", "predictive_rule"]

_RULES: dict[type, Callable] = {}
_CLASSES, _NOISE = SobolSoftmax(), MomentMatched()


def predictive_rule(*families: type) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the predictive distribution of distribution classes.

    The rule is called with the arguments that the distribution was made with, by name, and with ``classes=`` or
    ``noise=`` if it has parameters of these names. It may decline by returning ``NotImplemented``: a mixture over
    points follows, as for families without a rule.
    """
    return registering(_RULES, families)


def predictive_distribution(
    family: type,
    parameters: Mapping[str, Any],
    *,
    classes: ClassLink = _CLASSES,
    noise: NoiseLink = _NOISE,
) -> td.Distribution:
    """Return the predictive distribution, of the batch and event shape of the family.

    Status: exact for a Normal, LogNormal or MultivariateNormal whose mean only is uncertain, and for Bernoulli; class
    probabilities as exact as ``classes``; other families are mixtures over points
    (:func:`~pyro_dvi.links.mixture.mixture_over_points`). So is a Normal whose mean and scale are functions of the very
    same Gaussian, unless moments are matched, which are what they are if mean and scale were independent.

    Args:
        family: the distribution class.
        parameters: what the distribution is made with, by name: moments, tensors or numbers.
        classes: from Gaussian logits to probabilities.
        noise: from an uncertain scale of Gaussian noise to a distribution.

    Raises:
        ArgumentError: ``classes`` or ``noise`` is no object of its kind.
        UnsupportedError: an uncertain parameter can leave its domain.

    Example:
        >>> f = GaussianMoments(torch.zeros(1), torch.full((1,), 3.0))
        >>> predictive_distribution(td.Normal, {"loc": f, "scale": 1.0})
        Normal(loc: tensor([0.]), scale: tensor([2.]))
    """
    check_choice("classes", classes, ClassLink, "SobolSoftmax() or Probit()")
    check_choice("noise", noise, NoiseLink, "MomentMatched() or GaussHermite(n)")
    given = {k: v for k, v in parameters.items() if k != "validate_args" and v is not None}
    uncertain = [p for p in given.values() if isinstance(p, GaussianMoments)]
    if not uncertain:
        return family(**given)
    found = find_rule(_RULES, family)
    if found is not None and given.keys() <= found.names:
        options = {k: v for k, v in {"classes": classes, "noise": noise}.items() if k in found.names}
        result: td.Distribution = found.rule(**given, **options)
        if result is not NotImplemented:
            return result
    for plain in (td.Bernoulli, td.Categorical, td.OneHotCategorical):  # OrderedLogistic is a Categorical
        if issubclass(family, plain):
            return plain(logits=_average(family, given))
    return mixture_over_points(family, given)


@predictive_rule(td.Normal)
def normal(loc: Any, scale: Any, noise: NoiseLink) -> td.Distribution:
    r"""Predictive of Gaussian noise: :math:`\mathcal N(\mu, v_\mu + s^2)`, or what ``noise`` makes of it."""
    return _with_noise(loc, scale, noise, td.Normal)


@predictive_rule(td.LogNormal)
def log_normal(loc: Any, scale: Any, noise: NoiseLink) -> td.Distribution:
    """Predictive of log-normal noise: the Normal's, of the logarithm."""
    return _with_noise(loc, scale, noise, td.LogNormal)


def _with_noise(loc: Any, scale: Any, noise: NoiseLink, cls: Any) -> td.Distribution:
    spread = variance_of(loc)
    if isinstance(scale, GaussianMoments):
        if (
            isinstance(loc, GaussianMoments)
            and not isinstance(noise, MomentMatched)
            and not are_distinct([loc, scale])
        ):
            return NotImplemented  # mean and variance are the same as if independent, the density is not
        mean = torch.as_tensor(loc_of(loc), dtype=scale.dtype, device=scale.device)
        return noise.predictive(mean, 0.0 if spread is None else spread, scale, cls)
    return cls(loc.loc, (spread + scale**2).sqrt())


@predictive_rule(td.MultivariateNormal)
def multivariate_normal(
    loc: Any, covariance_matrix: Any = None, precision_matrix: Any = None, scale_tril: Any = None
) -> td.Distribution:
    """Predictive of correlated Gaussian noise: the variances of the mean join the diagonal of the covariance."""
    given = {
        "covariance_matrix": covariance_matrix,
        "precision_matrix": precision_matrix,
        "scale_tril": scale_tril,
    }
    if any(isinstance(matrix, GaussianMoments) for matrix in given.values()):
        return NotImplemented
    at_mean = td.MultivariateNormal(loc.loc, **given)
    covariance = at_mean.covariance_matrix + torch.diag_embed(loc.variance)
    return td.MultivariateNormal(loc.loc, covariance_matrix=covariance)


@predictive_rule(td.Categorical)
def categorical(classes: ClassLink, probs: Any = None, logits: Any = None) -> td.Distribution:
    """Predictive of a class: the average probabilities."""
    return _of_classes(td.Categorical, classes, probs, logits)


@predictive_rule(td.OneHotCategorical)
def one_hot_categorical(classes: ClassLink, probs: Any = None, logits: Any = None) -> td.Distribution:
    """Predictive of a one-hot class: the average probabilities."""
    return _of_classes(td.OneHotCategorical, classes, probs, logits)


@predictive_rule(td.Bernoulli)
def bernoulli(probs: Any = None, logits: Any = None) -> td.Distribution:
    """Predictive of a yes or no: the average probability, exact to 1e-9 for a Gaussian logit."""
    if is_gaussian_logit(logits, probs):
        given = probs if logits is None else logits
        return td.Bernoulli(logits=logit_of_expected_sigmoid(gaussian_of(given)))
    if isinstance(probs, GaussianMoments):
        return td.Bernoulli(probs=probs.loc.clamp(0, 1))
    return td.Bernoulli(logits=_average(td.Bernoulli, {"logits": logits}))


def _of_classes(family: Any, classes: ClassLink, probs: Any, logits: Any) -> td.Distribution:
    f = gaussian_logits(logits, probs)
    if f is not None:
        return family(logits=classes.log_probabilities(f.loc, f.variance))
    if isinstance(probs, GaussianMoments) and probs.link is None:
        return family(probs=probs.loc.clamp_min(0))  # the average is what the mean is
    return family(logits=_average(family, {"logits": logits} if probs is None else {"probs": probs}))


def _average(family: type, parameters: Mapping[str, Any]) -> Tensor:
    plan = evaluation(family, parameters, num_points=512)
    return average_logits(plan.at(plan.points), plan.weights)
