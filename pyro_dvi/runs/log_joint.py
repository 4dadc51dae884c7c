# SPDX-License-Identifier: Apache-2.0
"""Runs of a model at given unconstrained values, with every example counted once; and rescaled distributions."""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro.distributions.util import scale_and_mask, sum_rightmost
from pyro.poutine.messenger import Messenger
from torch import Tensor, distributions as td

from pyro_dvi.core.arguments import check_positive
from pyro_dvi.core.densities import is_of, untransformed
from pyro_dvi.core.distributions import rewrapped, strip_event_dims
from pyro_dvi.errors import ModelError, UnsupportedError
from pyro_dvi.runs.latents import check_shape, not_in_guide, unconstraining_transform
from pyro_dvi.runs.observed import Observed, observed_sites
from pyro_dvi.runs.posterior_run import twice_differentiable
from pyro_dvi.runs.sites import AllRows, SampleTrace, SetLatents, is_latent


@dataclass
class JointRun(Observed):
    r"""One run of the model on one batch.

    Attributes:
        sites: observed sites, scaled so that the sum over the batches of a pass is the log-likelihood of all data.
        factors: ``pyro.factor`` terms, scaled in the same way.
        log_priors: log density of every latent in unconstrained space, including the Jacobian. Add these densities only
            once per pass over the data.
        rows: for every subsampled plate, the number of rows in this batch and the number of rows in the data.
        trace: the model's trace.
    """

    log_priors: dict[str, Tensor]
    rows: dict[str, tuple[int, int]]
    trace: Any
    jacobians: Mapping[str, Tensor]

    @classmethod
    def of(cls, trace: Any, rows: dict[str, tuple[int, int]], jacobians: Mapping[str, Tensor]) -> "JointRun":
        """Return the densities of a run, given its trace and the log Jacobians of its constrained latents."""
        observed = observed_sites(trace)
        for site in observed.terms:
            site.scale = site.scale * site.share  # each row counts once
        log_priors = {
            name: _log_prior(node, jacobians.get(name))
            for name, node in trace.nodes.items()
            if is_latent(node)
        }
        return cls(observed.sites, observed.factors, log_priors, rows, trace, jacobians)

    @property
    def log_prior(self) -> Tensor:
        r""":math:`\log p(u)` of all latents, as a scalar."""
        return torch.stack(list(self.log_priors.values())).sum()

    def rescaled(self, factors: Mapping[str, float]) -> "JointRun":
        """Return the run of the rescaled model at the same values, without running the model; see :class:`Rescaled`."""
        changed = {n: f for n, f in _changed(factors).items() if n in self.trace.nodes}
        if not changed:
            return self
        trace = self.trace.copy()
        for name, factor in changed.items():
            node = trace.nodes[name]
            trace.nodes[name] = {**node, "fn": rescaled(name, node["fn"], factor)}
        return JointRun.of(trace, self.rows, self.jacobians)


def run_joint(model: Callable, args: tuple, kwargs: dict[str, Any], values: Mapping[str, Tensor]) -> JointRun:
    """Run ``model`` with its latents at ``values``.

    Args:
        model: a Pyro model.
        args: positional arguments of the model, which contain one batch.
        kwargs: keyword arguments of the model.
        values: unconstrained value of every latent site.

    Raises:
        ModelError: if nothing is observed; if a site is neither observed nor in ``values``, or has a different shape in
            ``values``; or if ``values`` contains a name that is not a site of the model.
        UnsupportedError: if a latent has one value per row of a subsampled plate.
    """
    with twice_differentiable(), AllRows(), AtUnconstrained(values) as latents:
        model(*args, **kwargs)
    trace = latents.trace
    rows: dict[str, tuple[int, int]] = {}
    for name, node in trace.nodes.items():
        if is_latent(node):
            if name not in values:
                raise ModelError(not_in_guide(name))
            check_shape(node)
        elif node["type"] == "sample" and node["is_observed"]:
            for frame in node["cond_indep_stack"]:
                if frame.vectorized and frame.full_size is not None:
                    rows[frame.name] = (frame.size, frame.full_size)
    unvisited = [name for name in values if name not in trace.nodes]
    if unvisited:
        raise ModelError(
            f"the guide has a site {unvisited[0]!r}, which the model did not sample. Set the guide up with this model "
            "and with observations. The set of latent variables must not depend on the arguments"
        )
    return JointRun.of(trace, rows, latents.jacobians)


class AtUnconstrained(SetLatents, SampleTrace):
    """Set latent sites to unconstrained values, and record the run; other sites do not change.

    Raises:
        UnsupportedError: if a latent has one value per row of a subsampled plate (raised in a run).
    """

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values
        self.jacobians: dict[str, Tensor] = {}

    def _value_of(self, site: Any) -> Tensor | None:
        name, fn = site["name"], site["fn"]
        if name not in self.values:
            return None
        for frame in site["cond_indep_stack"]:
            if frame.full_size is not None and frame.full_size != frame.size:
                raise UnsupportedError(
                    f"site {name!r} has one value per row of the plate {frame.name!r}: pass all data in one batch"
                )
        u = self.values[name]
        transform = unconstraining_transform(fn.support)
        if transform is None:
            return u
        value: Tensor = transform(u)
        log_det = transform.log_abs_det_jacobian(u, value)
        self.jacobians[name] = sum_rightmost(log_det, log_det.dim() - value.dim() + fn.event_dim).sum()
        return value


def _log_prior(node: Any, jacobian: Tensor | None) -> Tensor:
    """Return the log density of the value of a latent, in unconstrained space."""
    term = scale_and_mask(node["fn"].log_prob(node["value"]), node["scale"], node["mask"]).sum()
    return term if jacobian is None else term + jacobian


def log_prior_of_entries(node: Any, entries: Tensor) -> Tensor:
    """Return the log density of some entries of a latent given its other entries, in unconstrained space, as a scalar.

    Args:
        node: the latent in a trace.
        entries: positions of the entries in the flattened site.

    Raises:
        UnsupportedError: if the entries of the site are dependent under the prior.
    """
    fn, value = node["fn"], node["value"]
    base = strip_event_dims(fn)
    if base.event_shape:
        raise UnsupportedError(
            f"the prior of {node['name']!r} ({type(base).__name__}) couples its entries: vary all or none of them"
        )
    mask = torch.zeros(value.numel(), dtype=torch.bool, device=value.device)
    mask = mask.index_fill(0, entries, True).reshape(value.shape)
    log_prob = base.mask(mask).to_event(len(fn.event_shape)).log_prob(value)
    found = scale_and_mask(log_prob, node["scale"], node["mask"]).sum()
    transform = unconstraining_transform(base.support)
    if transform is not None:
        found = found + transform.log_abs_det_jacobian(transform.inv(value), value)[mask].sum()
    return found


# Location-scale distributions, with the name of the parameter that multiplies their spread.
_SCALES: dict[type, str] = {
    td.Normal: "scale",
    td.Laplace: "scale",
    td.StudentT: "scale",
    td.Cauchy: "scale",
    td.MultivariateNormal: "scale_tril",
}


class Rescaled(Messenger):
    """Multiply the scales of sites by constants.

    Args:
        factors: factors by which to multiply the scales of latent or observed sites, by name. Other sites do not
            change, and names that are not in a run are ignored.

    Raises:
        UnsupportedError: if the distribution of a site has no scale that can be multiplied (raised in a run).

    Example:
        >>> import pyro, torch
        >>> def model():
        ...     return pyro.sample("w", dist.Normal(0.0, 2.0), obs=torch.tensor(0.0))
        >>> trace = pyro.poutine.trace(Rescaled({"w": 0.5})(model)).get_trace()
        >>> trace.nodes["w"]["fn"].scale
        tensor(1.)
    """

    def __init__(self, factors: Mapping[str, float]) -> None:
        super().__init__()
        self.factors = dict(factors)

    def _pyro_sample(self, msg: Any) -> None:
        factor = self.factors.get(msg["name"])
        if factor is not None:
            msg["fn"] = rescaled(msg["name"], msg["fn"], factor)


def rescaled_model(model: Callable[..., Any], factors: Mapping[str, float]) -> Callable[..., Any]:
    """Return the model with multiplied scales, or the model itself if no scale changes.

    Raises:
        ArgumentError: if a factor is not a positive number.
    """
    changed = _changed(factors)
    if not changed:
        return model
    # As in Pyro's own handlers, to keep the signature.
    return functools.update_wrapper(Rescaled(changed)(model), model, assigned=(), updated=())


def _changed(factors: Mapping[str, float]) -> dict[str, float]:
    """Return the factors that are not 1, after checking that all are positive numbers."""
    for name, factor in factors.items():
        scalar = torch.is_tensor(factor) and factor.numel() == 1
        check_positive(f"scale_factors[{name!r}]", float(factor) if scalar else factor)
    return {name: factor for name, factor in factors.items() if factor != 1}


def scale_name(fn: Any) -> str | None:
    """Return the name of the scale of a distribution, or None if it has no scale that can be multiplied."""
    fn = untransformed(fn)  # what a factor does inside a transform depends on the transform
    return next((name for family, name in _SCALES.items() if is_of(fn, family)), None)


def rescaled(site: str, fn: Any, factor: float) -> Any:
    """Return a distribution with its scale multiplied by a factor.

    Args:
        site: name of the distribution's site, for the error message.
        fn: the distribution.
        factor: factor by which to multiply the scale.

    Raises:
        UnsupportedError: if the distribution has no scale that can be multiplied.
    """
    name = scale_name(fn)
    if name is None:
        raise UnsupportedError(
            f"the distribution of site {site!r} is {type(fn).__name__}, whose scale cannot be multiplied (only Normal, "
            "MultivariateNormal, StudentT, Laplace and Cauchy): compare models with different scales"
        )

    def replaced(base: Any) -> Any:
        given = {"loc": base.loc, name: getattr(base, name) * factor}
        if isinstance(base, td.StudentT):
            given["df"] = base.df
        return getattr(dist, type(base).__name__, type(base))(**given, validate_args=False)

    return rewrapped(fn, replaced)
