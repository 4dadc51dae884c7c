# SPDX-License-Identifier: Apache-2.0
"""The posterior of weights with multiplicative noise, with one relative variance per input unit."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.nn.functional as F
from pyro.distributions import constraints as pyro_constraints
from torch import Tensor

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.core.arguments import check_positive
from pyro_dvi.errors import ArgumentError, ModelError, warn
from pyro_dvi.gaussians.normals import MultiplicativeNormal
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Deterministic, Factor, MeanField, exp_positive
from pyro_dvi.moment_propagation.input_units import (
    Axes,
    FollowedStart,
    InputUnits,
    WeightProducts,
    chosen_units,
)
from pyro_dvi.runs.latents import unconstraining_transform
from pyro_dvi.runs.sites import sites_named


class MultiplicativeNoiseGuide(FactorisedGuide):
    r"""Gaussian weights whose variance is proportional to their squared mean, with one factor per input unit.

    .. math::
        q(w_{ij}) = \mathcal N\bigl(m_{ij},\ \alpha_j m_{ij}^2 + \varepsilon\bigr), \qquad
        \alpha_j = \log(1 + e^{\rho_j}),

    as if input j of the layer were multiplied by noise with mean 1 and variance :math:`\alpha_j`. The posterior adds
    one parameter per input unit, about :math:`\sqrt n` for a network with n weights, whereas a mean-field posterior
    adds n. For a prior :math:`\mathcal N(0, s^2)`, the KL divergence is

    .. math::
        \mathrm{KL} = \sum_{ij} \tfrac12\Bigl(\frac{(1 + \alpha_j) m_{ij}^2 + \varepsilon}{s^2} - 1
            - \log\frac{\alpha_j m_{ij}^2 + \varepsilon}{s^2}\Bigr).

    A latent is treated as a weight if it is real, has two or more dimensions, and is not inside a plate. When the guide
    first runs the model, it infers the input axis of a weight from the functions that use the weight: the columns of
    linear, attention and recurrent layers; the input channels of convolutions, separately for each group; the rows of
    embeddings and look-ups; the dimension over which ``x @ w`` or einsum sums. If these functions do not determine the
    axis, the guide uses axis 1 and warns. ``input_axis`` overrides the inferred axis. ``biases`` sets the posterior of
    biases, normalisation parameters and other real latents. Latents inside plates, and latents with a constrained
    support (such as a noise scale), are mean-field Gaussians in unconstrained space.

    Status: a family of posteriors. Moment propagation uses :math:`\alpha_j m_{ij}^2` without :math:`\varepsilon`;
    samples and the KL divergence include :math:`\varepsilon`. The paper adds :math:`\varepsilon` only in the logarithm,
    so its KL divergence differs from ours by the constant :math:`\varepsilon / 2 s^2` per weight, but has the same
    gradients.

    Args:
        model: a Pyro model whose latents are continuous.
        init_loc_fn: Pyro's initialisation strategy for the means; by default, the weights that a network had before
            :func:`~pyro_dvi.to_bayesian_`.
        initial_rho: initial :math:`\rho`; -3 means :math:`\alpha = 0.0486`, a relative noise of 22 %.
        biases: posterior of other real latents: ``Deterministic()`` point masses or ``MeanField()``. Use
            ``MeanField()`` if the prior of other latents depends on such a latent.
        input_axis: the input axes of weights, by site name or pattern (the first match applies): ``{"w": 0}``, or
            ``{"w": (0, 1)}`` for a batch of networks ``[K, in, out]``. None instead of an axis means that a site is not
            a weight. An axis makes any real latent a weight, even a vector or a latent inside a plate.
        create_plates: function that returns the plates that the guide should subsample, as in Pyro's guides.
        eps: :math:`\varepsilon`, in squared units of the weights.

    Attributes:
        locs: module of means, ``guide.locs.<site>``; ``MultiplicativeNoiseGuide.locs.<site>`` in the parameter store.
        alphas: module of relative variances, of shape ``[1, in]`` for a weight ``[out, in]`` (``[groups, in / groups,
            1, 1]`` for grouped convolutions). The optimizer updates :math:`\rho`, with the learning rate of scales if
            :func:`~pyro_dvi.optim.learning_rates` sets one.
        scales: module of standard deviations of mean-field sites; the optimizer updates their logarithms.

    Raises:
        ModelError: a latent is discrete, there are no latents, or ``input_axis`` names a latent that is not a weight.
        ArgumentError: an option has an invalid value.
        DviWarning: (a warning) the input axis of a weight cannot be inferred from the model.
        GuideError: the loaded state was saved with other options.

    Source: Schmitt & Roth (2021), "Sampling-free variational inference for neural networks with multiplicative
    activation noise", Eq. 5 and 17, Appendix A.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = to_bayesian_(
        ...     nn.Sequential(nn.Conv2d(3, 8, 5), nn.ReLU(), nn.Flatten(), nn.Linear(8, 2))
        ... )
        >>> guide = MultiplicativeNoiseGuide(net)
        >>> guide.initialize(torch.ones(1, 3, 5, 5))
        >>> {name: tuple(alpha.shape) for name, alpha in guide.alphas.named_parameters()}
        {'0.weight_unconstrained': (1, 3, 1, 1), '3.weight_unconstrained': (1, 8)}
        >>> guide.get_posterior()["3.weight"].base_dist.alpha[0, 0].item()
        0.0485...
    """

    _constraints = {  # noqa: RUF012
        "alphas": pyro_constraints.softplus_positive,
        "scales": exp_positive,
    }

    def __init__(
        self,
        model: Callable,
        *,
        init_loc_fn: Callable = init_to_module,
        initial_rho: float = -3.0,
        biases: Factor | None = None,
        input_axis: Mapping[str, Axes] | None = None,
        create_plates: Callable | None = None,
        eps: float = 1e-10,
    ) -> None:
        is_number = isinstance(initial_rho, int | float) and not isinstance(initial_rho, bool)
        if not is_number or not -30 <= initial_rho <= 10:
            raise ArgumentError(
                f"initial_rho, the inverse softplus of the relative variance, must be in [-30, 10], got {initial_rho!r}"
            )
        biases = Deterministic() if biases is None else biases
        if not isinstance(biases, Factor) or biases.store not in (None, "scales"):
            raise TypeError(f"biases must be Deterministic() or MeanField(), got {biases!r}")
        input_axis = {} if input_axis is None else input_axis
        check_positive("eps", eps)
        start = FollowedStart(init_loc_fn)
        super().__init__(model, init_loc_fn=start, create_plates=create_plates)
        self._start = start
        self.initial_rho = float(initial_rho)
        self.biases = biases
        self.input_axis = input_axis
        self.eps = eps

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with WeightProducts() as self._start.products:
            try:
                super()._setup_prototype(*args, **kwargs)
            finally:  # the guide must not keep values of the run
                self._start.products = None

    def _check_sites(self, sites: dict[str, Any]) -> None:
        sites_named("input_axis", self.input_axis, list(sites))

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        local = any(frame.vectorized for frame in site["cond_indep_stack"])
        constrained = unconstraining_transform(site["fn"].support) is not None
        units = chosen_units(self.input_axis, name, loc.dim())
        if isinstance(units, InputUnits):
            if constrained:
                raise ModelError(
                    f"the support of site {name!r} is constrained, {site['fn'].support}: remove it from input_axis"
                )
            return MultiplicativeNoise(units, self.initial_rho, self.eps)
        if local or constrained:
            return self.biases if isinstance(self.biases, MeanField) else MeanField()
        if units is False and loc.dim() >= 2:
            units = self._units_of(name, loc)
            if units is not None:
                return MultiplicativeNoise(units, self.initial_rho, self.eps)
        return self.biases

    def _units_of(self, name: str, loc: Tensor) -> InputUnits | None:
        """Return the layout of a weight, inferred from its uses in the model."""
        assert self._start.products is not None
        seen = list(self._start.products.units.get(name, set()))
        if len(seen) == 1:
            return seen[0]
        axes = f"the axes {[units and units.axes for units in seen]}" if seen else "no axis"
        warn(
            f"the input axis of site {name!r}, of shape {tuple(loc.shape)}, is unclear: the products in the model "
            f"suggest {axes}, so axis 1 is used. Pass the axis, as in input_axis={{{name!r}: 0}} (None: not a weight)."
        )
        return InputUnits((1,))


@dataclass(frozen=True)
class MultiplicativeNoise(Factor):
    """The posterior of a weight with multiplicative noise.

    Args:
        units: layout of the weight's input units.
        initial_rho: initial inverse softplus of the relative variance.
        eps: number that is added to the variances.
    """

    units: InputUnits
    initial_rho: float
    eps: float
    store: ClassVar[str] = "alphas"

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        return F.softplus(loc.new_full(self.units.shape(loc.shape), self.initial_rho))

    def distribution(self, loc: Tensor, spread: Tensor | None) -> MultiplicativeNormal:
        assert spread is not None
        return MultiplicativeNormal(loc, self.units.along(spread, loc.shape), self.eps, validate_args=False)
