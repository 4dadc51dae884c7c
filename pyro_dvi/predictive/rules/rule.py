# SPDX-License-Identifier: Apache-2.0
r"""Rules of prediction: which latent values stand for the posterior.

A rule turns a posterior :math:`q` into an equally weighted mixture of predictive distributions,

.. math::
    p(y \mid x) \approx \frac1K \sum_{k=1}^K p(y \mid x, \theta_k),

and streams its components, so that :func:`~pyro_dvi.predict` can accumulate them in constant memory. A new rule is a
class with one method, :meth:`PredictionRule.components`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide import AutoCallable, AutoGuide
from torch import Tensor
from torch import distributions as td

from pyro_dvi.choice import check_count
from pyro_dvi.errors import GuideError
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.predictive.engine.run import Respond, Response
from pyro_dvi.signatures import with_missing
from pyro_dvi.sites import AllRows, SetLatents, is_latent

__all__ = [
    "AtMean",
    "FromDraws",
    "PredictionRule",
    "Samples",
    "arguments",
    "at_tuned_scales",
    "check_is_set_up",
    "example_latents",
    "first_arguments",
    "ignores_inputs",
    "latents",
    "one_draw",
    "posterior_mean",
    "seed_all",
]


class PredictionRule(ABC):
    """How a posterior becomes a predictive distribution.

    ``num_components`` says how many distributions :meth:`components` gives for a batch; ``tells_noise_apart`` whether
    each is the noise around one value of the latents, so that the rest of the uncertainty is the posterior's;
    ``averages_draws`` whether what the model draws itself, from sites that are neither in the guide nor observed, is
    averaged over as well.
    """

    num_components: int
    tells_noise_apart: bool = True
    averages_draws: bool = False

    @abstractmethod
    def components(
        self, guide: Callable[..., Any], inputs: tuple[Any, ...], respond: Respond
    ) -> Iterator[Response]:
        """Give the components of the mixture for a batch, one after the other.

        Random numbers come from torch's global generator, which has the same seed for every batch.

        Args:
            guide: the posterior, a Pyro guide.
            inputs: positional arguments of the model and the guide for this batch.
            respond: runs the model with the latent values that it is given, by site name.
        """


@dataclass(frozen=True)
class AtMean(PredictionRule):
    r"""Predict with every weight at its posterior mean, :math:`p(y \mid x, \mathrm{E}_q\theta)`.

    One run of the model. The rule for posteriors trained by :class:`~pyro_dvi.TaylorELBO`, whose mean is trained for
    its neighbourhood, and for MAP. For constrained sites (a positive scale, say) the mean is taken in the
    unconstrained space, which makes it the guide's median.

    Status: exact for what it says; it leaves out the posterior's width.
    """

    num_components = 1

    def components(
        self, guide: Callable[..., Any], inputs: tuple[Any, ...], respond: Respond
    ) -> Iterator[Response]:
        """Give the one component."""
        yield respond(posterior_mean(guide, inputs))


class FromDraws(PredictionRule):
    """A rule with one component for each of ``num_samples`` draws of the latents."""

    num_samples: int

    averages_draws = True

    @property
    def num_components(self) -> int:  # type: ignore[override]
        """As many as draws."""
        return self.num_samples

    def components(
        self, guide: Callable[..., Any], inputs: tuple[Any, ...], respond: Respond
    ) -> Iterator[Response]:
        """Give one component for each draw."""
        return map(respond, self.draws(guide, inputs))

    def repeats(self, guide: Callable[..., Any]) -> bool:
        """Whether every batch has the same draws, whatever its inputs."""
        return False

    @abstractmethod
    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Give the latent values of one draw after the other."""


@dataclass(frozen=True)
class Samples(FromDraws):
    r"""Average the predictions of ``num_samples`` draws from the posterior.

    The rule for posteriors trained by sampling (Pyro's ``Trace_ELBO``). The same draws serve every batch, so that
    each is one function over all inputs and the batch size does not matter.

    Status: unbiased for the probabilities (and the mean and second moment) under the posterior; their error falls
    with the root of ``num_samples``.

    Args:
        num_samples: draws from the guide.

    Raises:
        ArgumentError: less than one draw.
    """

    num_samples: int

    def __post_init__(self) -> None:
        check_count("num_samples", self.num_samples)
        object.__setattr__(self, "num_samples", int(self.num_samples))  # of NumPy, say

    def repeats(self, guide: Callable[..., Any]) -> bool:
        """Whether the guide is automatic and has no function in it that looks at the inputs."""
        return ignores_inputs(guide)

    def draws(self, guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Iterator[dict[str, Tensor]]:
        """Give the latent values of one draw after the other."""
        # A seed for each draw: how many random numbers the model itself uses, which depends on the batch, then
        # does not matter to the next draw.
        check_is_set_up(guide)
        draw = _drawing(guide, inputs)
        for seed in torch.randint(2**31 - 1, (self.num_samples,)).tolist():
            seed_all(seed)
            yield draw()


def posterior_mean(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return every latent site at the guide's centre: its ``median``, else the mean of each of its sites.

    Raises:
        GuideError: a site of the guide has no mean, or the guide was never set up.
    """
    check_is_set_up(guide)
    if isinstance(guide, AutoGuide):
        try:
            return {name: value.detach() for name, value in guide.median(*arguments(guide, inputs)).items()}
        except NotImplementedError as error:
            raise GuideError(
                f"{type(guide).__name__} has no median to predict at: use predict(..., method=Samples(30))"
            ) from error
    with _AtCentre():
        return latents(_trace(guide, inputs))


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
            and guide.initialize_loaded(*arguments(guide, inputs))
        ):
            return
        raise GuideError(
            f"{type(guide).__name__} has not seen its model: train it, or run it once with the training arguments "
            "as guide(x, y), also after loading its state. Before loading a checkpoint into a fresh guide, call "
            "guide.initialize(*args) where it has that, or give a batch of the training: load(..., example=batch)."
        )


def ignores_inputs(guide: Any) -> bool:
    """Whether a guide is automatic, with no function in it that may look at the inputs."""
    return isinstance(guide, AutoGuide) and not any(isinstance(m, AutoCallable) for m in guide.modules())


def first_arguments(guide: Any) -> Mapping[int | str, Any]:
    """Return the arguments, by place or name, for which a guide has learnt the latents of single examples.

    They are those of its first look at the model. Empty for guides that may compute such latents from their inputs.
    """
    seen: Any = guide.prototype_trace.nodes["_INPUT"] if ignores_inputs(guide) else {}
    return {**dict(enumerate(seen.get("args", ()))), **seen.get("kwargs", {})}


def one_draw(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return the latent values of one draw, with random numbers from the global generator."""
    return latents(_trace(guide, inputs))


def seed_all(seed: int) -> None:
    """Seed the global generators, without the note that ``torch.manual_seed`` leaves for an absent accelerator.

    That note, with a stack trace, takes longer than a small model.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


def _drawing(guide: Any, inputs: tuple[Any, ...]) -> Callable[[], dict[str, Tensor]]:
    """Return a function that draws as :func:`one_draw` does, with the same random numbers."""
    factorised = (
        isinstance(guide, FactorisedGuide)
        and type(guide).forward is FactorisedGuide.forward
        and type(guide)._sample_site is FactorisedGuide._sample_site
    )
    if not factorised:
        return partial(one_draw, guide, inputs)
    posterior = guide.get_posterior()  # of sites that are drawn one after the other, whatever the inputs
    return lambda: {name: fn().detach() for name, fn in posterior.items()}


def example_latents(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Return values to look at the model with: those of the guide's method of this name, or a draw."""
    check_is_set_up(guide, inputs)
    own: dict[str, Tensor] = (
        guide.example_latents() if hasattr(guide, "example_latents") else one_draw(guide, inputs)
    )
    return own


def at_tuned_scales(guide: Any, model: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``model`` with the scales that ``guide.tune`` has set, those of the noise among them."""
    return guide.predicted_model(model) if hasattr(guide, "predicted_model") else model


def _trace(guide: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
    with AllRows():
        return poutine.trace(guide).get_trace(*arguments(guide, inputs))


def arguments(guide: Any, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments for a guide; an automatic one takes those of its model."""
    knows_model = (
        isinstance(guide, AutoGuide) and guide._model is not None
    )  # a copy or a loaded guide does not
    return with_missing(guide.model if knows_model else guide, inputs)


def latents(trace: Any) -> dict[str, Tensor]:
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
            raise GuideError(
                f"guide site {site['name']!r} ({type(site['fn']).__name__}) has no mean to predict at: use "
                "predict(..., method=Samples(30))"
            ) from error


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
    if not mean.isfinite().all():  # as of a half-Cauchy
        raise NotImplementedError("the mean is infinite")
    return mean
