# SPDX-License-Identifier: Apache-2.0
"""Posterior standard deviations: convergence, ratio to the prior, and signal-to-noise ratios of weights."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from pyro import poutine
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuideList,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.guides import AutoContinuous
from torch import Tensor, distributions as td

from pyro_dvi.core.batches import arguments
from pyro_dvi.core.distributions import broadcasts_to, strip_event_dims
from pyro_dvi.core.table import Table
from pyro_dvi.core.undisturbed import device_of, undisturbed
from pyro_dvi.errors import GuideError
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.predictive.engine.model_runs import AtValues, evaluation_mode
from pyro_dvi.predictive.engine.posterior_values import check_is_set_up, predicted_model
from pyro_dvi.runs.divergences import normal_in_unconstrained_space
from pyro_dvi.runs.latents import unconstraining_transform


def scale_report(guide: Any, *, earlier: Mapping[str, Tensor] | None = None) -> Table:
    r"""Report whether posterior standard deviations have converged, site by site.

    Scales converge later than the means. If training stops when the loss looks flat, scales are still near their
    initial values, so the posterior is as narrow or as wide as it was initialised. Each site's σ is compared with the
    standard deviation of the prior, with its initial value, and with an earlier snapshot.

    There is one row per site with a Gaussian posterior. The columns are ``site``, ``elements``, ``scale_5%``,
    ``scale_50%`` and ``scale_95%`` (quantiles of σ over elements, in unconstrained space), ``to_prior`` (the median
    ratio of σ to the prior's standard deviation), ``to_start`` (the geometric mean of :math:`\sigma/\sigma_0`, the
    ratio to the initial value), and ``change`` (the relative change since the snapshot,
    :math:`\exp(\mathrm{mean}\,|\log(\sigma/\sigma_{\mathrm{then}})|) - 1`). Unknown quantities are NaN. If ``change``
    is above one per cent, or ``to_start`` is close to one, train longer or, if the scales are trained with gradients,
    raise ``scale_multiplier`` of :func:`~pyro_dvi.optim.learning_rates`.

    Status: exact. A small change since the snapshot means little if the snapshot is only a few steps old, or if the
    learning rate has decayed to zero since then.

    Args:
        guide: a guide of this library (a :class:`~pyro_dvi.LaplaceGuide` after its fit), Pyro's ``AutoNormal``,
            ``AutoDiagonalNormal``, ``AutoMultivariateNormal``, ``AutoLowRankMultivariateNormal``, or an
            ``AutoGuideList`` of these.
        earlier: the result of :func:`scale_snapshot` some epochs earlier.

    Returns:
        A report to print.

    Raises:
        KeyError: if the snapshot lacks a site.
        GuideError: if the guide has no Gaussians, or has not been set up.
        UnsupportedError: if the method of a LaplaceGuide has no variances.

    Source: Unlu & Aitchison (2021), section 4, on the slow convergence of variances.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro_dvi import MeanFieldGuide
        >>> guide = MeanFieldGuide(
        ...     lambda: pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        ... )
        >>> guide.initialize()
        >>> scale_report(guide)["to_start"]
        [1.0]
    """
    rows = [_row(spread, earlier) for spread in posterior_spread(guide)]
    numbers = dict.fromkeys(("scale_5%", "scale_50%", "scale_95%", "to_prior", "to_start"), ".3g")
    formats = {"site": "", "elements": ",", **numbers, "change": ".1%"}
    return Table(f"Posterior scales of {type(guide).__name__}", rows, formats)


def scale_snapshot(guide: Any) -> dict[str, Tensor]:
    """Copy the posterior standard deviations of every site, for later comparison.

    Args:
        guide: as in :func:`scale_report`.

    Returns:
        Standard deviations in unconstrained space by site name, on the CPU.

    Raises:
        GuideError: if the guide has no Gaussians.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro_dvi import MeanFieldGuide
        >>> guide = MeanFieldGuide(
        ...     lambda: pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        ... )
        >>> guide.initialize()
        >>> scale_snapshot(guide)
        {'w': tensor([0.0498, 0.0498])}
    """
    return {spread.site: spread.scale.cpu().clone() for spread in posterior_spread(guide)}


def signal_to_noise(guide: Any) -> dict[str, Tensor]:
    r"""Return :math:`|\mu|/\sigma` of every weight of a Gaussian posterior.

    Weights with a low ratio can be pruned: their posterior density at zero is :math:`\exp(-\text{ratio}^2/2)` times the
    density at the mean. The fraction of weights that can be pruned indicates how much of the network the data require.
    Latents with a constrained support, such as a noise scale, are omitted, because zero has no special meaning there.
    For multiplicative noise, there is one ratio per input unit, :math:`\alpha_j^{-1/2}`.

    Status: exact for the marginals of the posterior; correlations are ignored.

    Args:
        guide: as in :func:`scale_report`.

    Returns:
        Ratios by site name, in the shape of the site, on the CPU.

    Raises:
        GuideError: if the guide has no Gaussians, or has not been set up.
        UnsupportedError: if the method of a LaplaceGuide has no variances.

    Source: Graves (2011), "Practical variational inference for neural networks", for the pruning heuristic; Blundell et
    al. (2015), "Weight uncertainty in neural networks", for the ratio.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> from pyro.infer.autoguide import AutoNormal, init_to_value
        >>> values = {"w": torch.tensor([0.0, 0.05, 3.0])}
        >>> model = lambda: pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
        >>> guide = AutoNormal(model, init_loc_fn=init_to_value(values=values), init_scale=0.1)
        >>> _ = guide()
        >>> signal_to_noise(guide)["w"] < 1  # weights to prune
        tensor([ True,  True, False])
    """
    return {s.site: (s.loc.abs() / s.scale).cpu() for s in posterior_spread(guide) if s.is_real}


def _row(spread: "Spread", earlier: Mapping[str, Tensor] | None) -> dict[str, Any]:
    scale = spread.scale.cpu().double()
    to_prior = to_start = change = math.nan
    if spread.prior_scale is not None:
        to_prior = float((scale / spread.prior_scale.cpu().double()).nanmedian())
    if spread.initial_scale is not None:
        to_start = float((scale / spread.initial_scale.detach().cpu().double()).log().mean().exp())
    if earlier is not None:
        change = float((scale / earlier[spread.site].cpu().double()).log().abs().mean().expm1())
    quantiles = np.quantile(scale.numpy(), (0.05, 0.5, 0.95)).tolist()
    row = dict(zip(("scale_5%", "scale_50%", "scale_95%"), quantiles, strict=True))
    row |= {"to_prior": to_prior, "to_start": to_start, "change": change}
    return {"site": spread.site, "elements": scale.numel(), **row}


@dataclass(frozen=True)
class Spread:
    """The Gaussian of one latent site in unconstrained space, with its prior.

    Attributes:
        site: name of the site.
        loc: posterior mean.
        scale: posterior standard deviation, in the shape of ``loc``.
        prior_scale: standard deviation of the prior, broadcastable to ``loc``; None if unknown.
        initial_scale: posterior standard deviation before training, broadcastable to ``loc``; None if unknown.
        is_real: True if the support of the site is the real line, so that values are not transformed.
        is_learned: True if the scale is trained; False if the guide fixes it, or a Laplace approximation fitted it.
    """

    site: str
    loc: Tensor
    scale: Tensor
    prior_scale: Tensor | None
    initial_scale: Tensor | None
    is_real: bool
    is_learned: bool


@torch.no_grad()
def posterior_spread(guide: Any) -> Iterator[Spread]:
    """Yield the Gaussian of every latent site; point masses, even if only single entries of a site, are omitted.

    Priors are read at the posterior median, so a prior scale that is itself a latent or a parameter has its current
    value. For a guide that was loaded without its model, the priors are those of the guide's first run.

    Args:
        guide: as in :func:`scale_report`.

    Raises:
        GuideError: if the guide is of another class, has not been set up, or consists only of point masses.
    """
    check_is_set_up(guide)
    gaussians = list(_gaussians(guide))
    if not gaussians:
        raise GuideError(
            f"{type(guide).__name__} is a point mass at every site and has no scales: call guide.fit(batches, method) "
            "of a LaplaceGuide first, or train a MeanFieldGuide or AutoNormal"
        )
    priors = _priors(guide)
    for site, loc, scale, initial, is_learned in gaussians:
        transform = unconstraining_transform(priors[site].support)
        prior, scale = _prior_scale(priors[site], transform, loc), scale.expand_as(loc)
        if not is_learned and not bool(scale.all()):  # a Laplace approximation with fixed entries
            varies = scale > 0
            prior = None if prior is None else prior.expand_as(loc)[varies]
            loc, scale = loc[varies], scale[varies]
        yield Spread(site, loc.detach(), scale.detach(), prior, initial, transform is None, is_learned)


def _gaussians(guide: Any) -> Iterator[tuple[str, Tensor, Tensor, Tensor | None, bool]]:
    """Yield site, mean, scale and initial scale of each Gaussian, and whether its scale is learned."""
    if isinstance(guide, AutoGuideList):
        for part in guide:
            yield from _gaussians(part)
    elif isinstance(guide, FactorisedGuide):
        initial = guide.initial_scales()
        for site, posterior in guide.get_posterior().items():
            base = strip_event_dims(posterior)
            if isinstance(base, td.TransformedDistribution):
                base = strip_event_dims(base.base_dist)
            if isinstance(base, td.Normal):
                yield site, base.loc, base.scale, initial.get(site), site in initial
    elif isinstance(guide, AutoNormal):
        for site in guide.median():
            loc, scale = attrgetter(site)(guide.locs), attrgetter(site)(guide.scales)
            yield site, loc, scale, loc.new_tensor(guide._init_scale), True
    elif isinstance(guide, AutoContinuous) and type(guide)._loc_scale is not AutoContinuous._loc_scale:
        joint_loc, joint_scale = guide._loc_scale()
        is_known = isinstance(guide, (AutoDiagonalNormal, AutoMultivariateNormal))
        start = joint_loc.new_tensor(guide._init_scale) if is_known else None
        locs, scales = guide._unpack_latent(joint_loc), guide._unpack_latent(joint_scale)
        for (node, loc), (_, scale) in zip(locs, scales, strict=True):
            yield node["name"], loc, scale, start, True
    elif not isinstance(guide, AutoDelta):
        raise GuideError(
            f"{getattr(guide, '__name__', type(guide).__name__)} is not known to be Gaussian. Scales can be read from "
            "guides of this library, Pyro's Gaussian autoguides, the result of AutoLaplaceApproximation."
            "laplace_approximation(*args), and members of an ensemble, guide.members[k].guide"
        )


def _priors(guide: Any) -> Mapping[str, Any]:
    """Return the priors of the latent sites, given the posterior median of the sites that they depend on."""
    prototype = guide.prototype_trace
    first = {name: node["fn"] for name, node in prototype.iter_stochastic_nodes()}
    if guide._model is None or "_INPUT" not in prototype.nodes:
        return first
    given, device = prototype.nodes["_INPUT"], device_of(guide)
    args, kwargs = arguments(given["args"], device)[0], arguments(given["kwargs"], device)[1]
    whole = {
        name: value
        for name, value in guide.median(*args, **kwargs).items()
        if not any(frame.vectorized for frame in prototype.nodes[name]["cond_indep_stack"])
    }
    model = predicted_model(guide, guide.model)
    with undisturbed(), evaluation_mode(model), poutine.trace() as recorder, AtValues(whole):
        model(*args, **kwargs)
    nodes = recorder.trace.nodes
    return {name: nodes[name]["fn"] if name in nodes else fn for name, fn in first.items()}


def _prior_scale(prior: Any, transform: Any, loc: Tensor) -> Tensor | None:
    """Return a prior's standard deviation in unconstrained space, if it is Normal there or its support is real."""
    normal = normal_in_unconstrained_space(prior, transform)
    if normal is None and transform is not None:
        return None
    try:
        scale = prior.variance.sqrt() if normal is None else normal.scale
    except NotImplementedError:
        return None
    scale = scale.detach().to(loc)
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    if bool(scale.isnan().all()):
        return None
    # The shape of a prior may not fit, for example if it is from another minibatch; its scales are nearly identical.
    return scale if broadcasts_to(scale.shape, loc.shape) else scale.nanmedian()
