# SPDX-License-Identifier: Apache-2.0
"""The first run of a model with its guide, to find dependences, missing gradients, and a start at zero."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from pyro.infer.util import is_validation_enabled
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_site_shape
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pyro_dvi.core.autograd_graph import enters, function_of, graph_of
from pyro_dvi.core.distributions import strip_event_dims, tensors_of
from pyro_dvi.core.undisturbed import undisturbed
from pyro_dvi.errors import GuideError, ModelError, warn
from pyro_dvi.gaussians.normals import is_joint
from pyro_dvi.runs.latents import GaussianSite, Latent, unconstraining_transform
from pyro_dvi.runs.observed import observed_sites
from pyro_dvi.runs.posterior_run import Call, PosteriorRun, run_at_means
from pyro_dvi.runs.sites import is_data, is_latent, sites_of

_TYPES = [torch.finfo(t) for t in (torch.float16, torch.bfloat16, torch.float32, torch.float64)]
# Limits of torch's own clamps: eps for probabilities of distributions, tiny for transforms to the unit interval.
_OPEN_INTERVALS = {(low, 1 - t.eps) for t in _TYPES for low in (t.eps, t.tiny)}
# Autograd nodes of functions whose derivative is zero wherever it exists.
_FLAT = {f"{name}Backward{k}" for name in ("Round", "Floor", "Ceil", "Trunc", "Sign") for k in range(2)}
_DRAWS = 8  # from the prior; a single draw is often rounded to the same number as the value of the latent
_UNLIMITED: Any = float("inf")  # the value that Pyro expects, although its annotation is int

# A site, its means (stored in their parameter), and the corresponding weights of the network, if there are any.
Starts = list[tuple[str, Tensor, Tensor | None]]


@dataclass
class Structure:
    """The result of the first run of a model and its guide.

    Attributes:
        sampled: guide sites (or masks of their elements) that set the prior of another latent. They are sampled; fixing
            them at their mean would lose the prior's curvature with respect to them.
        function_names: functions whose autograd nodes lead from the latents to the observed distributions.
        shapes: shape of a draw at each observed site, with the arguments of the first run.
        reached: Gaussian guide sites, and latents that are point masses, that the observed sites depend on.
        joint: Gaussian vectors with covariances among the guide sites, by name.
        starts: means at zero that must be changed before training; see :func:`start_apart`.
    """

    sampled: dict[str, Tensor | bool] = field(default_factory=dict)
    function_names: frozenset[str] = frozenset()
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    reached: frozenset[str] = frozenset()
    joint: dict[str, Any] = field(default_factory=dict)
    starts: Starts = field(default_factory=list)


class FirstRuns:
    """The structures of the models and guides that an objective has met; a copy of the objective starts with none."""

    def __init__(self) -> None:
        # Weak references to guide and model, the functions of bound methods, and the structure.
        self._known: list[tuple[Any, Any, tuple[Any, Any], Structure]] = []

    def __reduce__(self) -> Any:
        return FirstRuns, ()

    def of(self, call: Call, gradients: bool = True) -> tuple[Structure, bool]:
        """Return (structure, is_first_run); later calls for the same pair return the same structure.

        Args:
            call: a model and a guide with their arguments.
            gradients: True to raise an error for a latent that gradients of the likelihood at the means do not reach.
        """
        (model, model_function), (guide, guide_function) = _owner(call.model), _owner(call.guide)
        functions = (guide_function, model_function)
        for guide_ref, model_ref, called, structure in self._known:
            if guide_ref() is guide and model_ref() is model and called == functions:
                return structure, False
        fresh = getattr(call.guide, "prototype_trace", 0) is None
        try:
            with undisturbed():  # an inspection must not change the random numbers of a resumed run
                structure = _look(run_at_means(call), gradients)
        except Exception:
            if fresh:
                call.guide.prototype_trace = None  # so that a corrected call sets the guide up again
            raise
        self._known = [known for known in self._known if known[0]() is not None and known[1]() is not None]
        self._known.append((weakref.ref(guide), weakref.ref(model), functions, structure))
        return structure, True


def _owner(function: Callable) -> tuple[Any, Any]:
    """Return the objects that identify a callable; a bound method itself is a new object at every access."""
    return (function.__self__, function.__func__) if inspect.ismethod(function) else (function, None)


def _look(run: PosteriorRun, gradients: bool) -> Structure:
    observed = observed_sites(run.model_trace)
    log_likelihood = observed.log_likelihood()
    if is_validation_enabled():
        _check_shapes(prune_subsample_sites(run.model_trace))
    refuse_dependent(run.gaussians)
    if gradients:
        check_gradients(run.call, run.model_trace, log_likelihood)
    graph = graph_of(t for site in observed.terms for t in _tensors(site.fn))
    names = frozenset(function_of(node) for node in graph if not _keeps_probabilities(node))
    shapes = {site.name: site.fn.batch_shape + site.fn.event_shape for site in observed.sites}
    points = {latent.name: latent.value for latent in run.latents if latent.source is None}
    reached = reached_by(log_likelihood, {g.name: g.value for g in run.gaussians} | points)
    sampled, starts = _sampled(run.latents), _equal_units(run.latents, log_likelihood)
    joint = {g.name: g.base for g in run.gaussians if is_joint(g.base)}
    for latent in run.latents:
        source: Any = latent.source
        if latent.shared is not None and (latent.transform is not None or source.name in sampled):
            raise GuideError(
                f"in guide site {source.name!r}, latent {latent.name!r} has covariances with other latents. This is "
                f"not supported, because {latent.name!r} is constrained or sets the prior of another latent. Hide it "
                "from this guide with pyro.poutine.block, and add a MeanFieldGuide for it in an AutoGuideList"
            )
    return Structure(sampled, names, shapes, reached, joint, starts)


def _sampled(latents: list[Latent]) -> dict[str, Tensor | bool]:
    """Return guide sites that set the prior of a latent, or masks of their elements.

    Raises:
        GuideError: if a latent and another latent that sets its prior are both point masses.
    """
    sampled: dict[str, Tensor | bool] = {}
    for child in latents:
        for parent in _parents(child, _tensors(child.prior), latents):
            if parent.source is not None:
                name, elements = parent.source.name, parent.elements
                if name in sampled:
                    elements = torch.as_tensor(sampled[name]) | torch.as_tensor(elements)
                sampled[name] = elements
            elif child.source is None and parent in _parents(child, _shape_of(child.prior), latents):
                raise GuideError(
                    f"the joint density of point estimates of {parent.name!r} and {child.name!r} is unbounded, because "
                    f"the first sets the prior of the second: use a variational guide (MeanFieldGuide), integrate "
                    f"{parent.name!r} out, or write {child.name!r} in non-centred form"
                )
    return sampled


def reached_by(log_likelihood: Tensor, values: dict[str, Tensor]) -> frozenset[str]:
    """Return the names of values that gradients of a log-likelihood reach; functions without a slope do not count."""
    sloped = graph_of([log_likelihood], without=_FLAT)
    entered = zip(values.items(), enters(list(values.values()), [log_likelihood]), strict=True)
    return frozenset(
        name for (name, value), enter in entered if enter and get_gradient_edge(value).node in sloped
    )


def check_gradients(call: Call, trace: Any, log_likelihood: Tensor, factorised: bool = True) -> None:
    """Raise an error if the data depend on a latent that the gradients of their likelihood do not reach.

    This is the case if the data depend on the latent only through functions without a slope. The model runs again with
    the values of such latents, and with draws from their priors, which shows whether the likelihood depends on them.

    A latent that no data depend on is ignored unless other latents set its prior. A factorised posterior treats such a
    latent, for example a missing observation, like an observed value, and makes the posterior of its parents too
    narrow.

    Args:
        call: the call of the model.
        trace: the trace of the model's run.
        log_likelihood: the log-likelihood of this run.
        factorised: whether the posterior is factorised.

    Raises:
        ModelError: if there is such a latent; the message names it and the observed sites.
    """
    latents = {site["name"]: site for site in sites_of(trace, is_latent) if site["value"].requires_grad}
    outputs = [log_likelihood, *(t for site in latents.values() for t in _tensors(site["fn"]))]
    sloped = graph_of(outputs, without=_FLAT)
    sloped |= {get_gradient_edge(leaf).node for leaf in outputs if leaf.requires_grad and leaf.is_leaf}
    blind = [name for name, site in latents.items() if get_gradient_edge(site["value"]).node not in sloped]
    # A reentrant checkpoint hides the tensors that its function uses.
    if not blind or any("Checkpoint" in node.name() for node in sloped):
        return
    other, seen = trace.copy(), []
    # The model may fail on draws from the prior.
    with suppress(Exception), undisturbed(), torch.no_grad():
        draws = [{name: latents[name]["fn"].sample() for name in blind} for _ in range(_DRAWS)]
        for values in ({}, *draws):
            for name, value in values.items():
                other.nodes[name] = {**latents[name], "value": value}
            with undisturbed():  # all runs use the same random numbers
                terms = observed_sites(call.trace_model(other)).terms
            # Each row counts, because draws with the same sum are not rare.
            seen.append(torch.cat([term.log_prob(term.value).flatten() for term in terms]))
    if any(not bool(torch.isclose(seen[0], one, 1e-3, 1e-5, equal_nan=True).all()) for one in seen):
        observed = ", ".join(repr(site["name"]) for site in sites_of(trace, is_data))
        raise ModelError(
            f"observed site {observed} depends on latent site {blind[0]!r}, but no gradient of the likelihood reaches "
            "it, because .detach(), .item(), round, floor, argmax or a comparison is in between. Remove this "
            "operation, use a smooth function (sigmoid for a step), or pass gradients on: f + (f.round() - f).detach()"
        )
    for name in blind if factorised else ():
        others = [other for other in latents if other != name]
        found = enters([latents[other]["value"] for other in others], _tensors(latents[name]["fn"]))
        for parent in (other for other, is_parent in zip(others, found, strict=True) if is_parent):
            raise ModelError(
                f"no data depend on latent site {name!r}, whose prior depends on {parent!r}: a factorised posterior "
                f"would treat it like an observed value, and that of {parent!r} would be too narrow. For observations "
                "that are missing, use poutine.mask(mask=...) around pyro.sample instead of its argument obs_mask. "
                "Sample other such sites only for predictions"
            )


def _check_shapes(trace: Any) -> None:
    """Run Pyro's own check that batch shapes agree with plates, which detects a forgotten ``to_event``."""
    try:
        trace.compute_log_prob()
        for site in sites_of(trace, lambda site: site["type"] == "sample"):
            check_site_shape(site, max_plate_nesting=_UNLIMITED)
    except ValueError as error:
        raise ModelError(f"the shapes of the model's sites and plates do not agree: {error}") from error


def refuse_dependent(gaussians: Sequence[GaussianSite]) -> None:
    """Raise an error for a guide in which one Gaussian's parameters are computed from another's value.

    Raises:
        GuideError: if there is such a pair; the message names both sites.
    """
    for site in gaussians:
        others = [other for other in gaussians if other is not site]
        parents = enters([other.value for other in others], [site.loc, site.scale])
        for other, is_parent in zip(others, parents, strict=True):
            if is_parent:
                raise GuideError(
                    f"guide site {site.name!r} depends on the value of {other.name!r}, so the posterior does not "
                    "factorise: let its loc and scale depend only on parameters, or use Pyro's Trace_ELBO"
                )


def _parents(child: Latent, parameters: Iterable[Tensor], latents: list[Latent]) -> list[Latent]:
    """Return latents whose values enter ``parameters`` of the prior of ``child``, according to the autograd graph."""
    others = [latent for latent in latents if latent is not child]
    parents = enters([other.value for other in others], parameters)
    return [other for other, is_parent in zip(others, parents, strict=True) if is_parent]


def _shape_of(prior: Any) -> Iterator[Tensor]:
    """Yield a prior's parameters except a location on the real line, because that cannot make the density unbounded."""
    base = strip_event_dims(prior)
    movable = hasattr(base, "loc") and unconstraining_transform(getattr(base, "support", None)) is None
    return (t for t in _tensors(prior) if not (movable and t is base.loc))


def _tensors(distribution: Any) -> list[Tensor]:
    """Return floating-point tensors among the parameters of a distribution, at any depth of nesting."""
    return [t for t in tensors_of(distribution) if t.is_floating_point()]


def _keeps_probabilities(node: Any) -> bool:
    """Return True if a node is the clamp with which torch keeps probabilities away from zero and one."""
    return (getattr(node, "_saved_min", None), getattr(node, "_saved_max", None)) in _OPEN_INTERVALS


# A start with identical hidden units ----------------------------------------------------------------------------


def _equal_units(latents: Iterable[Any], log_likelihood: Tensor) -> Starts:
    """Return means at zero that make hidden units identical.

    If all weights are zero, gradients vanish in every hidden layer, and in the output layer they are equal for all
    hidden units, so that no training step breaks the symmetry. Linear models have no hidden units.
    """
    zero = [
        latent
        for latent in latents
        if latent.source is not None and latent.loc.requires_grad and latent.value.requires_grad
        if latent.transform is None and not latent.loc.any()
    ]
    if not zero or not log_likelihood.requires_grad:
        return []
    values = [latent.value for latent in zero]
    grads = torch.autograd.grad(log_likelihood, values, allow_unused=True, retain_graph=True)
    starts = [(a.name, a.loc.detach(), getattr(a.prior, "initial_value", None)) for a in zero]
    # If it is unknown whether a latent is a weight, it is treated as one only if it is a matrix: scalars and vectors
    # without a gradient are common in hierarchical models, and harmless.
    for grad, (*_, initial) in zip(grads, starts, strict=True):
        if grad is not None and not grad.any() and (initial is not None or grad.dim() > 1):
            return starts
    return []


def start_apart(starts: Starts) -> None:
    """Break the symmetry of an all-zero start: set the means to the weights of the network, and warn."""
    if not starts or any(mean.any() for _, mean, _ in starts):
        return
    for _, mean, initial in starts:
        if initial is not None:
            mean.copy_(initial)
    warn(
        f"the initial means of the guide are all zero (site {starts[0][0]!r} and {len(starts) - 1} more), so hidden "
        "units are identical, and training can hardly make them different. Means of a converted network have been set "
        "to its weights, as init_loc_fn=init_to_module does; for other latents, pass init_loc_fn=init_to_sample."
    )
