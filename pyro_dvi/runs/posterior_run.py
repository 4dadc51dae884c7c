# SPDX-License-Identifier: Apache-2.0
"""One run of a guide and then of its model, to which the guide passes its means or its moments."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self, TypeVar

import pyro.distributions as dist
import torch
from pyro.poutine.replay_messenger import ReplayMessenger
from torch import Tensor, distributions as td, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import _named_member_accessor as accessor

from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.core.undisturbed import layer_by_layer, preserve_buffers
from pyro_dvi.errors import GuideError
from pyro_dvi.gaussians.normals import MultiplicativeNormal, is_joint
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from pyro_dvi.moments.quadrature import through_link
from pyro_dvi.moments.shared_noise import JointMoments, joint_noise_followed
from pyro_dvi.moments.value import Link
from pyro_dvi.runs.batch_rows import RowsOfBatch
from pyro_dvi.runs.explained import explained_errors
from pyro_dvi.runs.latents import GaussianSite, Latent, Marginals, elementary, match_latents
from pyro_dvi.runs.sites import SampleTrace, SetLatents


class GuideRun(SetLatents, SampleTrace):
    """Record a run of a guide, and choose the values of its Gaussian sites.

    Delta sites are allowed, and so are Gaussian vectors with covariances if ``takes_joint`` is true. Any other site
    raises an error that names it.

    Attributes:
        trace: the trace of the run.
        gaussians: the Gaussian sites of the guide by name.
        marginals: the marginals of the model's latent sites, once a :class:`Call` has run the guide.
    """

    marginals: Marginals
    takes_joint: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.gaussians: dict[str, GaussianSite] = {}

    def _chosen(self, name: str, base: td.Normal, transforms: tuple[Any, ...]) -> GaussianSite:
        """Return a Gaussian site with the chosen value of its Gaussian, before any transforms."""
        raise NotImplementedError

    def _value_of(self, site: Any) -> Tensor | None:
        base = strip_event_dims(site["fn"])
        transforms: tuple[Any, ...] = ()
        if isinstance(base, td.TransformedDistribution):
            transforms = tuple(base.transforms)
            base = strip_event_dims(base.base_dist)
            if any(t.domain.event_dim or t.codomain.event_dim for t in transforms):
                refuse_site(site["name"], site["fn"])
        if not isinstance(base, td.Normal) and not (self.takes_joint and is_joint(base)):
            return None if isinstance(base, dist.Delta) else refuse_site(site["name"], site["fn"])
        self.gaussians[site["name"]] = gaussian = self._chosen(site["name"], base, transforms)
        value = gaussian.value
        for transform in transforms:
            value = transform(value)
        return value

    @property
    def expanded(self) -> list[GaussianSite]:
        """The Gaussian sites, except those that are sampled completely."""
        return [gaussian for gaussian in self.gaussians.values() if gaussian.sampled is not True]

    def used_values(self) -> list[Tensor | None]:
        """Return the tensors that the model uses, or None if they are not plain views of the guide's Gaussian."""
        nodes, expanded = self.trace.nodes, self.expanded
        values = [nodes.get(g.name.removesuffix("_unconstrained"), {}).get("value") for g in expanded]
        return [
            v
            if torch.is_tensor(v) and (v.shape, v.data_ptr()) == (g.value.shape, g.value.data_ptr())
            else None
            for v, g in zip(values, expanded, strict=True)
        ]


Values = TypeVar("Values", bound=GuideRun)


@dataclass(frozen=True)
class Call:
    """A model and its guide, both called with the same arguments.

    Attributes:
        model: a Pyro model.
        guide: its guide.
        args: positional arguments of both.
        kwargs: keyword arguments of both.
    """

    model: Callable
    guide: Any
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def explained(self) -> AbstractContextManager[None]:
        """Explain errors in runs with these arguments; see :func:`~pyro_dvi.runs.explained.explained_errors`."""
        return explained_errors(self.model, self.args, self.kwargs)

    def run_guide(self, values: Values) -> Values:
        """Run the guide inside ``values``, which chooses the values of its Gaussians, and return ``values``."""
        # A guide that has not been set up runs the model first, to inspect the model's sites.
        fresh = getattr(self.guide, "prototype_trace", 0) is None
        with self.explained(), preserve_buffers() if fresh else nullcontext(), values:
            self.guide(*self.args, **self.kwargs)
        values.marginals = Marginals(self.guide, values.gaussians)
        return values

    def trace_model(self, guide_trace: Any) -> Any:
        """Run the model with the values that the guide has chosen in a run.

        Raises:
            GuideError: if latents of an automatic guide would be trained on the data of other rows.
        """
        with (
            ReplayMessenger(guide_trace),
            RowsOfBatch(self.guide, (self.args, self.kwargs)),
            SampleTrace() as run,
        ):
            self.model(*self.args, **self.kwargs)
        return run.trace

    def checked_model(self) -> Callable:
        """Return the model with the check of :class:`RowsOfBatch`, for objectives that replay it themselves."""
        return RowsOfBatch(self.guide, (self.args, self.kwargs))(self.model)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class PosteriorRun:
    """One run of guide and model.

    Attributes:
        call: the model and guide with their arguments.
        guide: the guide's run.
        model_trace: the model's trace, whose observed sites determine the likelihood.
        latents: every latent site with its posterior marginal.
        recorder: the context in which the model ran.
    """

    call: Call
    guide: Any
    model_trace: Any
    latents: list[Latent]
    recorder: Any

    @classmethod
    def of(cls, call: Call, values: Values, around: Callable[[Values], AbstractContextManager[Any]]) -> Self:
        """Run the guide, then the model with the guide's values.

        Args:
            call: a model, and a guide of factorised Gaussians and point masses.
            values: chooses the values of the guide's Gaussians.
            around: given the guide's run, returns the context in which the model runs.

        Raises:
            GuideError: if the guide is not a factorised Gaussian.
            ModelError: if a latent site is missing in the guide.
            DataError: if the model fails on data that contain NaN.
        """
        context = around(call.run_guide(values))
        with call.explained(), context:
            model_trace = call.trace_model(values.trace)
        latents = match_latents(model_trace, values.trace, values.marginals)
        return cls(call, values, model_trace, latents, context)

    @property
    def gaussians(self) -> list[GaussianSite]:
        """The guide's Gaussian sites, except those that are sampled completely."""
        return self.guide.expanded  # type: ignore[no-any-return]


def refuse_site(name: str, fn: Any) -> NoReturn:
    """Raise an error for the distribution of a guide site.

    Raises:
        GuideError: always.
    """
    fn = strip_event_dims(fn)
    if getattr(fn, "has_enumerate_support", False):
        raise GuideError(
            f"guide site {name!r} is discrete ({type(fn).__name__}), not Gaussian: sum the variable out of the model "
            "(pyro.infer.config_enumerate with TraceEnum_ELBO), or replace it with a continuous relaxation"
        )
    raise GuideError(
        f"guide site {name!r} is {type(fn).__name__}, which is not a factorised Gaussian: use MeanFieldGuide, "
        "AutoNormal, AutoDiagonalNormal, AutoDelta or independent Normal sites. Train other posteriors with Pyro's "
        "Trace_ELBO, or, if only a last layer has a dependent posterior, with MomentPropagationELBO"
    )


def run_at_means(
    call: Call,
    sampled: Mapping[str, Tensor | bool] | None = None,
    recorder: Callable[[list[Tensor | None]], AbstractContextManager[Any]] | None = None,
) -> PosteriorRun:
    """Run the guide at its means, then the model with these means; raises the errors of :meth:`PosteriorRun.of`.

    Args:
        call: a model, and a guide of factorised Gaussians and point masses.
        sampled: guide sites to sample, see :class:`~pyro_dvi.runs.structure.Structure`.
        recorder: given the values that the model will use, returns the context in which it runs.
    """
    if recorder is None:
        return PosteriorRun.of(call, PosteriorMeans(sampled), lambda _: nullcontext())
    with twice_differentiable():
        return PosteriorRun.of(call, PosteriorMeans(sampled), lambda means: recorder(means.used_values()))


def twice_differentiable() -> AbstractContextManager[Any]:
    """Return a context in which attention uses no fused kernels, because these have no second derivative."""
    return sdpa_kernel(SDPBackend.MATH)


class PosteriorMeans(GuideRun):
    """Set Gaussian sites of a guide to their means, tracked for differentiation; sample the sites in ``sampled``.

    Every mean becomes a separate node of the autograd graph. Gradients of the likelihood with respect to the mean
    therefore do not include those from other uses of the parameters.

    Args:
        sampled: guide sites to sample with reparameterisation, by name: True for all elements of a site, or a mask.
    """

    takes_joint = True

    def __init__(self, sampled: Mapping[str, Tensor | bool] | None = None) -> None:
        super().__init__()
        self.sampled = sampled or {}

    def _chosen(self, name: str, base: td.Normal, transforms: tuple[Any, ...]) -> GaussianSite:
        loc = base.loc
        value = mean = loc.view_as(loc) if loc.requires_grad else loc.detach().requires_grad_()
        sampled = self.sampled.get(name, False)
        if sampled is not False:
            draw = loc + base.scale * torch.randn_like(loc)
            value = draw if sampled is True else torch.where(torch.as_tensor(sampled), draw, mean)
        return GaussianSite(name, value, base, transforms, sampled)


Around = Callable[[Mapping[str, GaussianMoments]], AbstractContextManager[Any]]


def run_with_moments(
    call: Call,
    sampled: Mapping[str, Tensor | bool] | None = None,
    around: Around = nullcontext,
) -> PosteriorRun:
    """Run the guide, then the model with the moments of the guide's Gaussians in place of values.

    Args:
        call: a model, and a guide of factorised Gaussians and point masses.
        sampled: guide sites to sample, see :class:`~pyro_dvi.runs.structure.Structure`.
        around: given the moments that the model will use (by name, filled while the model runs), returns the context in
            which the model runs. It consists of :func:`~pyro_dvi.runs.uncertain.uncertain_likelihoods`, which lets
            distributions take moments, and any observers.

    Raises:
        UnsupportedError: if the model uses a function or distribution without a rule. For other errors, see
            :meth:`~pyro_dvi.runs.posterior_run.PosteriorRun.of`.
    """

    @contextmanager
    def with_moments(means: PosteriorMeans) -> Iterator[None]:
        with PosteriorMoments(means.marginals, sampled=sampled) as moments, around(moments.given):
            yield

    return PosteriorRun.of(call, PosteriorMeans(), with_moments)


StandIn = Callable[[Tensor, Tensor, Any], Any]


def reparameterised(loc: Tensor, scale: Tensor, transform: Any) -> Tensor:
    """Return a draw of a transformed Gaussian, differentiable by reparameterisation."""
    return median(loc + scale * torch.randn_like(loc), scale, transform)


def median(loc: Tensor, scale: Tensor, transform: Any) -> Tensor:
    """Return the median of a transformed Gaussian."""
    return loc if transform is None else transform(loc)


def propagated(loc: Tensor, scale: Tensor, transform: Any) -> Any:
    """Return the moments of a transformed Gaussian, linked to it; if the transform mixes elements, its median."""
    if transform is None:
        return GaussianMoments(loc, scale.square())
    parts = elementary(transform)
    if any(part.domain.event_dim or part.codomain.event_dim for part in parts):
        return transform(loc)
    name = "exp" if len(parts) == 1 and isinstance(parts[0], td.ExpTransform) else None
    # The transform has no event dimensions, because elements that the model selects do not have them.
    function = td.ComposeTransform(parts)
    uniform = not any(torch.is_tensor(v) and v.dim() > 0 for part in parts for v in vars(part).values())
    link = Link(GaussianMoments(loc, scale.square()), function, name, uniform=uniform)
    moments = through_link(GaussianMoments(loc, scale.square(), link), lambda value: value)
    assert moments is not None
    return moments.linked(link)


_SWAP = accessor.swap_tensor


def _swap(module: nn.Module, name: str, value: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace a parameter by any value; ``torch.func.functional_call`` itself accepts only tensors."""
    if name not in module._parameters or not isinstance(value, GaussianMoments):
        return _SWAP(module, name, value, *args, **kwargs)
    before, module._parameters[name] = module._parameters[name], value  # type: ignore[assignment]
    return before


class PosteriorMoments(SetLatents):
    """Set each latent site of a model to the moments of its posterior marginal.

    A Gaussian over the site's own values becomes :class:`~pyro_dvi.moments.GaussianMoments`, with its shared noise if
    it has covariances. A Gaussian is sampled with reparameterisation if a transform maps it to the site's values (as
    for a positive scale), or if it sets the prior of another latent. Point masses are set by Pyro's replay handler,
    which must be inside this handler.

    Args:
        marginals: the Gaussians of latent sites in the guide.
        stand_in: returns the value of a sampled or transformed site, given the mean and standard deviation of its
            Gaussian, and the transform.
        sampled: guide sites that set the prior of another latent, or masks of their elements.

    Attributes:
        given: the moments that the model has received so far, by site name.
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
        self._following.enter_context(layer_by_layer())  # fused kernels and nested tensors have no moments
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
