# SPDX-License-Identifier: Apache-2.0
"""Means and standard deviations of a Gaussian posterior, beside those of the prior, site by site."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import (
    AutoDelta,
    AutoDiagonalNormal,
    AutoGuide,
    AutoGuideList,
    AutoLaplaceApproximation,
    AutoMultivariateNormal,
    AutoNormal,
)
from pyro.infer.autoguide.guides import AutoContinuous
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.batches import arguments
from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.core.undisturbed import device_of, undisturbed
from pyro_dvi.errors import GuideError
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.predictive.engine.model_runs import AtValues, evaluation_mode
from pyro_dvi.predictive.engine.posterior_values import check_is_set_up, predicted_model
from pyro_dvi.runs.divergences import normal_in_unconstrained_space
from pyro_dvi.runs.latents import unconstraining_transform


@dataclass(frozen=True)
class Spread:
    """The Gaussian of one latent site in unconstrained space, beside its prior.

    Attributes:
        site: name.
        loc: posterior mean.
        scale: posterior standard deviation, of the shape of ``loc``.
        prior_scale: standard deviation of the prior, broadcastable to ``loc``; None where it has none there.
        initial_scale: posterior standard deviation before training, broadcastable; None where it is not known.
        is_real: whether the site's own values are real numbers: no transform stands between.
        is_learned: whether training moves the scale; one of a fixed family or of Laplace's method is not.
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
    """Give the Gaussian of every latent site, one after the other; point masses are left out, entries of sites too.

    Priors are those that the model has at the posterior median, so that a scale that is itself a latent or a parameter
    is counted as it is now. For a guide from a file, without its model, they are those of its first look at it.

    Args:
        guide: a factorised guide of this library, a fitted :class:`~pyro_dvi.LaplaceGuide`, Pyro's ``AutoNormal``,
            ``AutoDiagonalNormal``, ``AutoMultivariateNormal`` or ``AutoLowRankMultivariateNormal``, or an
            ``AutoGuideList`` of these.

    Raises:
        GuideError: another guide, one that has not seen its model, or one of point masses alone.
    """
    if not isinstance(guide, AutoGuide):
        raise GuideError(
            f"posterior scales are read from automatic guides, not from {_name(guide)}: of an ensemble, "
            "take guide.members[k].guide; of a guide function, read its parameters, as in pyro.get_param_store()"
        )
    check_is_set_up(guide)
    gaussians = list(_gaussians(guide))
    if not gaussians:
        remedy = (
            "call guide.fit(batches, method) first"
            if hasattr(guide, "fit")
            else "train a MeanFieldGuide or AutoNormal, or put a Gaussian around the mode by LaplaceGuide"
        )
        raise GuideError(f"{_name(guide)} is a point mass at every site and has no scales: {remedy}")
    priors = _priors(guide)
    for site, loc, scale, initial, is_learned in gaussians:
        transform = unconstraining_transform(priors[site].support)
        prior, scale = _prior_scale(priors[site], transform, loc), scale.expand_as(loc)
        if not is_learned and not bool(scale.all()):  # of a Laplace fit, some entries of which are fixed
            varies = scale > 0
            prior = None if prior is None else prior.expand_as(loc)[varies]
            loc, scale = loc[varies], scale[varies]
        yield Spread(site, loc.detach(), scale.detach(), prior, initial, transform is None, is_learned)


def scale_snapshot(guide: Any) -> dict[str, Tensor]:
    """Copy the posterior standard deviations of every site, to compare later ones with.

    Args:
        guide: as in :func:`~pyro_dvi.analysis.diagnostics.scale_report`.

    Returns:
        Standard deviations in unconstrained space by site name, on the CPU.

    Raises:
        GuideError: a guide without Gaussians.

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


# The posterior ----------------------------------------------------------------------------------------------------

Gaussian = tuple[str, Tensor, Tensor, Tensor | None, bool]  # site, loc, scale, initial scale, is it learned


def _gaussians(guide: Any) -> Iterator[Gaussian]:
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
    elif isinstance(guide, AutoContinuous) and not isinstance(guide, AutoLaplaceApproximation):
        yield from _joint_gaussian(guide)
    elif isinstance(guide, AutoLaplaceApproximation):
        raise GuideError(
            "AutoLaplaceApproximation is a point mass in training: pass what guide.laplace_approximation(*args) returns"
        )
    elif not isinstance(guide, AutoDelta):
        raise GuideError(
            f"{_name(guide)} is not known to be Gaussian: scales are read from MeanFieldGuide and the other guides of "
            "this library, and from Pyro's AutoNormal, AutoDiagonalNormal and AutoMultivariateNormal"
        )


def _joint_gaussian(guide: Any) -> Iterator[Gaussian]:
    try:
        joint_loc, joint_scale = guide._loc_scale()
    except NotImplementedError as error:
        raise GuideError(
            f"{_name(guide)} is not Gaussian, so its sites have no mean and scale: summarise draws of it instead, as "
            "in to_arviz"
        ) from error
    diagonal = isinstance(guide, (AutoDiagonalNormal, AutoMultivariateNormal))
    start = joint_loc.new_tensor(guide._init_scale) if diagonal else None
    locs, scales = guide._unpack_latent(joint_loc), guide._unpack_latent(joint_scale)
    for (site, loc), (_, scale) in zip(locs, scales, strict=True):
        yield site["name"], loc, scale, start, True


# The prior --------------------------------------------------------------------------------------------------------


def _priors(guide: Any) -> Mapping[str, Any]:
    """Distributions of the latent sites, given the posterior median of those that they depend on."""
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
    """Standard deviation of a prior in unconstrained space: of a Normal there, or of any on the real line."""
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
    try:
        scale.expand_as(loc)
    except RuntimeError:  # of a batch of a plate: its priors are alike, or nearly so
        return scale.nanmedian()
    return scale


def _name(guide: Callable[..., Any]) -> str:
    return getattr(guide, "__name__", type(guide).__name__)
