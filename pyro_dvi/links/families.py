# SPDX-License-Identifier: Apache-2.0
r"""Predictive distributions :math:`\int p(y \mid \theta)\,q(\theta)\,\mathrm d\theta`, with one rule per family of p.

:class:`Joint` holds the covariances between all uncertain parameters of one density: between the logits of classes,
between the elements of a vector, or between a mean and the scale of its noise.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributions as td

from pyro_dvi.core.recorder import is_for_any_rows
from pyro_dvi.core.registry import registering
from pyro_dvi.expectations.closed_forms import gaussian_logit, gaussian_logits, logit_of_expected_sigmoid
from pyro_dvi.expectations.expectation import evaluation, find_rule, without_checks
from pyro_dvi.expectations.logits import cholesky_root
from pyro_dvi.expectations.points import (
    are_dependent,
    are_distinct,
    event_dim_of,
    fixed_points,
    gauss_hermite,
    gaussian_of,
)
from pyro_dvi.linalg.semidefinite import eigen
from pyro_dvi.links.class_links import ClassLink, SobolSoftmax, average_logits
from pyro_dvi.links.noise_links import MomentMatched, NoiseLink, Normal, PointMixture, correlated_normal
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.shared_noise import covariance_of, joint_noise_followed
from pyro_dvi.moments.value import loc_of, variance_of

_CHUNK = 2**22  # largest number of points x parameters held at once


@dataclass(frozen=True)
class Joint:
    """The joint Gaussian behind the parameters of each density; moments alone treat these as independent.

    Attributes:
        covariance: covariance of the n uncertain scalar parameters of each density, ``[*batch, n, n]``.
        sizes: number of uncertain elements of each parameter, in order.
        event_shape: event shape of a density over vectors or tensors (``to_event``); empty for scalar densities.
        num_points: number of Sobol points for averages over more than two dimensions.
    """

    covariance: Tensor
    sizes: Mapping[str, int]
    event_shape: torch.Size = torch.Size()  # noqa: RUF009 (a tuple)
    num_points: int = 512

    def between(self, first: str, second: str) -> Tensor:
        """Return the covariances ``[*batch, n, m]`` of two parameters."""
        return self._part(self._part(self.covariance, first, -2), second, -1)

    def spread(self, name: str) -> Tensor:
        """Return variances ``[*batch]`` for scalars, and covariances ``[*batch, n, n]`` for events."""
        return self._spread(
            self.between(name, name) if name in self.sizes else torch.zeros_like(self.covariance)
        )

    def points(self, parameters: Mapping[str, GaussianMoments]) -> tuple[dict[str, Tensor], Tensor]:
        """Return values ``[S, *shape]`` of all uncertain parameters, and weights ``[S]``."""
        half, _ = _root(self.covariance)
        points, weights = fixed_points(half.shape[-1], half, self.num_points)
        return self._at(parameters, half, points), weights

    def of_classes(self, family: Any, parameters: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
        r"""Return what the uncertain parameters contribute to the uncertainty about a class.

        .. math:: I = H(\mathrm E\,p) - \mathrm E\,H(p), \qquad v_c = \mathrm{Var}[p_c]

        Status: exact up to rounding for one or two uncertain parameters; an average over Sobol points for more.

        Args:
            family: Bernoulli, Categorical or OneHotCategorical, or a subclass.
            parameters: all arguments of the distribution by name.

        Returns:
            I in nats, ``[*batch]``; v, in the shape of the mean of the one-hot encoding (of label 1 for a Bernoulli).
        """
        half = cholesky_root(self.covariance)
        points, weights = fixed_points(half.shape[-1], half, self.num_points)
        room = max(1, _CHUNK // half[..., 0].numel())
        sums: Any = 0.0
        for some, own in zip(points.split(room), weights.split(room), strict=True):
            p = family(**{**parameters, **self._at(parameters, half, some)}, **without_checks(family)).probs
            p = torch.stack([1 - p, p], -1) if issubclass(family, td.Bernoulli) else p
            entropy = torch.special.entr(p).sum(-1, keepdim=True)
            sums = sums + torch.tensordot(own, torch.cat([p, p.square(), entropy], -1), 1)
        mean, square = sums[..., :-1].chunk(2, -1)
        variance = (square - mean.square()).clamp_min(0)
        information = (torch.special.entr(mean).sum(-1) - sums[..., -1]).clamp_min(0)
        return information, variance[..., 1] if issubclass(family, td.Bernoulli) else variance

    def _at(self, parameters: Mapping[str, Any], half: Tensor, points: Tensor) -> dict[str, Tensor]:
        shifts = _combined(half, points)
        return {n: _shifted(parameters[n], self._part(shifts, n, -1)) for n in self.sizes}

    def given_scale(
        self, loc: Tensor, scale: GaussianMoments, num_nodes: int
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        r"""Return the conditional mean at points of h, the Gaussian that the noise scale is a function of.

        .. math:: f \mid h \sim \mathcal N\bigl(\hat f + C (h - \hat h), \Sigma_{f \mid h}\bigr)

        Args:
            loc: mean :math:`\hat f`, ``[*batch, *event]``.
            scale: scale of the noise, of the same shape.
            num_nodes: number of Gauss-Hermite nodes, used if h is a scalar.

        Returns:
            The mean ``[S, *batch, *event]``, its spread as :meth:`spread` returns it, the scale
            ``[S, *batch, *event]`` and weights ``[S]``.
        """
        half, inverse = _root(self.between("scale", "scale"))
        rank = half.shape[-1]
        if rank == 1:
            points, weights = gauss_hermite(num_nodes, half)
            points = points.unsqueeze(-1)
        else:
            points, weights = fixed_points(rank, half, self.num_points)
        scales = _shifted(scale, _combined(half, points))
        if "loc" not in self.sizes:
            return loc.expand(scales.shape), self.spread("loc"), scales, weights
        gain = self.between("loc", "scale") @ inverse
        covariance = self.between("loc", "loc") - gain @ gain.mT
        rounding = torch.diagonal(covariance, dim1=-2, dim2=-1).clamp_max(0)  # rounding of the difference
        loc = loc + _combined(gain, points).reshape(-1, *loc.shape)
        return loc, self._spread(covariance - torch.diag_embed(rounding)), scales, weights

    def _spread(self, covariance: Tensor) -> Tensor:
        return covariance if self.event_shape else covariance[..., 0, 0]

    def _part(self, of_all: Tensor, name: str, dim: int) -> Tensor:
        """Return the part that belongs to one parameter."""
        return of_all.split(list(self.sizes.values()), dim)[list(self.sizes).index(name)]


def joint_if_dependent(family: type, parameters: Mapping[str, Any]) -> Joint | None:
    """Return the covariances of parameters that are outputs of one last layer; None if they are independent."""
    if not are_dependent(family, parameters):
        return None
    gaussians = {k: gaussian_of(p) for k, p in parameters.items() if isinstance(p, GaussianMoments)}
    with joint_noise_followed():
        vectors = [g if event_dim_of(family, name) else g.unsqueeze(-1) for name, g in gaussians.items()]
        batch = torch.broadcast_shapes(*[v.shape[:-1] for v in vectors])
        vectors = [v.expand(*batch, v.shape[-1]) for v in vectors]
    sizes = {name: v.shape[-1] for name, v in zip(gaussians, vectors, strict=True)}
    return Joint(covariance_of(*vectors), sizes)


def _combined(half: Tensor, points: Tensor) -> Tensor:
    """Return the product ``[S, *batch, n]`` of R ``[*batch, n, r]`` and points ``[S, r]``."""
    return torch.einsum("...nr,sr->s...n", half, points)


def _shifted(parameter: GaussianMoments, shift: Tensor) -> Tensor:
    """Return the values that a parameter takes if the Gaussian behind it deviates from its mean by ``shift``."""
    inner = gaussian_of(parameter)
    values = inner.loc + shift.reshape(-1, *inner.shape)
    return values if parameter.link is None else parameter.link.function(values)


def _root(covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Return a root R ``[..., n, r]`` of the covariances R Rᵀ ``[..., n, n]``, and the transpose of R's pseudo-inverse.

    r is the largest rank of any of the covariances, so perfectly correlated outputs (such as a common noise scale) need
    only one dimension.
    """
    values, vectors = eigen(covariance)
    values, vectors = values.flip(-1), vectors.flip(-1)
    tolerance = 4 * values.shape[-1] * torch.finfo(values.dtype).eps * values[..., :1]
    kept = values > tolerance
    rank = values.shape[-1] if is_for_any_rows() else max(1, int(kept.sum(-1).max()))
    deviations = torch.where(kept, values.sqrt(), values.new_zeros(()))[..., :rank].unsqueeze(-2)
    inverses = torch.where(
        deviations > 0, 1 / deviations.clamp_min(torch.finfo(values.dtype).tiny), deviations
    )
    return vectors[..., :rank] * deviations, vectors[..., :rank] * inverses


_RULES: dict[type, Callable] = {}
_LINK, _NOISE = SobolSoftmax(), MomentMatched()


def predictive_rule(*families: type) -> Callable[[Callable], Callable]:
    """Return a decorator that registers the predictive distribution of distribution classes.

    The rule is called with the arguments of the distribution by name (deterministic arguments may be plain numbers),
    and with ``family=``, ``link=``, ``noise=`` or ``joint=`` if it has parameters of these names. A rule without
    ``joint`` is skipped if several uncertain parameters depend on each other. If a rule returns ``NotImplemented``, a
    mixture over points is used, as for families without a rule. A rule must agree with quadrature; cases that it could
    only approximate are left to the mixture.
    """
    return registering(_RULES, families)


def predictive_distribution(
    family: type,
    parameters: Mapping[str, Any],
    *,
    link: ClassLink = _LINK,
    noise: NoiseLink = _NOISE,
    joint: Joint | None = None,
) -> td.Distribution:
    """Return the predictive distribution, with the batch and event shape of the family.

    Status: exact for Bernoulli, and for a Normal, LogNormal or MultivariateNormal of which only the mean is uncertain.
    Class probabilities are as accurate as ``link``; for an uncertain noise scale, see ``noise``. Other families are
    mixtures over the points of :mod:`pyro_dvi.expectations.expectation`. For up to two uncertain scalar parameters per
    density, quadrature is exact to 1e-6 if the density varies on the scale of the Gaussian, and to a few hundredths of
    a nat if it is much narrower or has a kink. For more uncertain parameters, Sobol points have errors of a tenth in
    the log probability of rare events. A Normal whose mean and scale are functions of the same Gaussian is a mixture
    too, unless ``noise`` matches moments.

    Args:
        family: the distribution class.
        parameters: the arguments of the distribution by name: moments, tensors or numbers.
        link: maps Gaussian logits to class probabilities.
        noise: maps Gaussian noise of uncertain scale to a distribution.
        joint: covariances of the Gaussians behind the uncertain parameters of each density; by default all are
            independent, except parameters that are functions of the same Gaussian.

    Raises:
        ArgumentError: if ``link`` is not a :class:`ClassLink`, or ``noise`` is not a :class:`NoiseLink`.
        UnsupportedError: if an uncertain parameter can leave its domain.

    Example:
        >>> f = GaussianMoments(torch.zeros(1), torch.full((1,), 3.0))
        >>> predictive_distribution(td.Normal, {"loc": f, "scale": 1.0})
        Normal(loc: tensor([0.]), scale: tensor([2.]))
    """
    given = {k: v for k, v in parameters.items() if k != "validate_args" and v is not None}
    num_uncertain = sum(isinstance(p, GaussianMoments) for p in given.values())
    if not num_uncertain:
        return family(**given)
    found = find_rule(_RULES, family)
    dependent = joint is not None and num_uncertain > 1
    if found is not None and given.keys() <= found.names and ("joint" in found.names or not dependent):
        options = {"family": family, "link": link, "noise": noise, "joint": joint}
        result: td.Distribution = found.rule(
            **given, **{k: v for k, v in options.items() if k in found.names}
        )
        if result is not NotImplemented:
            return result
    mixture = _over_points(family, given, joint)
    for plain in (td.Bernoulli, td.Categorical, td.OneHotCategorical):  # OrderedLogistic is a Categorical
        if issubclass(family, plain):
            return plain(logits=average_logits(mixture.components, mixture.weights))
    return mixture


def _over_points(family: type, parameters: Mapping[str, Any], joint: Joint | None = None) -> PointMixture:
    """Average the densities at points of the Gaussians behind the parameters."""
    if joint is None:
        plan = evaluation(family, parameters, num_points=512)
        return PointMixture(plan.at(plan.points), plan.weights)
    values, weights = joint.points(parameters)
    return PointMixture(family(**{**parameters, **values}, **without_checks(family)), weights)


@predictive_rule(td.Normal, td.LogNormal)
def normal(family: Any, loc: Any, scale: Any, noise: NoiseLink, joint: Joint | None = None) -> Any:
    r"""Predictive distribution of a (Log)Normal: :math:`\mathcal N(\mu, v_\mu + s^2)` or the result of ``noise``."""

    def noisy(mean: Tensor, spread: Any, of_noise: Any) -> Any:
        if joint is not None and joint.event_shape:
            return correlated_normal(mean, spread, of_noise, joint.event_shape)
        if issubclass(family, td.Normal):
            return Normal(mean, spread, of_noise)
        return family(mean, (spread + of_noise).sqrt())

    mean, spread = loc_of(loc), variance_of(loc) if joint is None else joint.spread("loc")
    if not isinstance(scale, GaussianMoments):
        return noisy(mean, spread, scale**2)
    if isinstance(loc, GaussianMoments) and joint is None and not isinstance(noise, MomentMatched):
        if not are_distinct([loc, scale]):
            return NotImplemented  # its density is not that of independent loc and scale
    mean = torch.as_tensor(mean, dtype=scale.dtype, device=scale.device)
    return noise.predictive(noisy, mean, 0.0 if spread is None else spread, scale, joint)


@predictive_rule(td.MultivariateNormal)
def multivariate_normal(
    family: Any,
    loc: Any,
    covariance_matrix: Any = None,
    precision_matrix: Any = None,
    scale_tril: Any = None,
    joint: Joint | None = None,
) -> Any:
    """Predictive distribution with correlated Gaussian noise: the covariances of mean and noise are added."""
    noise = covariance_matrix, precision_matrix, scale_tril
    if any(isinstance(matrix, GaussianMoments) for matrix in noise):
        return NotImplemented
    own = torch.diag_embed(loc.variance) if joint is None else joint.between("loc", "loc")
    return family(loc.loc, covariance_matrix=family(loc.loc, *noise).covariance_matrix + own)


@predictive_rule(td.Categorical, td.OneHotCategorical)
def categorical(
    family: Any, link: ClassLink, probs: Any = None, logits: Any = None, joint: Joint | None = None
) -> Any:
    """Predictive distribution of a class: the average probabilities."""
    f = gaussian_logits(logits, probs)
    if f is not None:
        name = "probs" if logits is None else "logits"
        spread = f.variance if joint is None else joint.between(name, name)
        return family(logits=link.log_probabilities(f.loc, spread))
    if isinstance(probs, GaussianMoments) and probs.link is None:
        return family(probs=probs.loc.clamp_min(0))  # the average probability is the mean
    return NotImplemented


@predictive_rule(td.Bernoulli)
def bernoulli(family: Any, probs: Any = None, logits: Any = None) -> Any:
    """Predictive distribution of a binary outcome: the average probability, exact to 1e-9 for a Gaussian logit."""
    f = gaussian_logit(logits, probs)
    if f is not None:
        return family(logits=logit_of_expected_sigmoid(f))
    if isinstance(probs, GaussianMoments):
        return family(probs=probs.loc.clamp(0, 1))
    return NotImplemented
