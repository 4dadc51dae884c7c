# SPDX-License-Identifier: Apache-2.0
"""Prior scales that are not fixed: learned with the guide, or inferred under a prior of their own."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn.module import PyroModule, PyroParam, PyroSample
from torch import Tensor, nn
from torch.distributions import constraints

from pyro_dvi.bayesian.placement import placed_like
from pyro_dvi.bayesian.priors import Prior, check_no_gradient, described, positive
from pyro_dvi.bayesian.selection import Candidate
from pyro_dvi.bayesian.site_prior import ScaleMixturePrior, SitePrior, buffer_name
from pyro_dvi.errors import ArgumentError, ModelError

__all__ = ["HierarchicalScale", "LearnedScale", "ScalePrior", "check_positive_support"]

Unit = float | Callable[[str, Tensor], float]


@dataclass(eq=False)
class LearnedScale(Prior):
    r"""A prior scale that is learned with the guide (empirical Bayes): a positive ``PyroParam``.

    .. math::
        w_i \sim N(0, (u s)^2), \qquad s = e^{\rho} \text{ optimised}

    The parameter ``<weight>_scale`` is added to the module, one for each weight tensor, and trained by
    whatever optimizer sees the model's parameters.

    Status: exact; the optimum maximises the ELBO, a lower bound of the evidence.

    Args:
        init: initial :math:`s`, or the scale of ``FanIn()``-like rules, in units of the weight: a float or a
            callable of ``(name, parameter)`` that returns one.
        shared: one scale for all parameters that this object is given to, instead of one for each. It is then
            kept in the converted module under ``prior_scale``, and multiplies the ``init`` of each parameter,
            starting at 1.

    Raises:
        ArgumentError: if ``init`` is not positive.

    Example:
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = to_bayesian_(nn.Linear(3, 2), prior_scale=LearnedScale(0.5))
        >>> net.weight_scale.item()
        0.5
    """

    init: Unit = 1.0
    shared: bool = False
    _home: tuple[nn.Module, str] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.init):
            positive(self.init, "LearnedScale: init")

    def check(self, target: Candidate) -> None:
        """Evaluate ``init`` once, so that a bad rule is found before anything is changed."""
        _check_free(self.shared, target)
        _scale_from(self.init, target, "LearnedScale: init")

    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Add the scale as a ``PyroParam`` and return a Normal prior that reads it."""
        initial = _scale_from(self.init, target, "LearnedScale: init")
        if not self.shared:
            holder, name, unit = None, f"{target.attribute}_scale", 1.0
            _add(target.module, name, self._param(initial, target.parameter))
        else:
            unit = initial
            if self._home is None or self._home[0] is not root:
                self._home = (root, _free_name(root, "prior_scale"))
                _add(root, self._home[1], self._param(1.0, target.parameter))
            holder, name = self._home
        text = f"Normal(0, {'' if unit == 1.0 else f'{unit:.4g}·'}{name} learned)"
        return ScaleMixturePrior(target.attribute, target.position, name, holder, unit, text)

    @staticmethod
    def _param(value: float, parameter: Tensor) -> PyroParam:
        return PyroParam(parameter.new_full((), value), constraint=constraints.positive)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_home": None}


@dataclass(eq=False)
class HierarchicalScale(Prior):
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
        shared: one scale for all parameters that this object is given to, instead of one for each. It is then
            kept in the converted module under ``prior_scale``.

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
    unit: Unit = 1.0
    shared: bool = False
    _home: tuple[nn.Module, str] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if not callable(self.unit):
            positive(self.unit, "HierarchicalScale: unit")
        prior = self.prior
        if not isinstance(prior, TorchDistributionMixin):
            raise ArgumentError(
                f"HierarchicalScale: prior is {prior!r}. Pass a distribution, for instance "
                "dist.LogNormal(0., 1.)."
            )
        if prior.shape():
            raise ArgumentError(
                f"HierarchicalScale: prior has the shape {tuple(prior.shape())}; pass a scalar distribution. "
                "One scale is made for each parameter, or one for all with shared=True."
            )
        check_no_gradient(prior, "HierarchicalScale: prior")
        check_positive_support(prior, "HierarchicalScale: prior")

    def check(self, target: Candidate) -> None:
        """Evaluate ``unit`` once, so that a bad rule is found before anything is changed."""
        _check_free(self.shared, target)
        _scale_from(self.unit, target, "HierarchicalScale: unit")

    def place(self, target: Candidate, root: PyroModule) -> SitePrior:
        """Add the scale as a ``PyroSample`` and return a Normal prior that reads it."""
        unit = _scale_from(self.unit, target, "HierarchicalScale: unit")
        if not self.shared:
            holder, name = None, f"{target.attribute}_scale"
            _add(target.module, name, PyroSample(ScalePrior(self.prior, buffer_name(target.attribute))))
        else:
            if self._home is None or self._home[0] is not root:
                self._home = (root, _free_name(root, "prior_scale"))
                # The root may own no parameter: a scalar of the first one's kind tells dtype and device.
                marker = f"{self._home[1]}_like"
                root.register_buffer(marker, target.parameter.new_ones(()), persistent=False)
                _add(root, self._home[1], PyroSample(ScalePrior(self.prior, marker)))
            holder, name = self._home
        text = f"Normal(0, {'' if unit == 1.0 else f'{unit:.4g}·'}{name}), {name} ~ {described(self.prior)}"
        return ScaleMixturePrior(target.attribute, target.position, name, holder, unit, text)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_home": None}


class ScalePrior:
    """The prior of a sampled scale, which follows the dtype and device of a buffer of its module."""

    def __init__(self, given: TorchDistributionMixin, reference: str) -> None:
        self.given = given
        self.reference = reference
        self._built: tuple[Tensor, TorchDistributionMixin] | None = None

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
    """Raise unless a distribution is one of positive numbers; its support says so, a draw may be lucky."""
    support = distribution.support
    if isinstance(support, constraints.independent):
        support = support.base_constraint
    lower = getattr(support, "lower_bound", None)
    if support.is_discrete or lower is None or float(torch.as_tensor(lower).min()) < 0.0:
        raise ArgumentError(
            f"{place} is a {type(distribution).__name__} over {support}; a scale is positive. Use LogNormal, "
            "HalfNormal, HalfCauchy or Gamma."
        )


def _scale_from(unit: Unit, target: Candidate, place: str) -> float:
    """Evaluate a scale rule for one parameter."""
    if isinstance(unit, Prior) and callable(unit):  # fan-in rules look at the layer too
        unit = unit(target.name, target.parameter, target.module)
    elif callable(unit):
        unit = unit(target.name, target.parameter)
    return positive(unit, f"{place} of {target.name!r}")


def _check_free(shared: bool, target: Candidate) -> None:
    name = f"{target.attribute}_scale"
    if not shared and hasattr(target.module, name):
        raise ModelError(
            f"{target.name!r} cannot get a scale of its own: its {type(target.module).__name__} has an "
            f"attribute {name!r} already. Rename that, or give this parameter a fixed prior_scale."
        )


def _add(module: nn.Module, name: str, value: PyroParam | PyroSample) -> None:
    # Past the module's own __setattr__: recurrent layers intercept it.
    PyroModule.__setattr__(module, name, value)  # type: ignore[arg-type]


def _free_name(module: nn.Module, wanted: str) -> str:
    """Return ``wanted``, with a number behind it where it is taken."""
    name, number = wanted, 1
    while hasattr(module, name):
        number += 1
        name = f"{wanted}_{number}"
    return name
