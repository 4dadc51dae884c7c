# SPDX-License-Identifier: Apache-2.0
"""The posterior of one task as the prior of the next."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyro.distributions as dist
import torch
from pyro.poutine.messenger import Messenger
from torch import Tensor, distributions as td, nn

from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.errors import ModelError, UnsupportedError
from pyro_dvi.gaussians.normals import MatrixNormal
from pyro_dvi.runs.latents import is_real
from pyro_dvi.runs.sites import sites_named

Gaussians = Mapping[str, tuple[Tensor, Tensor]]
"""Mean and standard deviation by site name."""


@dataclass(frozen=True)
class PosteriorPrior:
    """Gaussians that replace the priors of a model; returned by ``guide.as_prior()``.

    Call it with a model to get this model with the Gaussians as its priors. The result is a module that contains the
    Gaussians as buffers and the model under ``.model``. Its site names, parameters and running statistics are those of
    the model. If the model already has priors from an earlier call, they are replaced.

    Attributes:
        gaussians: mean and standard deviation by site name, without gradients.
        origin: name of the guide that the Gaussians come from.
    """

    gaussians: Gaussians
    origin: str

    def __call__(self, model: Callable[..., Any]) -> Any:
        """Return ``model`` with these Gaussians as its priors.

        Raises:
            ModelError: if a site is missing, has a different shape or is constrained (raised when the model runs).
        """
        gaussians = dict(self.gaussians)
        if isinstance(model, _WithPrior):
            gaussians, model = {**model.priors(), **gaussians}, model.model
        return _WithPrior(model, gaussians, self.origin)


def without_posterior_prior(model: Callable[..., Any]) -> Callable[..., Any]:
    """Return the model with its own priors again; the models of all tasks share its modules and parameters."""
    return model.model if isinstance(model, _WithPrior) else model


def posterior_prior(
    posteriors: Iterable[tuple[str, Any, bool]],
    exclude: str | Iterable[str],
    origin: str,
    temperature: float = 1.0,
) -> PosteriorPrior:
    """Convert the posteriors of a guide to priors.

    Args:
        posteriors: for each site, the name, the posterior in unconstrained space, and whether the site is
            unconstrained.
        exclude: names or patterns of sites that keep their priors.
        origin: name of the guide.
        temperature: temperature at which the guide was trained.

    Raises:
        ArgumentError: if a pattern matches no site.
        UnsupportedError: if the posterior of a site is not a factorised Gaussian over its values.
    """
    posteriors = list(posteriors)
    excluded = sites_named("exclude", exclude, [name for name, _, _ in posteriors])
    gaussians = {}
    for name, posterior, real in posteriors:
        if name in excluded:
            continue
        base = strip_event_dims(posterior)
        if not real or not isinstance(base, td.Normal) or isinstance(base, MatrixNormal):
            reason = type(base).__name__ if real else "constrained"
            raise UnsupportedError(
                f"the posterior of site {name!r} is not a factorised Gaussian over its values ({reason}): keep the "
                f"prior of the model with as_prior(exclude=[{name!r}]), or use a mean-field posterior"
            )
        loc, scale = torch.broadcast_tensors(base.loc.detach(), base.scale.detach())
        gaussians[name] = (loc.clone(), scale * temperature**-0.5)
    return PosteriorPrior(gaussians, origin)


class _Priors(Messenger):
    """Replace the priors of latent sites in runs of the model."""

    def __init__(self, gaussians: Gaussians, origin: str) -> None:
        super().__init__()
        self.gaussians, self.origin = gaussians, origin
        self.seen: set[str] = set()

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if name not in self.gaussians:
            return
        self.seen.add(name)
        fn = msg["fn"]
        loc, scale = self.gaussians[name]
        if fn.shape() != loc.shape or not is_real(fn.support):
            raise ModelError(
                f"site {name!r} has the shape {tuple(fn.shape())} and the support {fn.support}, but its posterior in "
                f"{self.origin} has the shape {tuple(loc.shape)} and real support. Keep the prior of the model with "
                f"as_prior(exclude=[{name!r}]), as for a head of another size, or a latent with one value per example"
            )
        prior = dist.Normal(loc, scale, validate_args=False).to_event(fn.event_dim)
        prior.initial_value = loc  # the next guide starts at this value
        msg["fn"] = prior

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        missing = sorted(set(self.gaussians) - self.seen)
        if missing and error[0] is None:
            raise ModelError(
                f"{self.origin} has a posterior of site {missing[0]!r}, which is not in the model. If the site is the "
                f"head of an earlier task, exclude it with as_prior(exclude=[{missing[0]!r}])"
            )


class _WithPrior(nn.Module):
    """A model whose priors are replaced."""

    def __init__(self, model: Callable[..., Any], gaussians: Gaussians, origin: str) -> None:
        super().__init__()
        self.model, self.origin = model, origin
        self.sites = list(gaussians)
        for k, (loc, scale) in enumerate(gaussians.values()):
            self.register_buffer(f"prior_loc_{k}", loc)
            self.register_buffer(f"prior_scale_{k}", scale)
        self.train(getattr(model, "training", True))

    def priors(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return mean and standard deviation by site name."""
        return {
            name: (self.get_buffer(f"prior_loc_{k}"), self.get_buffer(f"prior_scale_{k}"))
            for k, name in enumerate(self.sites)
        }

    @property
    def forward(self) -> Callable[..., Any]:  # type: ignore[override]
        """The call of the model, with the model's signature, from which predictions infer the observation argument."""
        run = self.model.forward if isinstance(self.model, nn.Module) else self.model
        return functools.update_wrapper(functools.partial(self._run), run)

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        with _Priors(self.priors(), self.origin):
            return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)
