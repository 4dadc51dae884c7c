# SPDX-License-Identifier: Apache-2.0
"""A posterior with covariances for the last layer, combined with any posterior for all other sites."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from pyro import poutine
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoContinuous, AutoGuide, AutoGuideList, AutoLowRankMultivariateNormal
from pyro.nn import PyroParam
from torch import Tensor, nn

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.undisturbed import preserve_buffers
from pyro_dvi.errors import ArgumentError
from pyro_dvi.gaussians.normals import RowsNormal
from pyro_dvi.guides.base import FactorisedGuide, prior_scale_of
from pyro_dvi.guides.factors import Deterministic, Factor, MeanField, exp_positive
from pyro_dvi.guides.mean_field import MeanFieldGuide
from pyro_dvi.moment_propagation.multiplicative_noise import FollowedStart, WeightProducts
from pyro_dvi.runs.sites import is_latent


@dataclass(frozen=True)
class LayerCovariance:
    r"""Choice of the covariances between the weights and biases of a layer.

    Args:
        log_offset: initial :math:`\log(\sigma/s)`, where s is the prior standard deviation of each weight.
    """

    log_offset: float = field(default=-3.0, kw_only=True)


class PerOutput(LayerCovariance):
    """A dense covariance for the weights and the bias of each output; outputs are independent.

    For a layer ``[out, in]``, this covariance has ``out (in + 1)²`` numbers and costs ``in`` times as much as the
    layer's matrix product.
    """


class AllOutputs(LayerCovariance):
    """One dense covariance for the whole layer; its number of elements is the square of the number of weights."""


@dataclass(frozen=True)
class LowRank(LayerCovariance):
    """A diagonal plus low-rank covariance of all weights of the layer.

    Args:
        rank: rank of the low-rank matrix.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        check_count("rank", self.rank)


class LastLayerGuide(AutoGuideList):
    r"""A Gaussian with covariances for the last layer, and another posterior for all other sites.

    .. math:: q(w) = \mathcal N(w_{\mathrm{last}};\, \mu, \Sigma)\; q_{\mathrm{rest}}(w_{\mathrm{rest}})

    With point masses for all other sites (the default), this is the posterior of variational Bayesian last layers. If
    this posterior is trained with :class:`~pyro_dvi.MomentPropagationELBO`, the outputs have exact means and
    covariances, and the loss is a bound on the evidence given the other sites, except for classification, where the
    expected log-normaliser is averaged over quadrature points. If the other sites are uncertain, the loss is as
    accurate as the moments of the layer's inputs. Predict with :class:`~pyro_dvi.Moments`.

    Args:
        model: a Pyro model.
        layer: the last layer, given as the name of a module or site, a pattern of site names, or a list of these.
        covariance: ``PerOutput()``, ``AllOutputs()`` or ``LowRank(rank)`` from :mod:`pyro_dvi.moment_propagation`, or
            ``MeanField()`` from :mod:`pyro_dvi.guides` for independent weights.
        rest: class or function that creates the guide of all other sites from the model without the layer, such as
            ``MeanFieldGuide`` or ``MultiplicativeNoiseGuide``; by default, point masses at the mode, given the
            posterior of the layer.

    Raises:
        ArgumentError: no site belongs to ``layer``; ``covariance`` is not a covariance object; or, with one covariance
            per output, the first dimension of a site of the layer does not index outputs.

    Source: Harrison, Willes & Snoek (2024), "Variational Bayesian last layers". ``PerOutput()`` is the paper's dense
    covariance; here, the Pyro model defines the likelihood, the priors and the noise.

    Example:
        >>> import pyro_dvi as dvi
        >>> net = dvi.to_bayesian_(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
        >>> model = dvi.classifier(net, num_data=4)
        >>> guide = LastLayerGuide(model, "net.2")
        >>> guide.initialize(torch.zeros(4, 3), torch.zeros(4).long())
        >>> guide[1].scale_tril.shape
        torch.Size([2, 9, 9])
    """

    def __init__(
        self,
        model: Callable,
        layer: str | Iterable[str],
        *,
        covariance: LayerCovariance | MeanField | None = None,
        rest: Callable[[Callable], Any] | None = None,
    ) -> None:
        covariance = PerOutput() if covariance is None else covariance
        if not isinstance(covariance, MeanField):
            known = "PerOutput(), AllOutputs(), LowRank(rank) or MeanField()"
            check_choice("covariance", covariance, LayerCovariance, known)
        super().__init__(model)
        self.layer = [layer] if isinstance(layer, str) else list(layer)
        self.covariance, self.rest = covariance, _PointMasses if rest is None else rest

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Unless the parameters exist, run the model once with these arguments and create them."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with preserve_buffers(), torch.no_grad():
            super()._setup_prototype(*args, **kwargs)
            trace: Any = self.prototype_trace
            names = [name for name, _ in trace.iter_stochastic_nodes()]
            inside = [self._is_inside(name) for name in names]
            try:
                if not any(inside):
                    raise ArgumentError(f"layer={self.layer} matches no site: the sites are {names}")
                if len(self) == 0:
                    if not all(inside):
                        self.append(self.rest(poutine.block(self.model, hide_fn=self._is_layer)))
                    self.append(self._of_layer(poutine.block(self.model, hide_fn=self._is_rest)))
                self._create_plates(*args, **kwargs)
                for part in self:
                    if part.prototype_trace is None:
                        part._setup_prototype(*args, **kwargs)
            except Exception:
                self.prototype_trace = None  # so that a corrected call starts afresh
                raise

    def _of_layer(self, model: Callable) -> AutoGuide:
        if isinstance(self.covariance, MeanField):
            return MeanFieldGuide(model, scale=self.covariance.scale)
        if isinstance(self.covariance, LowRank):
            return _LowRankGuide(model, self.covariance)
        return _RowsGuide(model, self.covariance)

    def _is_inside(self, name: str) -> bool:
        return any(name.startswith(f"{p}.") or fnmatchcase(name, p) for p in self.layer)

    def _is_layer(self, site: Any) -> bool:
        return site["type"] == "sample" and is_latent(site) and self._is_inside(site["name"])

    def _is_rest(self, site: Any) -> bool:
        return site["type"] == "sample" and is_latent(site) and not self._is_inside(site["name"])


class _PointMasses(FactorisedGuide):
    """Point masses at the mode of all sites."""

    def __init__(self, model: Callable) -> None:
        super().__init__(model, init_loc_fn=init_to_module)

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        return Deterministic()


def _initial_scales(guide: AutoContinuous, log_offset: float) -> Tensor:
    """Return scales that are a fraction of the prior scales, in the order of the joint vector."""
    trace: Any = guide.prototype_trace
    scales = [
        prior_scale_of(site["fn"], site["value"]).expand_as(site["value"]).flatten()
        for _, site in trace.iter_stochastic_nodes()
    ]
    return torch.cat(scales).detach() * math.exp(log_offset)


class _RowsGuide(AutoContinuous):
    """A dense covariance of all weights of a layer, or of the weights of each output."""

    def __init__(self, model: Callable, covariance: LayerCovariance) -> None:
        start = FollowedStart(init_to_module)
        super().__init__(model, init_loc_fn=start)
        self.log_offset, self._start = covariance.log_offset, start
        self.per_output = isinstance(covariance, PerOutput)

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with WeightProducts() as products:
            self._start.products = products
            super()._setup_prototype(*args, **kwargs)
        self._start.products = None
        trace: Any = self.prototype_trace
        shapes = {name: site["value"].shape for name, site in trace.iter_stochastic_nodes()}
        rows = {shape[0] if shape else 1 for shape in shapes.values()} if self.per_output else {1}
        inputs = [name for name, units in products.units.items() if any(0 in unit.axes for unit in units)]
        if len(rows) > 1 or (self.per_output and inputs):
            found = f", but the model sums over the first dimension of {inputs}" if inputs else ""
            raise ArgumentError(
                "PerOutput() needs sites whose first dimension indexes the outputs of the layer. The shapes are "
                f"{ {name: tuple(shape) for name, shape in shapes.items()} }{found}. Use AllOutputs() or LowRank(rank)."
            )
        loc = self._init_loc()
        places = torch.arange(len(loc), device=loc.device).split([s.numel() for s in shapes.values()])
        # Indices of the rows' elements in the vector.
        table = torch.cat([place.reshape(*rows, -1) for place in places], -1)
        self.register_buffer("order", table.flatten().argsort(), persistent=False)
        self.loc = nn.Parameter(loc)
        self.scale = PyroParam(_initial_scales(self, self.log_offset), exp_positive)
        start = torch.eye(table.shape[1], dtype=loc.dtype, device=loc.device).expand(len(table), -1, -1)
        self.scale_tril = PyroParam(start.contiguous(), constraints.unit_lower_cholesky)

    def get_posterior(self, *args: Any, **kwargs: Any) -> RowsNormal:
        """Return the posterior of the joint vector."""
        scale, correlations, order = (getattr(self, name) for name in ("scale", "scale_tril", "order"))
        rows = torch.empty_like(self.loc).index_put((order,), scale).reshape(correlations.shape[:2])
        return RowsNormal(self.loc, rows.unsqueeze(-1) * correlations, order)

    def _loc_scale(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        posterior = self.get_posterior()
        return posterior.loc, posterior.stddev


class _LowRankGuide(AutoLowRankMultivariateNormal):
    """Pyro's low-rank guide, with initial scales that are a fraction of the prior scales."""

    def __init__(self, model: Callable, covariance: LowRank) -> None:
        super().__init__(model, init_loc_fn=init_to_module, rank=covariance.rank)
        self.log_offset = covariance.log_offset

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        super()._setup_prototype(*args, **kwargs)
        self.scale = PyroParam(_initial_scales(self, self.log_offset) * 0.5**0.5, self.scale_constraint)
