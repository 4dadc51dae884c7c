# SPDX-License-Identifier: Apache-2.0
"""One run of a guide, then of its model with what the guide gave."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar, NoReturn, Self, TypeVar

import pyro.distributions as dist
import torch
from pyro.poutine.replay_messenger import ReplayMessenger
from torch import Tensor
from torch import distributions as td

from pyro_dvi.core.distributions import strip_event_dims
from pyro_dvi.core.undisturbed import preserve_buffers
from pyro_dvi.errors import GuideError
from pyro_dvi.gaussians.joint_normal import is_joint
from pyro_dvi.runs.explained import explained_errors
from pyro_dvi.runs.latents import GaussianSite, Latent, Marginals, match_latents
from pyro_dvi.runs.sites import SampleTrace, SetLatents


class GuideRun(SetLatents, SampleTrace):
    """Record a run of a guide, and choose the values of its Gaussian sites.

    Delta sites pass, and Gaussian vectors with covariances where ``takes_joint`` says so. Anything else is not a
    diagonal Gaussian, and is refused by name.

    Attributes:
        trace: the run.
        gaussians: its Gaussian sites by name.
        marginals: where latent sites of the model have theirs, once a :class:`Call` has run the guide.
    """

    marginals: Marginals
    takes_joint: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.gaussians: dict[str, GaussianSite] = {}

    def _chosen(self, name: str, base: td.Normal, transforms: tuple[Any, ...]) -> GaussianSite:
        """Return a Gaussian site with a value for its Gaussian, before the transforms."""
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
        """The Gaussian sites but for those that are sampled as a whole."""
        return [gaussian for gaussian in self.gaussians.values() if gaussian.sampled is not True]

    def used_values(self) -> list[Tensor | None]:
        """Return the tensors that the model computes with; None where it is no plain view of the guide's Gaussian."""
        return [self._used_value(gaussian) for gaussian in self.expanded]

    def _used_value(self, gaussian: GaussianSite) -> Tensor | None:
        site = self.trace.nodes.get(gaussian.name.removesuffix("_unconstrained"))
        value: Any = None if site is None else site["value"]
        if torch.is_tensor(value) and value.shape == gaussian.value.shape:
            return value if value.data_ptr() == gaussian.value.data_ptr() else None
        return None


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

    def explained(self, posterior: Iterable[Tensor] = ()) -> AbstractContextManager[None]:
        """Explain what goes wrong with these arguments, see :func:`~pyro_dvi.runs.explained.explained_errors`."""
        return explained_errors(self.model, posterior, self.args, self.kwargs)

    def run_guide(self, values: Values) -> Values:
        """Run the guide with values for its Gaussians, and return these with the run."""
        # A guide that has not seen the model yet runs it to look at its sites.
        fresh = getattr(self.guide, "prototype_trace", 0) is None
        with self.explained(), preserve_buffers() if fresh else nullcontext(), values:
            self.guide(*self.args, **self.kwargs)
        values.marginals = Marginals(self.guide, values.gaussians)
        return values

    def trace_model(self, guide_trace: Any) -> Any:
        """Run the model with the values of a run of the guide."""
        with Replayed(guide_trace) as run:
            self.model(*self.args, **self.kwargs)
        return run.trace


class Replayed(SampleTrace):
    """Record a run with the values of another one: Pyro's ``trace`` and ``replay`` in one messenger."""

    def __init__(self, trace: Any) -> None:
        super().__init__()
        self._pyro_sample = ReplayMessenger(trace)._pyro_sample


@dataclass(frozen=True)
class PosteriorRun:
    """One run of guide and model.

    Attributes:
        call: what was run.
        guide: the guide's run.
        model_trace: the model's trace; its observed sites carry the likelihood.
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
        """Run the guide, then the model with those values.

        Args:
            call: of a model and a guide of factorised Gaussians and point masses.
            values: what the guide's Gaussians are set to.
            around: given the guide's run, returns the context in which the model runs.

        Raises:
            GuideError: the guide is not a factorised Gaussian.
            ModelError: a latent site is missing in the guide.
            DeviceError: data and parameters live on different devices.
            DataError: the model fails on data that hold NaN.
        """
        context = around(call.run_guide(values))
        with call.explained(g.value for g in values.gaussians.values()), context:
            model_trace = call.trace_model(values.trace)
        latents = match_latents(model_trace, values.trace, values.marginals)
        return cls(call, values, model_trace, latents, context)

    @property
    def gaussians(self) -> list[GaussianSite]:
        """The guide's Gaussian sites but for those that are sampled as a whole."""
        return self.guide.expanded  # type: ignore[no-any-return]


def refuse_site(name: str, fn: Any) -> NoReturn:
    """Refuse the distribution of a site of a guide.

    Raises:
        GuideError: always.
    """
    fn = strip_event_dims(fn)
    kind = type(fn).__name__
    if getattr(fn, "has_enumerate_support", False):
        raise GuideError(
            f"guide site {name!r} is discrete ({kind}); only Gaussian posteriors can be expanded around "
            "their mean. Sum the variable out of the model (pyro.infer.config_enumerate with TraceEnum_ELBO), "
            "or replace it by a continuous relaxation."
        )
    raise GuideError(
        f"guide site {name!r} is {kind}, which is not a factorised Gaussian. Use MeanFieldGuide, "
        "Pyro's AutoNormal, AutoDiagonalNormal or AutoDelta, or a hand-written guide of independent Normal sites; "
        "for dependent posteriors use Pyro's Trace_ELBO, or MomentPropagationELBO if they are those of a last layer."
    )
