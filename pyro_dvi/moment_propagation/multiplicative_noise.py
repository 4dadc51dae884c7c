# SPDX-License-Identifier: Apache-2.0
"""The posterior of weights with multiplicative noise, with one relative variance per input unit.

The axes of a weight that index input units are inferred from a run of the model, or chosen by the user.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pyro.distributions import constraints as pyro_constraints
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.core.arguments import check_positive
from pyro_dvi.core.weight_parts import Part, Places, WeightRecorder, name_of
from pyro_dvi.errors import ArgumentError, ModelError, warn
from pyro_dvi.gaussians.normals import MultiplicativeNormal
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Deterministic, Factor, MeanField, exp_positive
from pyro_dvi.runs.latents import unconstraining_transform
from pyro_dvi.runs.sites import sites_named

Axes = int | tuple[int, ...] | None
"""An axis, several axes, or None for a site that is not a weight."""


@dataclass(frozen=True)
class InputUnits:
    """The layout of a parameter with one number per input unit of a weight.

    Args:
        axes: nonnegative axes of the weight that index input units.
        groups: number of groups of a convolution. In its weight ``[out, in / groups, *kernel]``, the first axis is
            divided among the groups, and the second axis indexes different inputs for each group.
    """

    axes: tuple[int, ...]
    groups: int = 1

    def shape(self, weight: torch.Size) -> tuple[int, ...]:
        """Return the shape of the stored numbers: the weight's shape, with 1 for axes that do not index input units."""
        first = (self.groups,) if self.groups > 1 else ()
        kept = [size if axis in self.axes else 1 for axis, size in enumerate(weight)]
        return (*first, *kept[len(first) :])

    def along(self, numbers: Tensor, weight: torch.Size) -> Tensor:
        """Reshape stored numbers so that they broadcast to the weight."""
        return numbers if self.groups == 1 else numbers.repeat_interleave(weight[0] // self.groups, 0)


def chosen_units(input_axis: Mapping[str, Axes], name: str, dims: int) -> InputUnits | None | bool:
    """Return the user's choice for a site: a layout, None if the site is not a weight, or False if there is no choice.

    Args:
        input_axis: the argument of the guide.
        name: the site's name.
        dims: number of dimensions of the site's value.

    Raises:
        ArgumentError: the choice is not an axis of the site.
    """
    chosen = [axes for pattern, axes in input_axis.items() if fnmatchcase(name, pattern)]
    if not chosen or chosen[0] is None:
        return None if chosen else False
    axes = chosen[0]
    several = axes if isinstance(axes, tuple) else (axes,)
    valid = [a % dims for a in several if type(a) is int and -dims <= a < dims]
    if not several or len(set(valid)) < len(several):
        raise ArgumentError(
            f"input_axis of site {name!r} is {axes!r}, but its values have {dims} dimensions: pass axes, or None"
        )
    return InputUnits(tuple(sorted(valid)))


# Position of the weight among the arguments, and its axes that index inputs.
_LAYERS: dict[str, tuple[int, tuple[int, ...]]] = {
    "linear": (1, (-1,)),
    "bilinear": (2, (1, 2)),
    "embedding": (1, (0,)),
    "embedding_bag": (1, (0,)),
    **{f"conv{d}d": (1, (1,)) for d in (1, 2, 3)},
    **{f"conv_transpose{d}d": (1, (0,)) for d in (1, 2, 3)},
}
# In these modules, weights with two axes have one row per output.
_RECURRENT = frozenset(
    f"{name}{end}" for name in ("lstm", "gru", "rnn_tanh", "rnn_relu") for end in ("", "_cell")
)
_NORMALISATIONS = frozenset("batch_norm instance_norm layer_norm group_norm rms_norm".split())
# Position of the first of two factors.
_MATRIX_PRODUCTS = {"matmul": 0, "mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "addmv": 1, "baddbmm": 1}


class WeightProducts(WeightRecorder):
    """Records the products in which latent values are used: linear layers, convolutions, look-ups, matmul, einsum.

    A value is also recognised after its elements were reordered or reshaped, and after functions that keep its shape.

    Attributes:
        units: layouts inferred from the uses of each site, by site name; a use other than as a weight counts as None.
    """

    def __init__(self) -> None:
        super().__init__()
        self.units: dict[str, set[InputUnits | None]] = {}

    def used(self, func: Callable, args: tuple, kwargs: dict[str, Any], output: Any, found: Places) -> None:
        function = name_of(func)
        factors = _factors(function, args, kwargs)
        for _, part in found:
            units = self.units.setdefault(part.key, set())
            if function in _NORMALISATIONS:
                units.add(None)
            elif (
                part.value.dim() == 2
                and function in _RECURRENT
                or part.value.dim() > 1
                and function == "weight_norm"
            ):
                units.add(InputUnits(tuple(_axes_along(part, 1))))
            for factor, dims, groups in factors or ():
                if factor is part.value:
                    axes = set().union(*(_axes_along(part, dim) for dim in dims))
                    units.add(InputUnits(tuple(sorted(axes)), groups))
            if factors is None and isinstance(output, Tensor) and output.shape == part.value.shape:
                self.parts.add_like(part, output)


class FollowedStart:
    """A Pyro initialisation strategy whose values are registered as weights in a record of products."""

    def __init__(self, init_loc_fn: Callable) -> None:
        self.init_loc_fn = init_loc_fn
        self.products: WeightProducts | None = None

    def __call__(self, site: Any) -> Any:
        value = self.init_loc_fn(site).detach()
        if self.products is not None:
            self.products.parts.add(site["name"], value)
        return value


def _factors(
    function: str, args: tuple, kwargs: Mapping[str, Any]
) -> list[tuple[Any, tuple[int, ...], int]] | None:
    """Return the factors of a product, each with its contracted dimensions and groups; None if it is not a product."""
    if function in _LAYERS:
        place, dims = _LAYERS[function]
        weight = kwargs.get("weight", args[place] if len(args) > place else None)
        groups = kwargs.get("groups", args[6] if len(args) > 6 else 1) if dims == (1,) else 1
        return [(weight, dims, groups)]
    if function in _MATRIX_PRODUCTS:
        a, b = [*args, *kwargs.values()][_MATRIX_PRODUCTS[function] :][:2]
        batch = (-i for i in range(3, min(a.dim(), b.dim()) + 1))
        shared = [d for d in batch if a.shape[d] == b.shape[d] > 1]
        return [(a, (-1, *shared), 1), (b, (-min(b.dim(), 2), *shared), 1)]
    if function == "einsum" and isinstance(args[0], str) and "..." not in args[0]:
        return list(_einsum_factors(args[0], tree_leaves(args[1:])))
    if function == "getitem" and isinstance(args[1], Tensor) and not args[1].is_floating_point():
        return [(args[0], (0,), 1)]
    return None


def _einsum_factors(equation: str, operands: list[Any]) -> Iterator[tuple[Any, tuple[int, ...], int]]:
    terms = equation.replace(" ", "").split("->")[0].split(",")
    for k, (term, operand) in enumerate(zip(terms, operands, strict=True)):
        others = set().union(*terms[:k], *terms[k + 1 :])
        yield operand, tuple(d for d, letter in enumerate(term) if letter in others), 1


def _axes_along(part: Part, dim: int) -> set[int]:
    """Return the axes of a weight along which a dimension of one of its parts runs."""
    if part.places is None:
        return {dim % len(part.shape)}
    places = part.places.movedim(dim, -1)
    indices = torch.unravel_index(places, part.shape)
    return {axis for axis, index in enumerate(indices) if bool((index != index[..., :1]).any())}


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
