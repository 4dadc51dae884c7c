# SPDX-License-Identifier: Apache-2.0
"""The accepted forms of ``prior_scale``, and their conversion to the prior of a parameter.

Each form becomes a :class:`Prior`: numbers, distributions, callables, mappings, He scaling, learned scales, scales with
an optimum in closed form, and scales with a prior. To add a form, subclass :class:`Prior` and implement ``prepared``.
Often, a callable of ``(name, parameter)`` that returns a number, a distribution or a prior is enough.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn.module import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_dvi.bayesian.converted import (
    DistributionPrior,
    Placed,
    ScaleMixturePrior,
    SitePrior,
    buffer_name,
    set_attribute,
)
from pyro_dvi.bayesian.selection import Candidate, suggestion
from pyro_dvi.core.distributions import broadcasts_to, placed_like, tensors_of
from pyro_dvi.errors import ArgumentError, ModelError
from pyro_dvi.gaussians.optimal_scale import OptimalScaleNormal

PriorLike = Any
"""A float, a distribution, a :class:`Prior`, a callable of ``(name, parameter)`` that returns one of these,
or a mapping from name patterns to these."""


class Prior(ABC):
    """A recipe for the prior of one parameter."""

    @abstractmethod
    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Check that the prior suits ``target``, and return a function that makes it.

        The function is called after all parameters have been checked. By then, the module of ``target`` is a
        ``PyroModule``, and the function may add attributes to it, such as a learned scale.
        """

    def check_used(self, targets: Sequence[Candidate]) -> None:  # noqa: B027 (most priors have one part)
        """Raise an error if a name pattern of the prior matches none of ``targets``."""


@dataclass(frozen=True, eq=False)
class Given(Prior):
    """A distribution of a single weight, or of the whole weight tensor."""

    distribution: TorchDistributionMixin

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Check that the prior's shape and support fit the parameter."""
        given, value = self.distribution, target.parameter.detach()
        place = f"The prior {type(given).__name__} of {target.name!r}"
        check_no_gradient(given, place)
        events = value.dim() - len(given.event_shape)
        batch, event = value.shape[: max(events, 0)], value.shape[max(events, 0) :]
        if events < 0 or event != given.event_shape or not broadcasts_to(given.batch_shape, batch):
            raise ModelError(
                f"{place} has the shape {tuple(given.shape())}, but the parameter has the shape {tuple(value.shape)}: "
                "pass a scalar distribution, one of this shape, or a callable of (name, parameter) that returns one"
            )
        if given.support.is_discrete or not given.has_rsample:
            raise ModelError(
                f"{place} is discrete or its samples have no gradients: use one such as Normal, Laplace or StudentT"
            )
        if not bool(placed_like(given, value).expand(batch).support.check(value).all()):
            raise ModelError(
                f"The initial value of {target.name!r} is outside the support {given.support} of its prior: change one"
            )
        return partial(DistributionPrior, given=given, attribute=target.attribute)


@dataclass(frozen=True, eq=False)
class ByRule(Prior):
    """A callable of ``(name, parameter)``."""

    rule: Callable[[str, Tensor], PriorLike]

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Call the rule with a detached parameter."""
        answer = self.rule(target.name, target.parameter.detach())
        place = f"The value of {getattr(self.rule, '__name__', self.rule)!s} for {target.name!r}"
        return as_prior(answer, place).prepared(target)


@dataclass(frozen=True, eq=False)
class ByName(Prior):
    """A mapping from name patterns to priors; the first matching pattern applies."""

    priors: Mapping[str, Prior]

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Prepare the prior of the first matching pattern."""
        for pattern, prior in self.priors.items():
            if target.is_called(pattern):
                return prior.prepared(target)
        raise ModelError(
            f"No pattern of prior_scale matches {target.name!r}: add '*' as the last pattern, for all other parameters"
        )

    def check_used(self, targets: Sequence[Candidate]) -> None:
        """Raise an error if a pattern matches no parameter."""
        for pattern in self.priors:
            if not any(target.is_called(pattern) for target in targets):
                raise ModelError(
                    f"The pattern {pattern!r} of prior_scale matches no chosen parameter. "
                    f"{suggestion(pattern, targets)}"
                )


def as_prior(prior: PriorLike, place: str = "prior_scale") -> Prior:
    """Turn anything that ``prior_scale`` accepts into a :class:`Prior`.

    Args:
        prior: a float, a distribution, a prior, a callable of ``(name, parameter)``, or a mapping from name patterns to
            these.
        place: the name of ``prior`` in error messages.

    Raises:
        ArgumentError: if it is none of these, or a number that is not positive and finite.

    Example:
        >>> as_prior(0.5)
        Given(distribution=Normal(loc: 0.0, scale: 0.5))
    """
    if isinstance(prior, Prior):
        return prior
    if isinstance(prior, TorchDistributionMixin):
        return Given(prior)
    if isinstance(prior, Mapping):
        if not all(isinstance(pattern, str) for pattern in prior):
            raise ArgumentError(f"{place} is a mapping, whose keys must be name patterns")
        return ByName({pattern: as_prior(value, f"{place}[{pattern!r}]") for pattern, value in prior.items()})
    if isinstance(prior, int | float) or (isinstance(prior, Tensor) and prior.dim() == 0):
        # Double precision keeps the given value exact for weights of any dtype; checking values would wait for the
        # device.
        scale = torch.tensor(positive(prior, place), dtype=torch.float64)
        return Given(dist.Normal(torch.zeros_like(scale), scale, validate_args=False))
    if callable(prior) and not isinstance(prior, type):
        return ByRule(prior)
    raise ArgumentError(
        f"{place} is {prior!r}: pass a number, a distribution of pyro.distributions, fan_in, LearnedScale(), "
        "OptimalScale(), HierarchicalScale(), a callable of (name, parameter), or a mapping from name patterns to these"
    )


def positive(value: object, place: str) -> float:
    """Return ``value`` as a float if it is a positive finite number; raise an error otherwise."""
    if isinstance(value, Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ArgumentError(
            f"{place} is {value!r}, but a scale must be a positive, finite number (exclude= omits a parameter)"
        )
    return float(value)


def check_no_gradient(distribution: TorchDistributionMixin, place: str) -> None:
    """Raise an error if a distribution contains trainable tensors, because no optimizer would find them."""
    if any(tensor.requires_grad for tensor in tensors_of(distribution)):
        raise ArgumentError(
            f"{place} contains a tensor that requires gradients, which optimizers would not find: use LearnedScale()"
        )


Unit = float | Callable[[str, Tensor], float]


@dataclass(frozen=True)
class FanIn(Prior):
    r"""He scaling: the variance of a weight is ``gain²`` divided by the fan-in, the number of inputs to a unit.

    .. math::
        w \sim N\left(0, \frac{g^2}{\text{fan-in}}\right), \qquad b \sim N(0, s_b^2)

    With :math:`g^2 = 2`, the activations of a ReLU network keep their second moment from layer to layer. The fan-in
    depends on the layer. It is the number of inputs of a Linear layer, input channels times kernel size for a
    convolution, input channels times kernel size divided by stride for a transposed convolution, and the product of
    both input sizes for a Bilinear layer. An Embedding looks up one row without a sum, so its prior is N(0, 1). A bias
    has no fan-in either; parameters with fewer than two dimensions get :math:`s_b`.

    Status: exact for independent inputs; a convention for biases and embeddings.

    Args:
        gain: :math:`g`, dimensionless; :math:`\sqrt 2` for ReLU and similar smooth activations, 1 for linear networks.
        bias: :math:`s_b`, the scale of biases and other vectors.

    Source: He et al. (2015), "Delving deep into rectifiers", Eq. 10.

    Example:
        >>> import torch
        >>> fan_in("weight", torch.zeros(10, 50))
        0.2
    """

    gain: float = math.sqrt(2.0)
    bias: float = 1.0

    def __call__(self, name: str, parameter: Tensor, module: nn.Module | None = None) -> float:
        """Return the scale of ``parameter``; ``module`` identifies layers with unusual weight layouts."""
        if parameter.dim() < 2:
            return self.bias
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return 1.0
        inputs = parameter.numel() / max(1, parameter.shape[0])
        if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            channels = module.in_channels / module.groups
            inputs = channels * math.prod(module.kernel_size) / math.prod(module.stride)
        return self.gain / math.sqrt(max(inputs, 1.0))

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Prepare a Normal prior with this scale."""
        scale = self(target.name, target.parameter, target.module)
        return as_prior(scale, f"{self} of {target.name!r}").prepared(target)


fan_in = FanIn()
"""He scaling with the default gain: ``to_bayesian_(net, prior_scale=fan_in)``."""


def _value_for(target: Candidate, scale: Unit, place: str) -> float:
    """Return a number unchanged, or evaluate a rule for a parameter; fan-in rules also need the layer."""
    if callable(scale):
        layer = (target.module,) if isinstance(scale, FanIn) else ()
        scale = scale(target.name, target.parameter, *layer)
    return positive(scale, f"{place} of {target.name!r}")


def _with_scale(target: Candidate, scale: PyroParam | PyroSample, unit: float = 1.0) -> SitePrior:
    """Add a scale to the module, and return a Normal prior that reads it."""
    name = f"{target.attribute}_scale"
    set_attribute(target.module, name, scale)
    return ScaleMixturePrior(target.attribute, name, unit)


@dataclass(eq=False)
class LearnedScale(Prior):
    r"""A prior scale that is learned with the guide (empirical Bayes), as a positive ``PyroParam``.

    .. math::
        w_i \sim N(0, (u s)^2), \qquad s = e^{\rho} \text{ optimised}

    A parameter ``<weight>_scale`` is added to the module for each weight tensor, and the optimizer of the model's
    parameters trains it.

    Status: exact; the optimum maximises the ELBO, a lower bound on the evidence.

    Args:
        init: initial :math:`s`, in units of the weight: a float, or a callable of ``(name, parameter)`` that returns a
            float, such as ``fan_in``.

    Example:
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = to_bayesian_(nn.Linear(3, 2), prior_scale=LearnedScale(0.5))
        >>> net.weight_scale.item()
        0.5
    """

    init: Unit = 1.0

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Evaluate the rule, if a callable was given."""
        start = target.parameter.new_full((), _value_for(target, self.init, "LearnedScale: init"))
        return lambda: _with_scale(target, PyroParam(start, constraint=constraints.positive))


@dataclass(frozen=True)
class OptimalScale(Prior):
    r"""A prior scale that always has its optimal value given the posterior (empirical Bayes, in closed form).

    .. math::
        w_i \sim N(0, s^2), \qquad s^2 \sim \mathrm{InvGamma}\bigl(\alpha, (\alpha + 1)\,u^2\bigr), \qquad
        s_*^2 = \frac{\sum_i (\mu_i^2 + \sigma_i^2) + 2(\alpha + 1)\,u^2}{n + 2(\alpha + 1)}

    Each weight tensor has its own variance. The optimal variance follows from the posterior means and standard
    deviations of the n weights, as if the tensor had :math:`2(\alpha + 1)` further weights of size u. Nothing is
    learned or sampled: the KL divergence to N(0, s*²), minus the log density of s*², is a function of the posterior.

    Status: exact for Gaussian posteriors, factorised or with covariances, and for point masses. Where the divergence is
    sampled, as for flows, each draw has its own optimal variance. A MAP estimate, or a temperature below 1, shrinks the
    scale, though never below :math:`u\sqrt{2(\alpha + 1) / (n + 2(\alpha + 1))}`.

    Args:
        unit: u, the most probable scale, in units of the weight: a float, or a callable of ``(name, parameter)`` that
            returns a float, such as ``fan_in``.
        alpha: :math:`\alpha`, positive; the larger it is, the closer scales stay to u. The default is the value that
            the authors of the paper use.

    Source: Wu et al. (2019), "Deterministic variational inference for robust Bayesian neural networks".

    Example:
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = to_bayesian_(nn.Linear(3, 2, bias=False), prior_scale=OptimalScale(0.5))
        >>> prior = net._pyro_samples["weight"](net)
        >>> loc, scale = torch.zeros(2, 3), torch.ones(2, 3)
        >>> prior.optimal_variance(loc, scale).sqrt()  # between 0.5 and 1
        tensor(0.7179)
    """

    unit: Unit = 1.0
    alpha: float = 4.4798

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Prepare a prior with the unit of this parameter."""
        unit = _value_for(target, self.unit, "OptimalScale: unit")
        alpha = torch.tensor(positive(self.alpha, "OptimalScale: alpha"), dtype=torch.float64)
        prior = OptimalScaleNormal(alpha, (alpha + 1) * unit**2, target.parameter.shape)
        return Given(prior).prepared(target)


@dataclass(eq=False)
class HierarchicalScale(Prior):
    r"""A prior scale that has a prior of its own and is inferred by the guide.

    .. math::
        s \sim p(s), \qquad w_i \mid s \sim N(0, (u s)^2)

    A latent ``<weight>_scale`` is added to the module for each weight tensor.

    Status: exact. The joint posterior density of weights *and* scale is unbounded at :math:`w = s = 0`, so use a
    variational guide, not a MAP estimate.

    Args:
        prior: :math:`p(s)`, a scalar distribution over positive numbers, such as ``LogNormal``, ``HalfCauchy`` or
            ``Gamma``.
        unit: :math:`u`, in units of the weight: a float or a callable of ``(name, parameter)`` such as ``fan_in``; s is
            the scale in multiples of :math:`u`.

    Raises:
        ArgumentError: if ``prior`` is not a scalar distribution over positive numbers.

    Example:
        >>> import pyro
        >>> from pyro_dvi.bayesian import fan_in, to_bayesian_
        >>> prior = HierarchicalScale(dist.HalfNormal(1.0), unit=fan_in)
        >>> net = to_bayesian_(nn.Linear(3, 2), prior_scale=prior)
        >>> trace = pyro.poutine.trace(net).get_trace(torch.ones(1, 3))
        >>> sorted(trace.stochastic_nodes)
        ['bias', 'bias_scale', 'weight', 'weight_scale']
    """

    prior: TorchDistributionMixin = field(default_factory=lambda: dist.LogNormal(0.0, 1.0))
    unit: Unit = 1.0

    def __post_init__(self) -> None:
        check_scale_prior(self.prior, "HierarchicalScale: prior")
        if self.prior.shape():
            raise ArgumentError(
                f"HierarchicalScale: prior has the shape {tuple(self.prior.shape())}: pass a scalar distribution"
            )

    def prepared(self, target: Candidate) -> Callable[[], SitePrior]:
        """Evaluate the rule, if a callable was given."""
        unit = _value_for(target, self.unit, "HierarchicalScale: unit")
        prior = ScalePrior(self.prior, buffer_name(target.attribute))
        return lambda: _with_scale(target, PyroSample(prior), unit)


@dataclass(eq=False, repr=False)
class ScalePrior(Placed):
    """The prior of a sampled scale, which follows the dtype and device of its module."""

    reference: str

    def __call__(self, module: PyroModule) -> TorchDistributionMixin:
        """Return the scalar distribution."""
        reference = module._buffers[self.reference]
        assert reference is not None
        return self.placed(reference, self.given.shape())


def check_scale_prior(prior: Any, place: str) -> None:
    """Raise an error unless a prior is a distribution over positive numbers without trainable tensors."""
    support: Any = getattr(prior, "support", None)
    if isinstance(support, constraints.independent):
        support = support.base_constraint
    lower = getattr(support, "lower_bound", None)
    if lower is None or support.is_discrete or float(torch.as_tensor(lower).min()) < 0.0:
        raise ArgumentError(
            f"{place} is {prior}, but a scale must be positive: pass dist.LogNormal(0., 1.) or dist.HalfNormal(1.)"
        )
    check_no_gradient(prior, place)
