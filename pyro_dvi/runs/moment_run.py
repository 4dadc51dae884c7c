# SPDX-License-Identifier: Apache-2.0
"""One run of guide and model in which every Gaussian latent is its mean and variance."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch import distributions as td
from torch.nn.utils import _named_member_accessor as accessor

from pyro_dvi.gaussians.normals import MultiplicativeNormal, is_joint
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from pyro_dvi.moments.quadrature import through_link
from pyro_dvi.moments.shared_noise import JointMoments, joint_noise_followed
from pyro_dvi.moments.value import Link
from pyro_dvi.runs.latents import Marginals, elementary
from pyro_dvi.runs.means import PosteriorMeans
from pyro_dvi.runs.posterior_run import Call, PosteriorRun
from pyro_dvi.runs.sites import SetLatents

Around = Callable[[Mapping[str, GaussianMoments]], AbstractContextManager[Any]]


def run_with_moments(
    call: Call,
    sampled: Mapping[str, Tensor | bool] | None = None,
    around: Around = nullcontext,
) -> PosteriorRun:
    """Run the guide, then the model with the moments of the guide's Gaussians in place of values.

    Args:
        call: of a model and a guide of factorised Gaussians and point masses.
        sampled: guide sites to sample, see :class:`~pyro_dvi.runs.structure.Structure`.
        around: given the moments that the model will use, by name and filled while it runs, returns the context in
            which it runs: :func:`~pyro_dvi.runs.uncertain.uncertain_likelihoods`, which lets distributions take
            moments, and what is to watch.

    Raises:
        UnsupportedError: the model uses a function or distribution without a rule; others as
            :meth:`~pyro_dvi.runs.posterior_run.PosteriorRun.of`.
    """

    @contextmanager
    def with_moments(means: PosteriorMeans) -> Iterator[None]:
        with PosteriorMoments(means.marginals, sampled=sampled) as moments, around(moments.given):
            yield

    return PosteriorRun.of(call, PosteriorMeans(), with_moments)


StandIn = Callable[[Tensor, Tensor, Any], Any]


def reparameterised(loc: Tensor, scale: Tensor, transform: Any) -> Tensor:
    """Draw the value of a transformed Gaussian so that it can be differentiated."""
    return median(loc + scale * torch.randn_like(loc), scale, transform)


def median(loc: Tensor, scale: Tensor, transform: Any) -> Tensor:
    """Return the median of a transformed Gaussian."""
    return loc if transform is None else transform(loc)


def propagated(loc: Tensor, scale: Tensor, transform: Any) -> Any:
    """Return the moments of a transformed Gaussian, linked to it; the median where elements are mixed (a simplex)."""
    if transform is None:
        return GaussianMoments(loc, scale.square())
    parts = elementary(transform)
    if any(part.domain.event_dim or part.codomain.event_dim for part in parts):
        return transform(loc)
    name = "exp" if len(parts) == 1 and isinstance(parts[0], td.ExpTransform) else None
    # Without the event dimensions, which elements that the model takes out do not have.
    function = td.ComposeTransform(parts)
    uniform = not any(torch.is_tensor(v) and v.dim() > 0 for part in parts for v in vars(part).values())
    link = Link(GaussianMoments(loc, scale.square()), function, name, uniform=uniform)
    moments = through_link(GaussianMoments(loc, scale.square(), link), lambda value: value)
    assert moments is not None
    return moments.linked(link)


_SWAP = accessor.swap_tensor


def _swap(module: nn.Module, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Put a value in the place of a parameter, for ``torch.func.functional_call``, which refuses all but tensors."""
    if name not in module._parameters or not isinstance(value, GaussianMoments):
        return _SWAP(module, name, value, *args, **kwargs)
    before, module._parameters[name] = module._parameters[name], value  # type: ignore[assignment]
    return before


class PosteriorMoments(SetLatents):
    """Give each latent site of a model the moments of its posterior marginal.

    A Gaussian in the site's own space becomes :class:`~pyro_dvi.moments.GaussianMoments`, with what it shares if it has
    covariances. One that a transform takes
    to the site's space (a positive scale, say), or that sets the prior of another latent, is sampled by
    reparameterisation. Point masses are left to Pyro's replay, which has to be the inner of the two handlers.

    Args:
        marginals: where the guide has the Gaussians of latent sites.
        stand_in: gives the value of a site that is sampled or transformed, from mean and standard deviation of its
            Gaussian and the transforms.
        sampled: guide sites that set the prior of another latent, or masks of their elements.

    Attributes:
        given: the moments of Gaussian sites that the model was given so far, by name.
    """

    def __init__(
        self,
        marginals: Marginals,
        stand_in: StandIn = reparameterised,
        sampled: Mapping[str, Tensor | bool] | None = None,
    ) -> None:
        super().__init__()
        self.marginals, self.stand_in, self.sampled = marginals, stand_in, sampled or {}
        self.given: dict[str, GaussianMoments] = {}
        self._following = ExitStack()

    def __enter__(self) -> Self:
        self._following.callback(setattr, accessor, "swap_tensor", _SWAP)
        accessor.swap_tensor = _swap  # type: ignore[assignment]
        if any(is_joint(gaussian.base) for gaussian in self.marginals.gaussians.values()):
            self._following.enter_context(joint_noise_followed())
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> Any:
        with self._following:
            return super().__exit__(*error)

    def _value_of(self, site: Any) -> Any:
        latent: Any = self.marginals.of(site)
        if latent.source is None:
            return None
        if latent.transform is not None or self._is_sampled(latent):
            return self.stand_in(latent.loc, latent.scale, latent.transform)
        base = latent.source.base
        if latent.shared is not None:
            self.given[latent.name] = JointMoments(latent.loc, latent.rest, latent.shared, of_weights=True)
        elif isinstance(base, MultiplicativeNormal):
            self.given[latent.name] = MultiplicativeMoments(latent.loc, base.alpha)
        else:
            self.given[latent.name] = GaussianMoments(latent.loc, latent.scale.square())
        return self.given[latent.name]

    def _is_sampled(self, latent: Any) -> bool:
        mask = self.sampled.get(latent.source.name, False)
        return mask is True or (mask is not False and bool((torch.as_tensor(mask) & latent.elements).any()))
