# SPDX-License-Identifier: Apache-2.0
"""``summary``: a table of the latent sites, with their priors, initial values and posteriors."""

import math
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.distributions.torch_distribution import TorchDistributionMixin
from pyro.nn.module import PyroModule
from pyro.poutine.messenger import Messenger
from torch import Tensor, nn

from pyro_dvi.bayesian.conversion import posterior_means
from pyro_dvi.bayesian.converted import DistributionPrior, ScaleMixturePrior, TiedPrior
from pyro_dvi.bayesian.priors import ScalePrior
from pyro_dvi.core.table import Table
from pyro_dvi.core.undisturbed import undisturbed
from pyro_dvi.errors import ArgumentError
from pyro_dvi.runs.sites import is_latent, sites_of

Row = dict[str, Any]


def summary(model_or_net: Any, guide: Any = None, *args: Any, **kwargs: Any) -> Table:
    """List the latent sites of a model with shapes, priors, initial values and posterior scales.

    Without model arguments, the table lists the parameters that ``to_bayesian_`` converted. With model arguments, the
    model runs once, without changing its batch-norm statistics or the random state, and the table lists every latent
    site, including your own.

    Args:
        model_or_net: a converted network, or a model.
        guide: a trained guide, which adds columns for the posterior. It needs the method ``median()``, and for the
            scales also ``quantiles(qs)``.
        args: arguments of the model.
        kwargs: arguments of the model.

    Returns:
        A printable table with the columns ``site``, ``shape``, ``prior`` (a prior parameter that is learned or depends
        on another latent is shown as ``varies``), ``weights`` (their number; zero if a site repeats another site) and
        ``start_rms``, the root mean square of the module's weights. With a guide, the table also has the columns
        ``mean_rms``, the root mean square of the posterior means, and ``scale``, half the distance between the 16 % and
        the 84 % quantiles (the standard deviation of a Normal), averaged over the weights of a site. Missing numbers
        are NaN.

    Raises:
        ModelError: if there is nothing to list.
        ArgumentError: if the second argument is not a guide.
        GuideError: if the guide is not initialised.

    Example:
        >>> from pyro_dvi.bayesian import fan_in, to_bayesian_
        >>> net = nn.Sequential(nn.Linear(8, 2), nn.BatchNorm1d(2))
        >>> _ = nn.init.constant_(net[0].weight, 0.3), nn.init.zeros_(net[0].bias)
        >>> print(summary(to_bayesian_(net, prior_scale=fan_in)))
        Latent sites
        <BLANKLINE>
        site      shape  prior                     weights  start rms
        -------------------------------------------------------------
        0.weight  2×8    Normal(loc=0, scale=0.5)       16        0.3
        0.bias    2      Normal(loc=0, scale=1)          2          0
        <BLANKLINE>
        18 latent weights, 4 deterministic parameters
    """
    if isinstance(guide, torch.Tensor) or (guide is not None and not hasattr(guide, "median")):
        raise ArgumentError(
            f"the guide of summary must have median(), got {type(guide).__name__}: call summary(model, None, x, y)"
        )
    # A model from guide.as_prior() wraps the original model and lists the sites with new priors.
    replaced = model_or_net.priors() if callable(getattr(model_or_net, "priors", None)) else {}
    inner = model_or_net.model if replaced else model_or_net
    module = inner if isinstance(inner, nn.Module) else nn.Module()
    rows = _converted(module)
    if args or kwargs or inner is not module:
        rows = _traced(model_or_net, *args, **kwargs) | rows
    for name in replaced:
        rows[name]["prior"] = "earlier posterior"
    formats = {"site": "", "shape": "", "prior": "", "weights": ",", "start_rms": ".4g"}
    if guide is not None:
        _add_posterior(rows, guide)
        formats |= {"mean_rms": ".4g", "scale": ".4g"}
    latent = sum(row["weights"] for row in rows.values())
    fixed = sum(parameter.numel() for parameter in module.parameters())
    return Table(
        "Latent sites",
        tuple(rows.values()),
        formats,
        f"{latent:,} latent weights, {fixed:,} deterministic parameters",
    )


def _row(name: str, shape: torch.Size, prior: str, start: Tensor | None = None) -> Row:
    shown = "×".join(map(str, shape)) or "scalar"
    rms = math.nan if start is None else _rms(start)
    return {"site": name, "shape": shown, "prior": prior, "weights": shape.numel(), "start_rms": rms}


def _converted(root: nn.Module) -> dict[str, Row]:
    """List the priors that the modules declare, in order."""
    rows: dict[str, Row] = {}
    names: dict[tuple[int, str], str] = {}
    for path, module in root.named_modules():
        if not isinstance(module, PyroModule):
            continue
        prefix = module._pyro_name or path
        for attribute, prior in module._pyro_samples.items():
            name = names[id(module), attribute] = f"{prefix}.{attribute}" if prefix else attribute
            if isinstance(prior, ScalePrior):
                rows[name] = _row(name, prior.given.shape(), described(prior.given))
            elif isinstance(prior, TiedPrior):
                owner = names.get((id(prior.owner), prior.owner_attribute), prior.owner_attribute)
                rows[name] = _row(name, torch.Size(), f"= {owner}") | {"shape": "", "weights": 0}
            elif isinstance(prior, ScaleMixturePrior):
                value = prior.shown_value(module)
                rows[name] = _row(name, value.shape, f"Normal(0, {prior.unit:.4g}·{prior.scale_name})", value)
            elif isinstance(prior, DistributionPrior):
                value = prior.shown_value(module)
                rows[name] = _row(name, value.shape, described(prior.given), value)
    return rows


def _traced(model: Any, *args: Any, **kwargs: Any) -> dict[str, Row]:
    """Run the model once and list its latent sites."""
    # Gradients show which priors depend on other sites.
    with torch.enable_grad(), undisturbed(), poutine.block(), _Tracked():
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return {
        site["name"]: _row(site["name"], site["value"].shape, described(site["fn"]))
        for site in sites_of(trace, is_latent)
    }


@torch.no_grad()
def _add_posterior(rows: dict[str, Row], guide: Any) -> None:
    means = posterior_means(guide)
    # Half the width of the central 68 % interval; point estimates have none.
    read = getattr(guide, "quantiles", None)
    quantiles = read([0.15865525, 0.84134475]) if callable(read) else {}
    for name, row in rows.items():
        low, high = quantiles.get(name, (math.nan, math.nan))
        # abs: a decreasing transform, such as the transform for an upper bound, swaps the quantiles
        row["scale"] = float(torch.as_tensor(high - low).abs().mean() / 2)
        row["mean_rms"] = _rms(means[name]) if name in means else math.nan


def _rms(value: Tensor) -> float:
    return float(value.detach().cpu().double().square().mean().sqrt()) if value.numel() else 0.0


class _Tracked(Messenger):
    """Track the latent values of a run for differentiation, as copies that allow in-place operations."""

    def _pyro_post_sample(self, msg: Any) -> None:
        if is_latent(msg) and msg["value"].is_floating_point():
            msg["value"] = msg["value"].detach().requires_grad_().clone()


def described(distribution: TorchDistributionMixin) -> str:
    """Return a short text such as ``Laplace(loc=0, scale=1)``.

    A parameter that is learned, or depends on another site, is shown as ``varies`` without its current value.
    """
    inner = distribution
    while hasattr(inner, "base_dist") and type(inner).__name__ in ("Independent", "ExpandedDistribution"):
        inner = inner.base_dist
    parts = []
    for name in getattr(inner, "arg_constraints", {}):
        # Skip the second, lazily computed parameterisation (logits for probs).
        known = name in vars(inner) or isinstance(getattr(type(inner), name, None), property)
        value = getattr(inner, name) if known else None
        if isinstance(value, Tensor) and value.requires_grad:
            parts.append(f"{name} varies")
        elif isinstance(value, Tensor):
            same = value.numel() > 0 and bool((value == value.flatten()[0]).all())
            shape = "×".join(map(str, value.shape))
            parts.append(f"{name}={value.flatten()[0].item():.4g}" if same else f"{name}={shape} values")
    if not parts and isinstance(base := vars(inner).get("base_dist"), TorchDistributionMixin):
        parts = [described(base)]
    return f"{type(inner).__name__}({', '.join(parts)})"
