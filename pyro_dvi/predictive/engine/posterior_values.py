# SPDX-License-Identifier: Apache-2.0
"""Latent values of a posterior for predictions, from a guide of any library or from a function.

A guide may define how to predict with it, with any of these attributes:

- ``prediction_rule``: a rule or the name of one;
- ``predicted_model(model)``: returns the model with its tuned scales;
- ``example_latents()``: returns values with which the model can be inspected;
- ``linearised(inputs, read, link)``: returns the Gaussian of the model's outputs;
- ``factorised``: the posterior as a guide of independent Gaussians, or None if it is not a factorised Gaussian;
- ``check_model(model)``: raises an error for a model other than the fitted one;
- ``members``: for an ensemble, a tuple of ``TrainedPosterior`` with equal weights, each with its model.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoCallable, AutoGuide
from torch import Tensor, distributions as td, nn

from pyro_dvi.core.arguments import with_missing
from pyro_dvi.core.recorder import is_recording
from pyro_dvi.core.undisturbed import reseeded
from pyro_dvi.errors import GuideError, NonFiniteError
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.runs.explained import non_finite
from pyro_dvi.runs.latents import Marginals
from pyro_dvi.runs.posterior_run import Call, PosteriorMeans
from pyro_dvi.runs.sites import AllRows, SetLatents, is_latent
from pyro_dvi.runs.structure import refuse_dependent
from pyro_dvi.training.ensemble import MEMBER, TrainedPosterior
from pyro_dvi.training.parameter_checks import check_still_own


def check_posterior(model: Callable[..., Any], guide: Callable[..., Any], inputs: tuple[Any, ...]) -> None:
    """Check that model and guide can predict.

    Args:
        model: the Pyro model.
        guide: its guide; a loaded guide that has not been set up is set up with ``inputs``.
        inputs: arguments of the model for the first batch.

    Raises:
        GuideError: if the guide was never run, or belongs to another model.
        NonFiniteError: if parameters or running statistics contain NaN or infinities, or another buffer contains NaN.
    """
    check_is_set_up(guide, inputs)
    if not members_of(guide):  # each member is checked in its own parameter store
        check_still_own(model, guide)
    for part in (guide, model):
        tensors = [*part.named_parameters(), *part.named_buffers()] if isinstance(part, nn.Module) else []
        bad = non_finite(dict(tensors))
        if bad:
            raise NonFiniteError(
                f"{', '.join(map(repr, bad[:5]))} of {type(part).__name__} {'is' if len(bad) == 1 else 'are'} not "
                "finite: training has diverged, or a file is damaged. Load an earlier checkpoint"
            )
    if hasattr(guide, "check_model"):
        guide.check_model(model)
    for member in members_of(guide):
        with member.in_store():
            check_posterior(member.model, member.guide, inputs)


def members_of(guide: Any) -> tuple[TrainedPosterior, ...]:
    """Return the members of an ensemble; empty for any other guide."""
    found = getattr(guide, "members", ())
    return found if isinstance(found, tuple) and all(isinstance(m, TrainedPosterior) for m in found) else ()


def check_is_set_up(guide: Any, inputs: tuple[Any, ...] = ()) -> None:
    """Raise an error for an automatic guide that has not been set up; a loaded guide of this library is set up here.

    Raises:
        GuideError: if the guide has not been set up. It cannot be set up now: without observations, the response would
            become a latent site, and latent values of single examples may have been learnt for other examples.
    """
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        known = isinstance(guide, FactorisedGuide) and inputs
        if not (known and guide.initialize_loaded(*_arguments(guide, inputs))):
            raise GuideError(
                f"{type(guide).__name__} is not initialised: train it, or call guide(x, y) once with the training data "
                "(also after load_state_dict). To load a checkpoint, use load(..., example=batch)"
            )


def predicted_model(guide: Any, model: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``guide.predicted_model(model)`` if the guide has this method, else ``model``."""
    return guide.predicted_model(model) if hasattr(guide, "predicted_model") else model


def example_latents(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return values with which the model can be inspected, from ``guide.example_latents()`` or else from a draw.

    For an ensemble, they are the values of the first member.
    """
    for member in members_of(guide)[:1]:
        with member.in_store():
            return of_member(0, example_latents(member.guide, inputs))
    check_is_set_up(guide, inputs)
    own: Any = getattr(guide, "example_latents", None)
    return one_draw(guide, inputs) if own is None else own()


def of_member(place: int, latents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the latent values of a member as latent values of the ensemble, which include the member's index."""
    return {MEMBER: torch.tensor(place, device="cpu"), **latents}


def posterior_mean(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the value of every latent site at the guide's centre: its ``median``, or else the mean of each site.

    Raises:
        GuideError: if a site of the guide has no mean, or the guide was never set up.
    """
    check_is_set_up(guide)
    if isinstance(guide, AutoGuide):
        try:
            return {name: value.detach() for name, value in guide.median(*_arguments(guide, inputs)).items()}
        except NotImplementedError as error:
            raise GuideError(f"{type(guide).__name__} has no median: use method=Samples(30)") from error
    with _AtCentre():
        return one_draw(guide, inputs)


def posterior_gaussians(guide: Any, inputs: tuple[Any, ...]) -> tuple[dict[str, Tensor], Marginals]:
    """Return the centre of every latent site, and the marginal Gaussians of the guide.

    Raises:
        GuideError: if the guide is not a factorised Gaussian, or has not been set up.
    """
    check_is_set_up(guide)
    factorised = getattr(guide, "factorised", guide)
    if factorised is None:
        raise GuideError(
            f"the posterior of this {type(guide).__name__} is not a factorised Gaussian: predict with Samples(30), a "
            "LaplaceGuide with Linearised() or after fitting Diagonal(), an ensemble by its guide.members[k].guide"
        )
    with torch.enable_grad(), AllRows():
        means = Call(factorised, factorised, _arguments(guide, inputs)).run_guide(PosteriorMeans())
        refuse_dependent(list(means.gaussians.values()))
    return _latents(means.trace), means.marginals


def one_draw(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the latent values of one draw, with random numbers from the global generator."""
    return _latents(_traced(guide, inputs))


def seeded_draws(guide: Any, inputs: tuple[Any, ...], count: int) -> Iterator[dict[str, Tensor]]:
    """Yield draws, each with its own seed, because the number of random numbers that a model uses may vary by batch."""
    if not _draws_by_itself(guide):
        yield from map(_latents, traced_draws(guide, inputs, count))
        return
    check_is_set_up(guide)
    # Draws site by site, as the guide does, and hence with the same random numbers.
    posterior = guide.get_posterior()
    for _ in reseeded(count):
        yield {name: fn().detach() for name, fn in posterior.items()}


def _draws_by_itself(guide: Any) -> bool:
    """Return True if a guide draws its sites from its own independent Gaussians, which do not depend on the inputs."""
    forward, draw = FactorisedGuide.forward, FactorisedGuide._sample_site
    kind = type(guide)
    return isinstance(guide, FactorisedGuide) and kind.forward is forward and kind._sample_site is draw


def traced_draws(guide: Any, inputs: tuple[Any, ...], count: int) -> Iterator[Any]:
    """Yield the traces of a guide for the draws of :func:`seeded_draws`."""
    check_is_set_up(guide)
    for _ in reseeded(count):
        yield _traced(guide, inputs)


def _traced(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    with AllRows():
        return poutine.trace(guide).get_trace(*_arguments(guide, inputs))


def ignores_inputs(guide: Any) -> bool:
    """Return True for an automatic guide of Pyro or this library that contains no function of the inputs."""
    if not isinstance(guide, AutoGuide):
        return False
    parts = [part for part in guide.modules() if isinstance(part, AutoGuide)]
    own = all(type(part).__module__.partition(".")[0] in ("pyro", "pyro_dvi") for part in parts)
    return own and not any(isinstance(part, AutoCallable) for part in parts)


def first_arguments(guide: Any) -> Mapping[int | str, Any]:
    """Return the arguments of a guide's first run, by position or name; its local latents belong to these examples.

    The mapping is empty for a guide that may compute local latents from its inputs.
    """
    seen: Any = guide.prototype_trace.nodes["_INPUT"] if ignores_inputs(guide) else {}
    return {**dict(enumerate(seen.get("args", ()))), **seen.get("kwargs", {})}


def _arguments(guide: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with which to call a guide; for an automatic guide, they are the arguments of its model."""
    # A guide that was copied or loaded does not know its model.
    knows_model = isinstance(guide, AutoGuide) and guide._model is not None
    return with_missing(guide.model if knows_model else guide, inputs)


def _latents(trace: Any) -> dict[str, Tensor]:
    """Return the latent values of a guide's run, by the name of the model's site."""
    return {
        name: node["value"].detach()
        for name, node in trace.nodes.items()
        if is_latent(node) and not node["infer"].get("is_auxiliary")
    }


class _AtCentre(SetLatents):
    """Set every site of a guide to the mean of its distribution, taken before any transforms."""

    def _value_of(self, site: Any) -> Tensor:
        try:
            return _centre(site["fn"])
        except NotImplementedError as error:
            kind = type(site["fn"]).__name__
            raise GuideError(f"guide site {site['name']!r} ({kind}) has no mean: use Samples(30)") from error


def _centre(fn: Any) -> Tensor:
    if isinstance(fn, td.Independent):
        return _centre(fn.base_dist)
    if isinstance(fn, td.TransformedDistribution):
        value = _centre(fn.base_dist)
        for transform in fn.transforms:
            value = transform(value)
        return value
    if getattr(fn, "has_enumerate_support", False):
        raise NotImplementedError("discrete")
    mean: Tensor = fn.mean
    if not (is_recording() or mean.isfinite().all()):  # for example, of a half-Cauchy
        raise NotImplementedError("the mean is infinite")
    return mean
