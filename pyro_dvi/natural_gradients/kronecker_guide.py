# SPDX-License-Identifier: Apache-2.0
"""The posterior of noisy K-FAC, a matrix normal per layer, and the measurement of its Kronecker factors."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import isqrt
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from pyro.distributions import constraints
from pyro.poutine.block_messenger import BlockMessenger
from torch import Tensor

from pyro_dvi.core.autograd_graph import graph_of
from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.core.undisturbed import preserve_buffers
from pyro_dvi.curvature.example_gradients import ExampleGradients
from pyro_dvi.curvature.kronecker import KroneckerFactors, KroneckerLayer, nearest_product
from pyro_dvi.curvature.linearisation import ObservedSite, sum_of
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.errors import ModelError, UnsupportedError, warn
from pyro_dvi.gaussians.normals import MatrixNormal
from pyro_dvi.guides.base import FactorisedGuide, prior_scale_of
from pyro_dvi.guides.factors import Factor, GuideSite, owner_of
from pyro_dvi.natural_gradients.drawn_run import DrawnRun, SquareMeasurement
from pyro_dvi.natural_gradients.estimates import Estimate
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.runs.latents import is_real
from pyro_dvi.runs.observed import observed_sites, row_weights
from pyro_dvi.runs.posterior_run import Call


@dataclass(frozen=True)
class LayerFisher(Estimate):
    r"""Kronecker factors of the Fisher information of each layer, and sums of squared gradients for all other latents.

    .. math:: A = \sum_i \sum_t a_{it} a_{it}^\top, \qquad
        B = \frac{1}{NT} \sum_i \sum_t \delta_{it} \delta_{it}^\top

    Here a are the inputs of a layer, and :math:`\delta` are the gradients with respect to its outputs, for N examples i
    and T positions t.

    Args:
        at_mean: take gradients at the mean instead of at draws (K-FAC without noise).
        observed: compute :math:`\delta` from the observed labels. By default, one label for each example is drawn from
            the model at the same weights; this takes an additional backward pass. A ``pyro.factor`` has no labels, so
            its own gradient is used.
        rest_only: measure only the other latents, as in the steps between two measurements of the factors.

    Source: Zhang et al. (2018), "Noisy natural gradient as variational inference"; Martens & Grosse (2015).
    """

    at_mean: bool = False
    observed: bool = False
    rest_only: bool = False
    factored: ClassVar[bool] = True

    def measure(self, run: DrawnRun, sites: Sequence[ObservedSite], squares: SquareMeasurement) -> None:
        number = {one.name: k for k, one in enumerate(run.drawn)}
        layers = [tuple(number[n] for n in pair if n) for pair in run.guide.guide.layers.items()]
        inside = {k for tensors in layers for k in tensors}
        found = self._factors(run, sites, layers, inside) if layers and not self.rest_only else {}
        for k, *_ in layers:
            factors = found.get(k, torch.zeros_like(run.drawn[k].precision))
            run.drawn[k].measurement.add(factors / squares.num_particles)
        squares.measure(run, sites, inside)

    def _factors(
        self, run: DrawnRun, sites: Sequence[ObservedSite], layers: list[tuple[int, ...]], inside: set[int]
    ) -> dict[int, Tensor]:
        # The labels of several sites are drawn independently, so products of their gradients vanish on average.
        terms = [site.log_prob(site.value if self.observed else site.sample_labels()) for site in sites]
        total = sum_of([(term * site.scale**0.5).sum() for term, site in zip(terms, sites, strict=True)])
        rows, served = _rows_of_examples(run.recorder, terms)
        served = {k: uses for k, uses in served.items() if k in inside}
        each, weights = (total / rows).expand(rows, 1), row_weights(sites, rows)
        examples = ExampleGradients(run.recorder, each, served=served, weights=weights)
        graph, found = graph_of([total]), {}
        for tensors in layers:
            k, one, outer = tensors[0], run.drawn[tensors[0]], examples.outer(tensors[0])
            if outer is not None:
                layer = KroneckerLayer(tensors)
                layer.add(examples)
                tiny = torch.finfo(layer.deltas.dtype).tiny  # if nothing is observed
                factors = [layer.deltas / layer.positions.clamp_min(tiny), layer.inputs]
                found[k] = flattened(*(factors[::-1] if outer.inputs_first else factors)).to(one.precision)
            elif one.value.grad_fn in graph:
                raise ModelError(
                    f"site {one.name!r} was the weight of a layer in the first run, but now "
                    f"{run.recorder.obstacle(k)}: train this model with NaturalGradientGuide and VOGN"
                )
        return found


def _rows_of_examples(recorder: SquaredGradients, terms: Sequence[Tensor]) -> tuple[int, Any]:
    """Return the number of examples for which rules support the most tensors, and the uses of these tensors."""
    sizes = dict.fromkeys(size for term in terms for size in term.shape) or {1: None}
    found = [(size, recorder.served(size)) for size in sizes]
    return max(found, key=lambda pair: len(pair[1]))


class KroneckerGuide(NaturalGradientGuide):
    r"""Matrix normals for the layers of a network and independent Gaussians for all other latents, for ``NoisyKFAC``.

    .. math:: q(W) = \mathcal{MN}(W; M, \Lambda_B^{-1}, \Lambda_A^{-1}), \qquad
        \Lambda_B \otimes \Lambda_A \approx \frac{N}{\beta T} (B \otimes A + \tilde\delta)

    W are the weights ``[out, in]`` of a dense or convolutional layer, with its bias as last column if the bias is the
    next site of the model. Layers are found in the first run of the model; the weights of a layer must be used exactly
    once. All other sites have precisions, as in a :class:`~pyro_dvi.NaturalGradientGuide`.

    Args:
        model: a Pyro model whose latents have Normal priors (in unconstrained space).
        init_loc_fn: Pyro's initialisation strategy for the means.
        initial_scale: initial standard deviation, as a fraction of the prior standard deviation; the first step
            replaces it.
        create_plates: as in Pyro's guides.

    Attributes:
        layers: mapping from the site of each layer's weights to the site of its bias, or to None if it has no bias; set
            in the first run.
        locs: module of means.
        precisions: module of the precisions of all sites outside layers.
        factors: module of the factors of layers; see :meth:`roots`.

    Raises:
        ModelError: in the first call, nothing is observed, a latent is discrete, or a prior is not Normal.

    Source: Zhang, Sun, Duvenaud & Grosse (2018), "Noisy natural gradient as variational inference".
    """

    _constraints = {"precisions": constraints.real, "factors": constraints.real}  # noqa: RUF012
    trained_by: ClassVar[str] = "NoisyKFAC"
    _first_estimate: ClassVar[Estimate] = LayerFisher()
    layers: Mapping[str, str | None] = MappingProxyType({})

    @property
    def factorised(self) -> Any:
        """None, because weights have covariances; prediction rules that need independent weights raise an error."""
        return None if self.layers else self

    def roots(self, weight: str) -> tuple[Tensor, Tensor]:
        r"""Return the lower triangular roots of a layer's covariance, :math:`L_r L_r^\top \otimes L_c L_c^\top`."""
        site = self._seen[weight]
        return unflattened(site.spread, site.loc.shape[0])

    @torch.no_grad()
    def initial_scales(self) -> dict[str, Tensor]:
        """Return the standard deviations at the start of training; see :meth:`FactorisedGuide.initial_scales`."""
        scales = super().initial_scales()
        for weight, bias in self.layers.items():
            if bias is not None:
                site = self._seen[weight]
                spread = site.factor.initial(site.loc, prior_scale_of(site.prior, site.loc), site.event_dim)
                start = site.factor.distribution(site.loc, spread)
                scales[bias] = start.next_column(self._seen[bias].loc).stddev
        return scales

    def precision_parameter(self, name: str) -> Tensor:
        """Return the parameter for the curvature of a site; weights and bias of a layer share one."""
        factor = self._seen[name].factor
        return super().precision_parameter(factor.weight if isinstance(factor, _Bias) else name)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every latent site once; Pyro calls this with the arguments of the model."""
        self.initialize(*args, **kwargs)
        return self._within_plates(self._drawing(lambda site, fn: site.sample(fn)), *args, **kwargs)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] | int = ()) -> dict[str, Tensor]:
        """Draw all sites at once, without running the model; see :meth:`FactorisedGuide.sample`."""
        shape = torch.Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)

        def draw(site: GuideSite, fn: Any) -> Tensor:
            plates = site.loc.shape[: site.loc.dim() - site.event_dim]
            return site.constrained(fn.expand(shape + plates).sample())

        drawing = self._drawing(draw)
        return {site.name: drawing(site) for site in self._sites()}

    def _drawing(self, draw: Callable[[GuideSite, Any], Tensor]) -> Callable[[GuideSite], Tensor]:
        """Return a function that draws a site; it draws a bias conditional on the weights of its layer."""
        drawn: dict[str, Tensor] = {}

        def drawing(site: GuideSite) -> Tensor:
            fn = site.posterior()
            if isinstance(site.factor, _Bias):
                fn = site.factor.weights().next_column(site.loc, drawn[site.factor.weight]).to_event(1)
            return drawn.setdefault(site.name, draw(site, fn))

        return drawing

    # Finding layers --------------------------------------------------------------------------------------------------

    def _check_sites(self, sites: dict[str, Any]) -> None:
        """Find the layers, in the loaded parameters or by running the model."""
        following = dict.fromkeys(sites, None) | dict(pairwise(sites))
        if any(owner_of(self.locs, name) is not None for name in sites):
            layers: dict[str, str | None] = {}
            for name in sites:
                if (owner := owner_of(self.factors, name)) is not None:
                    size, shape = len(getattr(owner, name.rpartition(".")[2])), sites[name]["value"].shape
                    alone = shape[0] ** 2 + shape[1:].numel() ** 2
                    layers[name] = following[name] if size > alone else None
            self.layers = layers
        else:
            with preserve_buffers(), torch.enable_grad(), BlockMessenger():
                self.layers = self._found(sites, following)
        if not self.layers and any(site["value"].dim() > 1 for site in sites.values()):
            warn(
                "KroneckerGuide found no layers, so all weights are independent. A layer is a dense or convolutional "
                "function, such as F.linear(x, w), x @ w or F.conv2d(x, w), and its weights must be used only once"
            )

    def _found(self, sites: dict[str, Any], following: dict[str, str | None]) -> dict[str, str | None]:
        """Run the model and return its layers."""
        trace: Any = self.prototype_trace
        trace, values, given = trace.copy(), {}, trace.nodes["_INPUT"]
        for name, site in sites.items():
            if is_real(site["fn"].support) and not site["cond_indep_stack"]:
                values[name] = site["value"].detach().clone().requires_grad_()
                trace.nodes[name] = {**site, "value": values[name]}
        with SquaredGradients(list(values.values())) as recorder:
            run = Call(self.model.__wrapped__, self, given["args"], given["kwargs"]).trace_model(trace)
        terms = [site.log_prob(site.value) for site in observed_sites(run).terms]
        rows, _ = _rows_of_examples(recorder, terms)
        columns = [
            term.movedim(term.shape.index(rows), 0).reshape(rows, -1) for term in terms if rows in term.shape
        ]
        if not values or not columns:
            return {}
        names, layers = list(values), {}
        examples = ExampleGradients(recorder, torch.cat(columns, 1).sum(1, keepdim=True), names=names)
        for layer in KroneckerFactors(examples).layers:
            weight, *rest = (names[k] for k in layer.tensors)
            outer: Any = examples.outer(layer.tensors[0])
            if values[weight].dim() > 1:
                has_bias = rest == [following[weight]] and not outer.inputs_first
                layers[weight] = following[weight] if has_bias else None
        return layers

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        factor = super()._factor_of(name, site, loc)
        if name in self.layers:
            if loc.dtype not in (torch.float32, torch.float64):
                raise UnsupportedError(
                    f"site {name!r} is {loc.dtype}, for which torch has no matrix decompositions: convert the model "
                    "with .float(), and train it under torch.autocast"
                )
            return _Weights(self.initial_scale, self.layers[name] is not None)
        weight = next((weight for weight, bias in self.layers.items() if bias == name), None)
        return factor if weight is None else _Bias(self, weight)


@dataclass(frozen=True)
class _Weights(Factor):
    """The weights of a layer, whose factors are stored as one vector."""

    initial_scale: float
    has_bias: bool
    store: ClassVar[str] = "factors"

    def initial(self, loc: Tensor, prior_scale: Tensor, event_dim: int) -> Tensor:
        r, c = nearest_product(prior_scale.expand_as(loc).flatten(1))
        c = torch.cat([c, c.mean().expand(int(self.has_bias))])
        return flattened(r.squeeze(-1).diag(), self.initial_scale * c.diag())

    def distribution(self, loc: Tensor, spread: Tensor | None) -> MatrixNormal:
        assert spread is not None
        return MatrixNormal(loc, *unflattened(spread.detach(), loc.shape[0]), loc.dim())


@dataclass(frozen=True)
class _Bias(Factor):
    """The bias of a layer; the factors of the layer's weights include the spread of the bias."""

    guide: FactorisedGuide
    weight: str

    def weights(self) -> MatrixNormal:
        """Return the posterior of the weights."""
        return strip_event_dims(self.guide._seen[self.weight].posterior())  # type: ignore[no-any-return]

    def distribution(self, loc: Tensor, spread: Tensor | None) -> MatrixNormal:
        return self.weights().next_column(loc)


def flattened(rows: Tensor, columns: Tensor) -> Tensor:
    """Join both factors of a layer into the vector that the guide stores."""
    return torch.cat([rows.flatten(), columns.flatten()])


def unflattened(factors: Tensor, p: int) -> tuple[Tensor, Tensor]:
    """Split a stored vector into the factors ``[p, p]`` and ``[n, n]``."""
    rows, columns = factors.split([p * p, len(factors) - p * p])
    n = isqrt(len(columns))
    return rows.reshape(p, p), columns.reshape(n, n)
