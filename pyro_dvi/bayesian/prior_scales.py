# SPDX-License-Identifier: Apache-2.0
"""Prior scales by the size of a layer, learned with the guide, or inferred under a prior of their own."""

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn.module import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_dvi.bayesian.converted import ScaleMixturePrior, SitePrior, buffer_name, set_attribute
from pyro_dvi.bayesian.priors import FixedScale, Prior, check_no_gradient, described, positive
from pyro_dvi.bayesian.selection import Candidate
from pyro_dvi.core.distributions import placed_like
from pyro_dvi.errors import ArgumentError, ModelError

Unit = float | Callable[[str, Tensor], float]


@dataclass(frozen=True)
class FanIn(Prior):
    r"""He scaling: weights get a variance of ``gain²`` over the number of inputs to a unit.

    .. math::
        w \sim N\left(0, \frac{g^2}{\text{fan-in}}\right), \qquad b \sim N(0, s_b^2)

    With :math:`g^2 = 2` the activations of a ReLU network keep their second moment from layer to layer. The
    fan-in is that of the layer: inputs of a Linear layer, input channels times kernel size of a convolution,
    input channels times kernel size over stride of a transposed one, the product of both inputs of a Bilinear
    layer. An Embedding looks up one row and nothing is summed, so its prior is N(0, 1). A bias multiplies the
    constant 1 and has no fan-in either; parameters with fewer than two dimensions get :math:`s_b`.

    Status: exact for independent inputs; a convention for biases and embeddings.

    Args:
        gain: :math:`g`, without unit; :math:`\sqrt 2` for ReLU and its smooth relatives, 1 for linear layers.
        bias: :math:`s_b`, the scale of biases and other vectors.

    Raises:
        ArgumentError: if ``gain`` or ``bias`` is not positive and finite.

    Source: He et al. (2015), "Delving deep into rectifiers", Eq. 10.

    Example:
        >>> import torch
        >>> fan_in("weight", torch.zeros(10, 50))
        0.2
    """

    gain: float = math.sqrt(2.0)
    bias: float = 1.0

    def __post_init__(self) -> None:
        positive(self.gain, "FanIn: gain")
        positive(self.bias, "FanIn: bias")

    def __call__(self, name: str, parameter: Tensor, module: nn.Module | None = None) -> float:
        """Return the scale of ``parameter``; ``module`` tells apart layers with unusual weight layouts."""
        if parameter.dim() < 2:
            return self.bias
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            return 1.0
        inputs = parameter.numel() / max(1, parameter.shape[0])
        if isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            channels = module.in_channels / module.groups
            inputs = channels * math.prod(module.kernel_size) / math.prod(module.stride)
        return self.gain / math.sqrt(max(inputs, 1.0))

    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Return a Normal prior of that scale."""
        return FixedScale(self(target.name, target.parameter, target.module)).place(target, root)


fan_in = FanIn()
"""He scaling with the usual gain: ``to_bayesian_(net, prior_scale=fan_in)``."""


class _OwnScale(Prior):
    """A scale that is an attribute of each parameter's module, ``<weight>_scale``."""

    rule: str  # the name of the field that says the unit of a parameter's scale
    starts_at_unit: bool  # the scale itself then needs no factor

    @abstractmethod
    def _scale(self, target: Candidate, start: float) -> PyroParam | PyroSample:
        """Return the scale of ``target``, of its dtype and device."""

    @abstractmethod
    def _shown(self, name: str) -> str:
        """Return the end of the prior's text in a summary."""

    def check(self, target: Candidate) -> None:
        """Evaluate the rule once, so that a bad one is found before anything is changed."""
        name = f"{target.attribute}_scale"
        if hasattr(target.module, name):
            raise ModelError(
                f"{target.name!r} cannot get a scale: its {type(target.module).__name__} has {name!r} already"
            )
        self._unit(target)

    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Add the scale to the module, and return a Normal prior that reads it."""
        unit, name = self._unit(target), f"{target.attribute}_scale"
        set_attribute(target.module, name, self._scale(target, start=unit))
        unit = 1.0 if self.starts_at_unit else unit
        text = f"Normal(0, {'' if unit == 1.0 else f'{unit:.4g}·'}{self._shown(name)}"
        return ScaleMixturePrior(target.attribute, text, name, unit)

    def _unit(self, target: Candidate) -> float:
        unit = getattr(self, self.rule)
        if isinstance(unit, Prior) and callable(unit):  # fan-in rules look at the layer too
            unit = unit(target.name, target.parameter, target.module)
        elif callable(unit):
            unit = unit(target.name, target.parameter)
        return positive(unit, f"{type(self).__name__}: {self.rule} of {target.name!r}")


@dataclass(eq=False)
class LearnedScale(_OwnScale):
    r"""A prior scale that is learned with the guide (empirical Bayes): a positive ``PyroParam``.

    .. math::
        w_i \sim N(0, (u s)^2), \qquad s = e^{\rho} \text{ optimised}

    The parameter ``<weight>_scale`` is added to the module, one for each weight tensor, and trained by
    whatever optimizer sees the model's parameters.

    Status: exact; the optimum maximises the ELBO, a lower bound of the evidence.

    Args:
        init: initial :math:`s`, or the scale of ``FanIn()``-like rules, in units of the weight: a float or a
            callable of ``(name, parameter)`` that returns one.

    Raises:
        ArgumentError: if ``init`` is not positive.

    Example:
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = to_bayesian_(nn.Linear(3, 2), prior_scale=LearnedScale(0.5))
        >>> net.weight_scale.item()
        0.5
    """

    rule, starts_at_unit = "init", True
    init: Unit = 1.0

    def __post_init__(self) -> None:
        if not callable(self.init):
            positive(self.init, "LearnedScale: init")

    def _scale(self, target: Candidate, start: float) -> PyroParam:
        return PyroParam(target.parameter.new_full((), start), constraint=constraints.positive)

    def _shown(self, name: str) -> str:
        return f"{name} learned)"


@dataclass(eq=False)
class HierarchicalScale(_OwnScale):
    r"""A prior scale with a prior of its own, inferred by the guide.

    .. math::
        s \sim p(s), \qquad w_i \mid s \sim N(0, (u s)^2)

    The latent ``<weight>_scale`` is added to the module, one for each weight tensor.

    Status: exact. Its posterior density over weights *and* scale is unbounded at :math:`w = s = 0`, so use a
    variational guide and not a MAP estimate.

    Args:
        prior: :math:`p(s)`, a scalar distribution over positive numbers: ``LogNormal``, ``HalfCauchy``,
            ``Gamma``.
        unit: :math:`u`, in units of the weight: a float or a callable of ``(name, parameter)`` such as
            ``fan_in``, so that ``p(s)`` is about multiples of it.

    Raises:
        ArgumentError: if ``prior`` is no scalar distribution over positive numbers or ``unit`` is not
            positive.

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
    rule, starts_at_unit = "unit", False
    unit: Unit = 1.0

    def __post_init__(self) -> None:
        if not callable(self.unit):
            positive(self.unit, "HierarchicalScale: unit")
        prior = self.prior
        if not isinstance(prior, TorchDistributionMixin):
            raise ArgumentError(f"HierarchicalScale: prior is {prior!r}: pass dist.LogNormal(0., 1.), say")
        if prior.shape():
            raise ArgumentError(
                f"HierarchicalScale: prior has the shape {tuple(prior.shape())}: pass a scalar distribution"
            )
        check_no_gradient(prior, "HierarchicalScale: prior")
        check_positive_support(prior, "HierarchicalScale: prior")

    def _scale(self, target: Candidate, start: float) -> PyroSample:
        return PyroSample(ScalePrior(self.prior, buffer_name(target.attribute)))

    def _shown(self, name: str) -> str:
        return f"{name}), {name} ~ {described(self.prior)}"


@dataclass(eq=False, repr=False)
class ScalePrior:
    """The prior of a sampled scale, which follows the dtype and device of a buffer of its module."""

    given: TorchDistributionMixin
    reference: str
    _built: tuple[Tensor, TorchDistributionMixin] | None = field(default=None, init=False)

    def __call__(self, module: PyroModule) -> TorchDistributionMixin:
        """Return the distribution, moved once for each dtype and device."""
        reference = module._buffers[self.reference]
        assert reference is not None
        if self._built is not None and self._built[0] is reference:
            return self._built[1]
        built = placed_like(self.given, reference)
        self._built = None if torch.is_inference_mode_enabled() else (reference, built)
        return built

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_built": None}


def check_positive_support(distribution: TorchDistributionMixin, place: str) -> None:
    """Raise unless the support of a distribution is positive."""
    support = distribution.support
    if isinstance(support, constraints.independent):
        support = support.base_constraint
    lower = getattr(support, "lower_bound", None)
    if support.is_discrete or lower is None or float(torch.as_tensor(lower).min()) < 0.0:
        raise ArgumentError(
            f"{place} is a {type(distribution).__name__} over {support}: use LogNormal, HalfNormal, HalfCauchy or Gamma"
        )
