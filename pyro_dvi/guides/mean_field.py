# SPDX-License-Identifier: Apache-2.0
"""The factorised Gaussian posterior."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from operator import attrgetter
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.distributions.util import sum_rightmost
from pyro.infer.autoguide import AutoGuide
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn import PyroModule, PyroParam
from pyro.ops.tensor_utils import periodic_repeat
from torch import Tensor
from torch.distributions import constraints

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.errors import ArgumentError, DviWarning, GuideError, ModelError
from pyro_dvi.guides.scales import PerWeight, ScaleFamily
from pyro_dvi.handlers.latents import unconstraining_transform
from pyro_dvi.handlers.means import strip_event_dims
from pyro_dvi.undisturbed import preserve_buffers

__all__ = ["MeanFieldGuide"]

# The optimizer sees the logarithm of a scale: the transform to positive numbers is exp.
_SCALE_CONSTRAINT = constraints.positive


class MeanFieldGuide(AutoGuide):
    r"""Independent Gaussians over all latents, in unconstrained space.

    .. math:: q(u) = \prod_\lambda \mathcal N(u_\lambda; \mu_\lambda, \sigma_\lambda^2), \qquad \theta = T(u)

    with Pyro's transform T to the support of each site (the identity for weights). Means start from the weights
    that a network had before :func:`~pyro_dvi.to_bayesian_`, scales at :math:`\sigma = e^{-3} s` with the prior's
    standard deviation s. Looking at the model to find its sites leaves batch-norm statistics alone. Unconstrained
    sites are plain Normal sites of the same name, so Pyro's ``TraceMeanField_ELBO`` has its analytic KL divergence.

    Args:
        model: a Pyro model whose latents are continuous.
        init_loc_fn: Pyro initialisation strategy of the means.
        scale: the covariance family: ``PerWeight()``, ``PerSite()`` or ``SGDStepSize(lr, batch_size)``.
        create_plates: as in Pyro's guides; returns plates that the guide should subsample.

    Attributes:
        locs: module of means, ``guide.locs.<site>``; ``MeanFieldGuide.locs.<site>`` in the parameter store.
        scales: module of standard deviations likewise; the optimizer sees their logarithm.

    Raises:
        ModelError: a latent is discrete, or there is none.

    Example:
        >>> from pyro_dvi.bayesian import to_bayesian_
        >>> net = to_bayesian_(torch.nn.Linear(2, 1))
        >>> guide = MeanFieldGuide(net)
        >>> guide.initialize(torch.ones(1, 2))
        >>> guide.scales.weight.detach()
        tensor([[0.0498, 0.0498]])
    """

    def __init__(
        self,
        model: Callable,
        *,
        init_loc_fn: Callable = init_to_module,
        scale: ScaleFamily | None = None,
        create_plates: Callable | None = None,
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be callable, got {type(model).__name__}")
        if scale is not None and not isinstance(scale, ScaleFamily):
            raise TypeError(
                "scale must be a covariance family such as PerWeight(), PerSite() or SGDStepSize(lr, batch_size), "
                f"got {scale!r}"
            )
        super().__init__(InitMessenger(init_loc_fn)(model), create_plates=create_plates)
        self.scale_family = PerWeight() if scale is None else scale
        self.locs = PyroModule()
        self.scales = PyroModule()
        self._event_dims: dict[str, int] = {}

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Create the parameters from one look at the model with these arguments, if they do not exist yet."""
        if self.prototype_trace is None:
            self._setup_prototype(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every latent site once; Pyro calls it with the arguments of the model.

        Returns:
            the draws by site name.
        """
        self.initialize(*args, **kwargs)
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for name, site in self._sites():
            with ExitStack() as stack:
                for frame in site["cond_indep_stack"]:
                    stack.enter_context(plates[frame.name])
                result[name] = self._sample_site(name, site["fn"])
        return result

    def _sample_site(self, name: str, prior: Any) -> Tensor:
        normal = self._normal(name)
        transform = unconstraining_transform(prior.support)
        if transform is None:
            return pyro.sample(name, normal)
        u = pyro.sample(f"{name}_unconstrained", normal, infer={"is_auxiliary": True})
        value = transform(u)
        log_density = -transform.log_abs_det_jacobian(u, value)
        log_density = sum_rightmost(log_density, log_density.dim() - value.dim() + prior.event_dim)
        return pyro.sample(name, dist.Delta(value, log_density=log_density, event_dim=prior.event_dim))

    def _normal(self, name: str) -> Any:
        """Posterior of a site in unconstrained space. Unvalidated: a check of each weight in each step is not free."""
        loc = attrgetter(name)(self.locs)
        if self.scale_family.learned:
            scale = attrgetter(name)(self.scales)
        else:
            scale = self.scale_family.initial(loc.detach(), loc.detach(), 0)
        return dist.Normal(loc, scale.expand_as(loc), validate_args=False).to_event(self._event_dims[name])

    # Reading the posterior ---------------------------------------------------------------------------------------

    def get_posterior(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the posterior marginal of every site, as a distribution over its own (constrained) values."""
        posteriors = {}
        for name, site in self._sites():
            normal = self._normal(name)
            transform = unconstraining_transform(site["fn"].support)
            posteriors[name] = (
                normal if transform is None else dist.TransformedDistribution(normal, [transform])
            )
        return posteriors

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] | int = ()) -> dict[str, Tensor]:
        """Draw all sites at once, without running the model.

        Args:
            sample_shape: leading dimensions of the draws; a number of draws, or a shape.

        Returns:
            draws of shape ``[*sample_shape, *site]`` by site name.
        """
        shape = torch.Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)
        return {name: posterior.sample(shape) for name, posterior in self.get_posterior().items()}

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the posterior median of every site; for weights that is the mean."""
        return {name: value[0] for name, value in self.quantiles([0.5]).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return posterior quantiles of every site, stacked along a new first dimension.

        Args:
            quantiles: probabilities between 0 and 1.
            args: ignored; Pyro's guides accept the model's arguments here.
            kwargs: ignored likewise.
        """
        results = {}
        for name, site in self._sites():
            normal = strip_event_dims(self._normal(name))
            levels = torch.as_tensor(quantiles, dtype=normal.loc.dtype, device=normal.loc.device)
            if bool(((levels < 0) | (levels > 1)).any()):
                raise ArgumentError(f"quantiles must lie between 0 and 1, got {quantiles}")
            u = normal.icdf(levels.reshape(-1, *[1] * normal.loc.dim()))
            transform = unconstraining_transform(site["fn"].support)
            results[name] = u if transform is None else transform(u)
        return results

    def _sites(self) -> Iterator[tuple[str, Any]]:
        if self.prototype_trace is None:
            raise GuideError(
                "this MeanFieldGuide has not seen its model yet: call guide.initialize(*args) with the arguments of "
                "the model"
            )
        return self.prototype_trace.iter_stochastic_nodes()

    # Creating parameters -------------------------------------------------------------------------------------------

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with preserve_buffers(), torch.no_grad():
            super()._setup_prototype(*args, **kwargs)
        try:
            sites = dict(self._sites())
            if not sites:
                raise ModelError(
                    "MeanFieldGuide found no latent site in the model: convert a network with to_bayesian_, or use "
                    "pyro.sample without obs="
                )
            self._warn_of_shared_parameters(sites)
            for name, site in sites.items():
                self._setup_site(name, site)
        except Exception:
            self.prototype_trace = None  # so that a corrected call starts anew
            raise

    def _setup_site(self, name: str, site: Any) -> None:
        """Create the parameters of a site unless they were loaded."""
        fn = site["fn"]
        if getattr(fn.support, "is_discrete", True):
            raise ModelError(
                f"latent site {name!r} is discrete ({type(strip_event_dims(fn)).__name__}), which a Gaussian cannot "
                "approximate: sum it out, replace it by a continuous relaxation, or hide it from this guide with "
                "pyro.poutine.block. If it is data, pass the observed values."
            )
        transform = unconstraining_transform(fn.support)
        value = site["value"].detach()
        loc = value if transform is None else transform.inv(value)
        event_dim = self._event_dims[name] = fn.event_dim + loc.dim() - value.dim()
        if self._complete_loaded(name, event_dim):
            return
        prior_scale = _prior_scale(fn, loc)
        for frame in site["cond_indep_stack"]:
            full_size = frame.full_size or frame.size
            if full_size != frame.size:
                prior_scale = periodic_repeat(prior_scale.expand_as(loc), full_size, frame.dim - event_dim)
                loc = periodic_repeat(loc, full_size, frame.dim - event_dim)
        loc = loc.clone(memory_format=torch.contiguous_format)
        deep_setattr(self.locs, name, PyroParam(loc, constraints.real, event_dim))
        if self.scale_family.learned:
            scale = self.scale_family.initial(loc, prior_scale, event_dim)
            deep_setattr(self.scales, name, PyroParam(scale, _SCALE_CONSTRAINT, event_dim))

    def _warn_of_shared_parameters(self, names: Iterable[str]) -> None:
        if pyro.settings.get("module_local_params"):
            return
        own = {id(parameter) for parameter in self.parameters()}
        stored = dict(pyro.get_param_store().named_parameters())
        keys = [f"{self._pyro_name}.locs.{name}" for name in names]
        taken = [key for key in keys if key in stored and id(stored[key]) not in own]
        if taken:
            warnings.warn(
                f"Pyro's parameter store already holds {taken[0]}: this guide will share it (and {len(taken) - 1} "
                "other means) with whatever guide made it, and drop values that it was given or loaded. Call "
                "pyro.clear_param_store() first, or give every module its own parameters with "
                "pyro.settings.set(module_local_params=True).",
                DviWarning,
                stacklevel=2,
            )

    # Loading a state_dict before the first look at the model -----------------------------------------------------

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        if self.prototype_trace is None:
            for key, stored in state_dict.items():
                for start, module, constraint in (
                    (f"{prefix}locs.", self.locs, constraints.real),
                    (f"{prefix}scales.", self.scales, _SCALE_CONSTRAINT),
                ):
                    if key.startswith(start) and key.endswith("_unconstrained"):
                        name = key.removeprefix(start).removesuffix("_unconstrained")
                        value = torch.distributions.transform_to(constraint)(stored.detach().clone())
                        deep_setattr(module, name, PyroParam(value, constraint))
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _complete_loaded(self, name: str, event_dim: int) -> bool:
        """Give loaded parameters the event dimension that only the model knows; False if there are none."""
        found = False
        for module in (self.locs, self.scales):
            *path, leaf = name.split(".")
            owner: Any = module
            for part in path:
                owner = getattr(owner, "_modules", {}).get(part)
            if leaf in getattr(owner, "_pyro_params", {}):
                constraint, _ = owner._pyro_params[leaf]
                owner._pyro_params[leaf] = (constraint, event_dim)
                found = True
        return found


def _prior_scale(prior: Any, loc: Tensor) -> Tensor:
    """Standard deviation of a prior in unconstrained space, if it is Normal there; 1 otherwise."""
    base = strip_event_dims(prior)
    if isinstance(base, torch.distributions.TransformedDistribution):
        base = strip_event_dims(base.base_dist)
    scale = base.scale.detach() if isinstance(base, torch.distributions.Normal) else torch.ones(())
    return scale.to(loc) if scale.dim() <= loc.dim() else loc.new_ones(())
