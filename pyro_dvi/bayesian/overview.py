# SPDX-License-Identifier: Apache-2.0
"""``summary``: a table of the latent sites with their priors, starts and posteriors."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.nn.module import PyroModule
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_dvi.bayesian.conversion import posterior_means
from pyro_dvi.bayesian.converted import SitePrior, TiedPrior
from pyro_dvi.bayesian.prior_scales import ScalePrior
from pyro_dvi.bayesian.priors import described
from pyro_dvi.core.table import Columns, Report
from pyro_dvi.core.undisturbed import undisturbed
from pyro_dvi.errors import ArgumentError, ModelError
from pyro_dvi.runs.sites import is_data, is_factor, is_latent, sites_of


@dataclass(frozen=True)
class SiteSummary:
    """One latent site.

    Args:
        name: name of the site.
        shape: its shape.
        prior: its prior in words; ``scale varies`` marks a parameter that is learned or set by another latent.
        start: root mean square of the module's own weights, where there are any.
        mean: root mean square of the posterior means.
        scale: mean of the posterior standard deviations.
    """

    name: str
    shape: tuple[int, ...]
    prior: str
    start: float | None = None
    mean: float | None = None
    scale: float | None = None

    @property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Summary(Report):
    """What :func:`summary` returns; ``print`` shows it as a table.

    Args:
        sites: the latent sites in the order of the model.
        tied: sites that repeat another one -> the site that they repeat.
        deterministic: number of entries in ordinary parameters.
        observed: names of the observed sites; known if the model was run.
    """

    sites: tuple[SiteSummary, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    deterministic: int = 0
    observed: tuple[str, ...] = ()

    @property
    def latent(self) -> int:
        """Number of latent weights."""
        return sum(site.size for site in self.sites)

    def _shown(self) -> list[Any]:
        titles = ["site", "shape", "prior", "weights", "start rms"]
        if any(site.mean is not None for site in self.sites):
            titles += ["mean rms", "scale"]
        rows = []
        for site in self.sites:
            numbers = ["-" if v is None else f"{v:.4g}" for v in (site.start, site.mean, site.scale)]
            shape = "×".join(map(str, site.shape)) or "scalar"
            rows.append([site.name, shape, site.prior, f"{site.size:,}", *numbers][: len(titles)])
        rows += [[name, "", f"= {owner}", *[""] * (len(titles) - 3)] for name, owner in self.tied.items()]
        sites = f"{self.latent:,} latent weights in {len(self.sites)} sites"
        seen = f"; observed: {', '.join(self.observed)}" if self.observed else ""
        return [Columns(titles, rows, names=3), f"{sites}; {self.deterministic:,} deterministic{seen}"]


def summary(model_or_net: Any, guide: Any = None, *args: Any, **kwargs: Any) -> Summary:
    """List the latent sites of a model: shapes, priors, starting values, and the posterior's scales.

    Without model arguments, the parameters that ``to_bayesian_`` converted are listed. With them, the model
    is run once, without touching its statistics or the random state, and every latent site is listed, your
    own as well.

    Args:
        model_or_net: a converted network, or a model.
        guide: adds what a trained guide has learned: anything with ``median()``, and with ``quantiles(qs)``
            for scales.
        args: arguments of the model.
        kwargs: arguments of the model.

    Returns:
        A table that can be printed. Its scale is half the distance between the 16 % and the 84 % quantile,
        the standard deviation of a Normal, averaged over a site's weights.

    Raises:
        ModelError: if there is nothing to list.
        ArgumentError: if the second argument is no guide.
        GuideError: if the guide has not been run yet.

    Example:
        >>> from pyro_dvi.bayesian import fan_in, to_bayesian_
        >>> net = to_bayesian_(
        ...     nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2)), prior_scale=fan_in
        ... )
        >>> table = summary(net)
        >>> table.latent, table.deterministic
        (18, 4)
        >>> table.sites[0].prior
        'Normal(0, 0.5)'
    """
    if isinstance(guide, torch.Tensor) or (guide is not None and not hasattr(guide, "median")):
        raise ArgumentError(
            f"the second argument of summary is a guide with median(), got {type(guide).__name__}: "
            "summary(model, None, x, y) lists a model before there is one"
        )
    # A model whose priors are the posterior of an earlier task knows their sites, and wraps the model.
    replaced = model_or_net.priors() if callable(getattr(model_or_net, "priors", None)) else {}
    inner = model_or_net.model if replaced else model_or_net
    module = inner if isinstance(inner, nn.Module) else None
    known, tied = _converted(module) if module is not None else ({}, {})
    observed: tuple[str, ...] = ()
    sites = known
    if args or kwargs or module is None:
        sites, observed = _traced(model_or_net, known, *args, **kwargs)
    if not sites:
        raise ModelError(
            "there are no latent sites to list: convert the network with to_bayesian_, or pass the model's arguments, "
            "summary(model, guide, x, y)"
        )
    rows = [
        replace(site, prior="earlier posterior") if name in replaced else site for name, site in sites.items()
    ]
    if guide is not None:
        rows = _with_posterior(rows, guide)
    deterministic = sum(parameter.numel() for parameter in module.parameters()) if module is not None else 0
    return Summary(tuple(rows), tied, deterministic, observed)


def _converted(root: nn.Module) -> tuple[dict[str, SiteSummary], dict[str, str]]:
    """List what the modules declare, in their order."""
    sites: dict[str, SiteSummary] = {}
    ties: dict[str, tuple[nn.Module, str]] = {}
    names: dict[tuple[int, str], str] = {}
    for path, module in root.named_modules():
        if not isinstance(module, PyroModule):
            continue
        prefix = module._pyro_name or path
        for attribute, prior in module._pyro_samples.items():
            name = f"{prefix}.{attribute}" if prefix else attribute
            if isinstance(prior, TiedPrior):
                ties[name] = (prior.owner, prior.owner_attribute)
            elif isinstance(prior, SitePrior):
                value = prior.shown_value(module)
                names[id(module), attribute] = name
                sites[name] = SiteSummary(name, tuple(value.shape), prior.text, start=_rms(value))
            elif isinstance(prior, ScalePrior):
                sites[name] = SiteSummary(name, (), described(prior.given))
    return sites, {name: names.get((id(owner), part), part) for name, (owner, part) in ties.items()}


def _traced(
    model: Any, known: Mapping[str, SiteSummary], *args: Any, **kwargs: Any
) -> tuple[dict[str, SiteSummary], tuple[str, ...]]:
    """Run the model once and list its latent and observed sites."""
    # Gradients show which priors depend on other sites.
    with torch.enable_grad(), undisturbed(), poutine.block(), _Tracked():
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    sites = {
        site["name"]: known.get(site["name"])
        or SiteSummary(site["name"], tuple(site["value"].shape), described(site["fn"]))
        for site in sites_of(trace, is_latent)
    }
    observed = sites_of(trace, lambda site: is_data(site) or is_factor(site))
    return sites, tuple(site["name"] for site in observed)


@torch.no_grad()
def _with_posterior(rows: list[SiteSummary], guide: Any) -> list[SiteSummary]:
    means = posterior_means(guide)
    quantiles: Mapping[str, Any] = {}
    if callable(getattr(guide, "quantiles", None)):
        quantiles = guide.quantiles([0.15865525, 0.84134475])
    # abs: a decreasing transform, such as that of an upper bound, swaps the two
    scales = {name: float((high - low).abs().mean() / 2) for name, (low, high) in quantiles.items()}
    found = {row.name: _rms(means[row.name]) for row in rows if row.name in means}
    return [replace(row, mean=found.get(row.name), scale=scales.get(row.name)) for row in rows]


def _rms(value: Tensor) -> float:
    return float(value.detach().cpu().double().square().mean().sqrt()) if value.numel() else 0.0


class _Tracked(Messenger):
    """Track the latent values of a run for differentiation; a copy may be written in place."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if is_latent(msg) and msg["value"].is_floating_point():
            msg["value"] = msg["value"].detach().requires_grad_().clone()
