# SPDX-License-Identifier: Apache-2.0
"""Values of a posterior for predictions, from a guide of any library or a function.

A guide may say itself how it is predicted, by any of these: ``prediction_rule``, a rule or the name of one;
``predicted_model(model)``, the model with the scales that it was tuned for; ``example_latents()``, values to look at
the model with; ``linearised(inputs, read)``, the Gaussian of its outputs; ``factorised``, the posterior as a guide of
independent Gaussians, None where it is none; ``check_model(model)``, which refuses a model other than the fitted one;
``members``, of an ensemble: a tuple of ``TrainedPosterior``, each with its model, in equal shares.
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
    """Look at model and guide once.

    Args:
        model: the Pyro model.
        guide: its guide; one that was loaded and has not seen its model yet sees it with these inputs.
        inputs: arguments of the model, of the first batch.

    Raises:
        GuideError: the guide was never run, or belongs to another model.
        NonFiniteError: parameters or running statistics hold NaN or infinities, or another buffer holds NaN.
    """
    check_is_set_up(guide, inputs)
    if not members_of(guide):  # each is looked at in its own store
        check_still_own(model, guide)
    for part in (guide, model):
        tensors = [*part.named_parameters(), *part.named_buffers()] if isinstance(part, nn.Module) else []
        bad = non_finite(dict(tensors))
        if bad:
            raise NonFiniteError(
                f"{', '.join(map(repr, bad[:5]))} of {type(part).__name__} {'is' if len(bad) == 1 else 'are'} not "
                "finite: training has diverged, or a file is damaged. Go back to an earlier checkpoint"
            )
    if hasattr(guide, "check_model"):
        guide.check_model(model)
    for member in members_of(guide):
        with member.in_store():
            check_posterior(member.model, member.guide, inputs)


def members_of(guide: Any) -> tuple[TrainedPosterior, ...]:
    """Return the members of an ensemble; none of any other guide."""
    found = getattr(guide, "members", ())
    return found if isinstance(found, tuple) and all(isinstance(m, TrainedPosterior) for m in found) else ()


def check_is_set_up(guide: Any, inputs: tuple[Any, ...] = ()) -> None:
    """Refuse an automatic guide that has not seen its model yet; one of ours that was loaded sees it now.

    Raises:
        GuideError: setting it up without observations would make the response one of its latent sites, and latents of
            single examples may have been learnt for others than these.
    """
    if isinstance(guide, AutoGuide) and guide.prototype_trace is None:
        if (
            isinstance(guide, FactorisedGuide)
            and inputs
            and guide.initialize_loaded(*_arguments(guide, inputs))
        ):
            return
        raise GuideError(
            f"{type(guide).__name__} has not seen its model: train it, or run it once as guide(x, y) with the training "
            "data, also after loading its state; a checkpoint loads with load(..., example=batch)"
        )


def predicted_model(guide: Any, model: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``guide.predicted_model(model)`` where the guide has this method, else ``model``."""
    return guide.predicted_model(model) if hasattr(guide, "predicted_model") else model


def example_latents(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return values to look at the model with, from the guide's method of this name or from a draw.

    An ensemble gives the values of its first member.
    """
    for member in members_of(guide)[:1]:
        with member.in_store():
            return of_member(0, example_latents(member.guide, inputs))
    check_is_set_up(guide, inputs)
    own: Any = getattr(guide, "example_latents", None)
    return one_draw(guide, inputs) if own is None else own()


def of_member(place: int, latents: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the latent values of a member as values of the ensemble."""
    return {MEMBER: torch.tensor(place, device="cpu"), **latents}


def posterior_mean(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return every latent site at the guide's centre: its ``median``, else the mean of each of its sites.

    Raises:
        GuideError: a site of the guide has no mean, or the guide was never set up.
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
    """Return every latent site at its centre, and where the guide has their Gaussians.

    Raises:
        GuideError: the guide is not a factorised Gaussian, or has not seen its model.
    """
    check_is_set_up(guide)
    factorised = getattr(guide, "factorised", guide)
    if factorised is None:
        raise GuideError(
            f"the Gaussian of this {type(guide).__name__} has covariances: predict by Samples(30), or by "
            "Linearised() of a LaplaceGuide, whose Diagonal() has none; of an ensemble, take one of guide.members "
            "within its in_store()"
        )
    with torch.enable_grad(), AllRows():
        means = Call(factorised, factorised, _arguments(guide, inputs)).run_guide(PosteriorMeans())
        refuse_dependent(list(means.gaussians.values()))
    return _latents(means.trace), means.marginals


def one_draw(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the latent values of one draw, with random numbers from the global generator."""
    return _latents(_traced(guide, inputs))


def seeded_draws(guide: Any, inputs: tuple[Any, ...], count: int) -> Iterator[dict[str, Tensor]]:
    """Give draws, each with its own seed, since the model may use random numbers whose count depends on the batch."""
    if not _draws_by_itself(guide):
        yield from map(_latents, traced_draws(guide, inputs, count))
        return
    check_is_set_up(guide)
    posterior = guide.get_posterior()  # drawn one site after the other, so with the same random numbers
    for _ in reseeded(count):
        yield {name: fn().detach() for name, fn in posterior.items()}


def _draws_by_itself(guide: Any) -> bool:
    """Return whether a guide draws one site after the other from Gaussians of its own, whatever the inputs."""
    forward, draw = FactorisedGuide.forward, FactorisedGuide._sample_site
    kind = type(guide)
    return isinstance(guide, FactorisedGuide) and kind.forward is forward and kind._sample_site is draw


def traced_draws(guide: Any, inputs: tuple[Any, ...], count: int) -> Iterator[Any]:
    """Give the traces of a guide in the draws that :func:`seeded_draws` gives."""
    check_is_set_up(guide)
    for _ in reseeded(count):
        yield _traced(guide, inputs)


def _traced(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    with AllRows():
        return poutine.trace(guide).get_trace(*_arguments(guide, inputs))


def ignores_inputs(guide: Any) -> bool:
    """Return True for an automatic guide of Pyro or this library without a function that may look at the inputs."""
    if not isinstance(guide, AutoGuide):
        return False
    parts = [part for part in guide.modules() if isinstance(part, AutoGuide)]
    own = all(type(part).__module__.partition(".")[0] in ("pyro", "pyro_dvi") for part in parts)
    return own and not any(isinstance(part, AutoCallable) for part in parts)


def first_arguments(guide: Any) -> Mapping[int | str, Any]:
    """Return the arguments, by place or name, of a guide's first run: its local latents belong to these examples.

    Empty for guides that may compute such latents from their inputs.
    """
    seen: Any = guide.prototype_trace.nodes["_INPUT"] if ignores_inputs(guide) else {}
    return {**dict(enumerate(seen.get("args", ()))), **seen.get("kwargs", {})}


def _arguments(guide: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return arguments for a guide; an automatic guide takes the arguments of its model."""
    # A copy or a loaded guide does not know its model.
    knows_model = isinstance(guide, AutoGuide) and guide._model is not None
    return with_missing(guide.model if knows_model else guide, inputs)


def _latents(trace: Any) -> dict[str, Tensor]:
    """Return the values of a guide's run by the model's site names."""
    return {
        name: node["value"].detach()
        for name, node in trace.nodes.items()
        if is_latent(node) and not node["infer"].get("is_auxiliary")
    }


class _AtCentre(SetLatents):
    """Set every site of a guide to the mean of its distribution, taken before any transform."""

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
    if not (is_recording() or mean.isfinite().all()):  # as of a half-Cauchy
        raise NotImplementedError("the mean is infinite")
    return mean
