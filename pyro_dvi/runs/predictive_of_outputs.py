# SPDX-License-Identifier: Apache-2.0
r"""Predictive distribution of Gaussian outputs, :math:`\int p(y \mid f)\,\mathcal N(f; \hat f, \Sigma)\,\mathrm df`.

Outputs are the unconstrained parameters of any observed distribution (:mod:`pyro_dvi.runs.outputs`). All their
covariances are used: between classes, between elements of a vector, and between a mean and the logarithm of its noise
scale. An example may have several densities, such as one per row of an inner plate. Each density depends only on its
own outputs, so each integral is over these outputs only.
"""

import math
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from torch import Size, Tensor, distributions as td
from torch.distributions import constraints

from pyro_dvi.core.densities import untransformed
from pyro_dvi.core.distributions import innermost, rewrapped
from pyro_dvi.core.recorder import structural
from pyro_dvi.links import noise_links
from pyro_dvi.links.class_links import ClassLink, Probit
from pyro_dvi.links.families import Joint, predictive_distribution
from pyro_dvi.links.noise_links import NoiseLink, Normal as NoisyNormal, ShapedNormal
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.value import Link
from pyro_dvi.runs.outputs import Outputs, Parameter
from pyro_dvi.runs.sites import counted

_CLASSES = (td.Bernoulli, td.Categorical, td.OneHotCategorical)
_KEPT = 64  # largest number of outputs of an example whose covariances a prediction keeps
_MANY = 256  # largest number of classes whose covariances are computed if variances are enough
# Functions that map real numbers to parameters with these domains.
_NAMES = {constraints.positive: "exp", constraints.unit_interval: "sigmoid", constraints.simplex: "softmax"}


def needs_variances_only(outputs: Outputs, link: ClassLink) -> bool:
    """Return whether the variances of many logits are enough, so that covariances would take most of the time."""
    is_class = isinstance(innermost(outputs.distribution), (td.Categorical, td.OneHotCategorical))
    return is_class and type(link) is Probit and outputs.parameters[0].shape[-1] > _MANY


def integrated(
    outputs: Outputs, covariance: Tensor, link: ClassLink, noise: NoiseLink, num_points: int
) -> Any:
    """Return the predictive distribution, with the batch and event shape of the observed distribution.

    Status: as for :func:`~pyro_dvi.links.predictive_distribution`. If an example has several labels (``to_event``),
    their marginal probabilities are correct, but the labels are treated as independent.

    Args:
        outputs: outputs at the mode.
        covariance: covariance of all outputs of each example, ``[B, K, K]``.
        link: maps Gaussian logits to class probabilities.
        noise: maps Gaussian noise of uncertain scale to a distribution.
        num_points: number of Sobol points, which are used if more than two parameters of a density are uncertain.
    """
    outputs, covariance = outputs.detached(), covariance.detach()
    fn, base, parameters = outputs.distribution, innermost(outputs.distribution), outputs.parameters
    variances = torch.diagonal(covariance, dim1=-2, dim2=-1)
    parts = zip(parameters, outputs.split(outputs.values), outputs.split(variances), strict=True)
    given = {**outputs.given, **{part[0].name: _uncertain(base, *part) for part in parts}}
    uncertain = {name: value for name, value in given.items() if isinstance(value, GaussianMoments)}
    if not uncertain:
        return fn
    if needs_variances_only(outputs, link):
        return rewrapped(fn, lambda base: as_pyro(predictive_distribution(type(base), given, link=link)))
    # The dimensions over which the densities of an example extend.
    shape = parameters[0].shape
    others = shape[: len(shape) - base.arg_constraints[parameters[0].name].event_dim]
    rank = len(fn.batch_shape) - 1
    joined = len(others) > rank and not isinstance(base, _CLASSES)
    if joined:  # to_event has joined several densities, and their outputs are dependent
        others = others[:rank]
    numbers = torch.arange(covariance.shape[-1], device=covariance.device).split([p.size for p in parameters])
    places = {
        p.name: own.reshape(math.prod(others), -1)
        for p, own in zip(parameters, numbers, strict=True)
        if p.name in uncertain
    }
    place = torch.cat(list(places.values()), -1)
    between = covariance[:, place.unsqueeze(-1), place.unsqueeze(-2)]
    between = between.reshape(len(covariance), *others, *between.shape[2:]).movedim(0, parameters[0].axis)
    sizes = {name: own.shape[1] for name, own in places.items()}
    joint = Joint(between, sizes, Size(shape[rank:] if joined else ()), num_points)

    def predictive(base: Any) -> Any:
        with pyro.validation_enabled(False):
            found = as_pyro(predictive_distribution(type(base), given, link=link, noise=noise, joint=joint))
        if isinstance(base, _CLASSES):
            read: Any = partial(joint.of_classes, type(base), given)
            if covariance.shape[-1] > _KEPT:  # keep the result, which takes less memory than the covariances
                read = partial(tuple, read())
            found.of_posterior = read
        # Scores already check observations; another check would synchronise with the device.
        found._validate_args = False
        return found

    if not joined:
        return rewrapped(fn, predictive)
    if type(untransformed(fn)) in (dist.Normal, dist.NanMaskedNormal):
        found, counts = predictive(base), counted({"fn": fn, "mask": None})
        if counts is None:
            return found
        if not isinstance(found, noise_links.PointMixture):
            return PartlyCounted(found, counts)
        found.components = PartlyCounted(found.components, counts)
        return found
    values, weights = joint.points(uncertain)
    return noise_links.PointMixture(outputs.rebuilt({**given, **values}, tuple(weights.shape)), weights)


def _uncertain(base: Any, parameter: Parameter, real: Tensor, variance: Tensor) -> Any:
    """Return moments of a parameter, linked to its outputs ``[B, *shape]``; a tensor if the parameter is certain."""
    if not structural((variance > 0).any()):
        return parameter.native(real)
    inner = GaussianMoments(real.movedim(0, parameter.axis), variance.movedim(0, parameter.axis))
    function = parameter.transform
    if function is None:
        return inner
    # The variance of the value itself is not used, because rules for an exponential compute it from the Gaussian.
    return GaussianMoments(
        function(inner.loc),
        inner.variance,
        Link(inner, function, _NAMES.get(base.arg_constraints[parameter.name])),
    )


class PointMixture(noise_links.PointMixture, TorchDistributionMixin):
    """A mixture over points, with Pyro's methods."""


class Normal(NoisyNormal, TorchDistributionMixin):
    """Gaussian noise around an uncertain mean, with Pyro's methods."""


class PartlyCounted(dist.MaskedDistribution):
    """Gaussian vectors, matrices or tensors, with a log density that includes only the observed elements.

    Args:
        base: the Gaussian.
        counts: mask of the elements to include; it broadcasts to the observation of each density.
    """

    def __init__(self, base: Any, counts: Tensor) -> None:
        super().__init__(base, True)
        self.counts = counts

    def log_prob(self, value: Tensor) -> Tensor:
        """Return the log density of the included elements, in the batch shape."""
        start = -len(self.event_shape)
        vectors: Any = (
            self.base_dist.base_dist if isinstance(self.base_dist, ShapedNormal) else self.base_dist
        )
        apart = torch.where(self.counts, value - self.mean, 0.0).flatten(start)
        counts = self.counts.flatten(start)
        # Each other element is replaced by an independent Gaussian at its mode, where the density is one.
        both, alone = counts.unsqueeze(-1) & counts.unsqueeze(-2), torch.eye(counts.shape[-1]).to(apart)
        covariance = torch.where(both, vectors.covariance_matrix, alone / (2 * math.pi))
        normal: Any = td.MultivariateNormal(torch.zeros_like(apart), covariance, validate_args=False)
        return normal.log_prob(apart)  # type: ignore[no-any-return]


_OURS = {noise_links.PointMixture: PointMixture, NoisyNormal: Normal}


def as_pyro(distribution: Any) -> Any:
    """Return a torch distribution as the Pyro class of the same name; classes of this library stay unchanged."""
    kind: Any = _OURS.get(type(distribution), getattr(dist, type(distribution).__name__, None))
    if kind is None or isinstance(distribution, dist.Distribution):
        return distribution
    twin = object.__new__(kind)
    twin.__dict__.update(vars(distribution))
    return twin
