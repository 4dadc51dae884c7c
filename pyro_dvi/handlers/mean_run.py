# SPDX-License-Identifier: Apache-2.0
"""One run of guide and model at the posterior mean, with everything an ELBO reads from it."""

import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pyro.poutine as poutine
import torch
from pyro.infer.util import is_validation_enabled
from pyro.poutine.util import prune_subsample_sites
from pyro.util import check_site_shape
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from pyro_dvi.bayesian.placement import tensors_of
from pyro_dvi.errors import DataError, DeviceError, GuideError, ModelError, PyroDviError
from pyro_dvi.handlers.latents import Latent, match_latents, unconstraining_transform, vector_elements
from pyro_dvi.handlers.means import GaussianSite, PosteriorMeans, strip_event_dims
from pyro_dvi.handlers.observed import checked_log_likelihood, observed_sites
from pyro_dvi.undisturbed import preserve_buffers, undisturbed

__all__ = ["MeanRun", "Structure", "run_at_means", "structure_of"]


@dataclass
class Structure:
    """What the first run showed of a model and its guide.

    Attributes:
        sampled: guide sites (or masks of their elements) that set the prior of another latent. They are sampled,
            never fixed at their mean, which would lose the prior's curvature in them.
        function_names: names of the autograd nodes that lead from the latents to the observed distributions.
    """

    sampled: dict[str, Tensor | bool] = field(default_factory=dict)
    function_names: frozenset[str] = frozenset()


@dataclass
class MeanRun:
    """The traces of one run at the means.

    Attributes:
        model_trace: the model's trace; its observed sites carry the likelihood.
        latents: every latent site with its posterior marginal.
        gaussians: the guide's Gaussian sites that stand at their mean, wholly or in part.
        recorder: the context in which the model ran.
    """

    guide_trace: Any
    model_trace: Any
    latents: list[Latent]
    gaussians: list[GaussianSite]
    recorder: Any


def run_at_means(
    model: Callable,
    guide: Callable,
    args: tuple,
    kwargs: dict,
    sampled: dict[str, Tensor | bool] | None = None,
    recorder: Callable[[list[Tensor | None]], AbstractContextManager[Any]] | None = None,
) -> MeanRun:
    """Run the guide at its means, then the model with those values.

    Args:
        model: a Pyro model.
        guide: a guide of factorised Gaussians and point masses.
        args: positional arguments of both.
        kwargs: keyword arguments of both.
        sampled: see :class:`Structure`.
        recorder: given the values that the model will use, returns the context in which it runs.

    Raises:
        GuideError: the guide is not a factorised Gaussian.
        ModelError: a latent site is missing in the guide.
        DeviceError: data and parameters live on different devices.
        DataError: the model fails on data that hold NaN.
    """
    means = PosteriorMeans(sampled=sampled or {})
    # A guide that has not seen the model yet runs it to look at its sites.
    fresh = getattr(guide, "prototype_trace", 0) is None
    explained = _explained_errors(model, means.gaussians, args, kwargs)
    with explained, preserve_buffers() if fresh else nullcontext(), means:
        guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
    expanded = [g for g in means.gaussians.values() if g.sampled is not True]
    context = nullcontext() if recorder is None else recorder([_used_value(g, guide_trace) for g in expanded])
    attention = nullcontext() if recorder is None else twice_differentiable()
    with _explained_errors(model, means.gaussians, args, kwargs), attention, context:
        model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
    latents = match_latents(model_trace, guide_trace, means.gaussians, guide)
    return MeanRun(guide_trace, model_trace, latents, expanded, context)


def twice_differentiable() -> AbstractContextManager[Any]:
    """Attention without fused kernels, which have no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


def _used_value(gaussian: GaussianSite, guide_trace: Any) -> Tensor | None:
    """The tensor object that the model will compute with, if it is the mean itself or a plain view of it."""
    site = guide_trace.nodes.get(gaussian.name.removesuffix("_unconstrained"))
    value = None if site is None else site["value"]
    if torch.is_tensor(value) and value.shape == gaussian.value.shape:
        return value if value.data_ptr() == gaussian.value.data_ptr() else None
    return None


@contextmanager
def _explained_errors(
    model: Callable, gaussians: dict[str, GaussianSite], args: tuple, kwargs: dict
) -> Iterator[None]:
    """Say what is wrong with the data where the model merely stumbles over them."""
    try:
        yield
    except PyroDviError:
        raise
    except (RuntimeError, ValueError) as error:
        named = [(f"argument {k + 1}", v) for k, v in enumerate(args)] + list(kwargs.items())
        tensors = [(name, v) for name, v in named if torch.is_tensor(v)]
        owned = [*model.parameters(), *model.buffers()] if isinstance(model, nn.Module) else []
        parameters = {t.device.type for t in (*owned, *(g.value for g in gaussians.values()))}
        data = {v.device.type for _, v in tensors}
        if len(data | parameters) > 1:
            raise DeviceError(
                f"the data are on {sorted(data)} but the posterior is on {sorted(parameters) or 'the default device'}: "
                "move both to one device, e.g. x.to(device), model.to(device), and build the guide after moving the "
                "model"
            ) from error
        for name, v in tensors:
            if v.is_floating_point() and not bool(torch.isfinite(v).all()):
                raise DataError(
                    f"{name} of the model holds NaN or infinite values, on which the model fails: drop those rows, or "
                    "replace the values"
                ) from error
        if "Shape mismatch inside plate" in str(error):
            raise ModelError(
                f"{str(error).splitlines()[0]}: dimensions of a site that do not belong to a plate need .to_event(n)"
            ) from error
        raise


_UNLIMITED: Any = float("inf")  # Pyro's way to say so, though it annotates an int

# What the first run shows --------------------------------------------------------------------------------------

# Weak references to the guide and the model, the functions that they call (for bound methods), what was seen.
_STRUCTURES: list[tuple[Any, Any, tuple[Any, Any], Structure]] = []


def _owner(function: Callable) -> tuple[Any, Any]:
    """The object to remember a callable by: a bound method is a new object at every access."""
    return (function.__self__, function.__func__) if inspect.ismethod(function) else (function, None)


def structure_of(model: Callable, guide: Callable, args: tuple, kwargs: dict) -> tuple[Structure, bool]:
    """Look at a model and guide once; later calls for the same pair return the same answer.

    Returns:
        the structure, and whether this was the first look.
    """
    (model_owner, model_function), (guide_owner, guide_function) = _owner(model), _owner(guide)
    functions = (guide_function, model_function)
    for guide_ref, model_ref, called, structure in _STRUCTURES:
        if guide_ref() is guide_owner and model_ref() is model_owner and called == functions:
            return structure, False
    fresh = getattr(guide, "prototype_trace", 0) is None
    try:
        with undisturbed():  # a look must not shift the random numbers of a resumed run
            run = run_at_means(model, guide, args, kwargs)
            structure = _look(run, guide)
    except Exception:
        if fresh:
            guide.prototype_trace = None  # type: ignore[attr-defined]  # look again when the call is corrected
        raise
    _STRUCTURES[:] = [known for known in _STRUCTURES if known[0]() is not None and known[1]() is not None]
    _STRUCTURES.append((weakref.ref(guide_owner), weakref.ref(model_owner), functions, structure))
    return structure, True


def _look(run: MeanRun, guide: Callable) -> Structure:
    sites, factors = observed_sites(run.model_trace)
    for site in (*sites, *factors):
        checked_log_likelihood(site)
    if is_validation_enabled():
        _check_shapes(prune_subsample_sites(run.model_trace))
    _refuse_dependent(run.gaussians)
    by_name = {g.name: g for g in run.gaussians}
    sampled: dict[str, Tensor | bool] = {}
    for child in run.latents:
        for parent in _parents(child, _tensors(child.prior), run.latents):
            if parent.source is None:
                if child.source is None and any(
                    p is parent for p in _parents(child, _shape_of(child.prior), run.latents)
                ):
                    raise GuideError(
                        f"a point estimate of both {parent.name!r} and {child.name!r} is unbounded: the first sets "
                        f"the prior of the second, so the density grows without limit as both shrink together. "
                        f"Use a variational guide (MeanFieldGuide), integrate {parent.name!r} out, or write "
                        f"{child.name!r} non-centred."
                    )
                continue
            elements = vector_elements(guide, by_name, parent.name)
            old = sampled.get(parent.source.name, False)
            both = elements if old is False else torch.as_tensor(old) | torch.as_tensor(elements)
            sampled[parent.source.name] = both
    roots = [
        node["fn"]
        for node in run.model_trace.nodes.values()
        if node["type"] == "sample" and node["is_observed"]
    ]
    return Structure(sampled, frozenset(_function_names([t for fn in roots for t in _tensors(fn)])))


def _check_shapes(trace: Any) -> None:
    """Pyro's own check that batch shapes agree with plates; a forgotten ``to_event`` is found here."""
    try:
        trace.compute_log_prob()
        for site in trace.nodes.values():
            if site["type"] == "sample":
                check_site_shape(site, max_plate_nesting=_UNLIMITED)
    except ValueError as error:
        raise ModelError(f"the shapes of the model's sites and plates do not agree: {error}") from error


def _refuse_dependent(gaussians: list[GaussianSite]) -> None:
    for site in gaussians:
        others = [other for other in gaussians if other is not site]
        moments = [t for t in (site.loc, site.scale) if t.grad_fn is not None]
        if not others or not moments:
            continue
        grads = torch.autograd.grad(
            [m.sum() for m in moments], [o.value for o in others], allow_unused=True, retain_graph=True
        )
        for other, grad in zip(others, grads, strict=True):
            if grad is not None:
                raise GuideError(
                    f"guide site {site.name!r} depends on the value of {other.name!r}, so the posterior does not "
                    "factorise. Let its loc and scale depend on parameters only, or use Pyro's Trace_ELBO."
                )


def _parents(child: Latent, parameters: Iterable[Tensor], latents: list[Latent]) -> list[Latent]:
    """Latents whose value enters ``parameters`` of the prior of ``child``, seen in their autograd graph."""
    parameters = [t for t in parameters if t.requires_grad]
    others = [latent for latent in latents if latent is not child and latent.value.requires_grad]
    if not parameters or not others:
        return []
    grads = torch.autograd.grad(
        [p.sum() for p in parameters], [o.value for o in others], allow_unused=True, retain_graph=True
    )
    return [other for other, grad in zip(others, grads, strict=True) if grad is not None]


def _shape_of(prior: Any) -> Iterator[Tensor]:
    """Parameters of a prior but for its location on the real line, which cannot make its density unbounded."""
    base = strip_event_dims(prior)
    movable = (
        unconstraining_transform(getattr(base, "support", None)) is None if hasattr(base, "loc") else False
    )
    location = base.loc if movable else None
    return (t for t in _tensors(prior) if t is not location)


def _tensors(distribution: Any) -> list[Tensor]:
    """Floating-point tensors among the parameters of a distribution, however nested."""
    return [t for t in tensors_of(distribution) if t.is_floating_point()]


def _function_names(roots: list[Tensor]) -> Iterator[str]:
    stack = [t.grad_fn for t in roots if t.grad_fn is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        yield type(node).__name__
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
