# SPDX-License-Identifier: Apache-2.0
"""The base class of factorised guides, which finds sites, creates their parameters, samples, saves and loads."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from copy import copy
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.infer.autoguide.utils import deep_setattr
from pyro.nn import PyroModule, PyroParam
from pyro.ops.tensor_utils import periodic_repeat
from torch import Tensor
from torch.distributions import constraints, transform_to

from pyro_dvi.core.distributions import broadcasts_to, strip_event_dims
from pyro_dvi.core.undisturbed import preserve_buffers
from pyro_dvi.errors import ArgumentError, GuideError, ModelError, PyroDviError, warn
from pyro_dvi.gaussians.optimal_scale import OptimalScaleNormal
from pyro_dvi.guides.factors import Factor, GuideSite, complete_loaded, owner_of
from pyro_dvi.guides.given_rows import FollowsRows
from pyro_dvi.runs.explained import AS_A_MODEL, explained_errors
from pyro_dvi.runs.latents import unconstraining_transform
from pyro_dvi.runs.posterior_prior import PosteriorPrior, posterior_prior
from pyro_dvi.runs.trained_for import decoded, encoded, note_trained_for, temperature_of, trained_for


class FactorisedGuide(FollowsRows):
    r"""One independent factor per latent site, in unconstrained space.

    .. math:: q(u) = \prod_s q_s(u_s), \qquad \theta_s = T_s(u_s)

    To add a guide, list in ``_constraints`` the modules that hold the spread parameters of sites, and choose the factor
    of each site in ``_factor_of``.

    Attributes:
        locs: module of means, ``guide.locs.<site>``; ``<Guide>.locs.<site>`` in the parameter store.
    """

    # Constraints of the spread parameters, by the attribute that stores them.
    _constraints: dict[str, Any] = {}  # noqa: RUF012

    def __init__(
        self, model: Callable, *, init_loc_fn: Callable, create_plates: Callable | None = None
    ) -> None:
        if not callable(model):
            raise TypeError(f"model must be callable, got {type(model).__name__}")
        started: Any = InitMessenger(init_loc_fn)(model)
        started.__wrapped__ = model  # gives access to its signature and weights
        super().__init__(started, create_plates=create_plates)
        self.locs = PyroModule()
        for store in self._constraints:
            setattr(self, store, PyroModule())
        self._seen: dict[str, GuideSite] = {}
        # If true, sites without loaded parameters are treated as observed sites whose observation is missing.
        self._only_loaded = False

    @abstractmethod
    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        """Choose the posterior of a site.

        Args:
            name: the site's name.
            site: Pyro's message of the site, from the first run of the model.
            loc: the site's initial mean, in unconstrained space.
        """

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Unless the parameters exist, run the model once with these arguments and create them."""
        if self.prototype_trace is None:
            with explained_errors(self.model, args, kwargs):
                self._setup_prototype(*args, **kwargs)

    def initialize_loaded(self, *args: Any) -> bool:
        """Run the model once after loading a state, with arguments that may lack observations.

        Returns:
            True if parameters were loaded and there are no local latents; values of local latents may belong to other
            examples.
        """
        if self.prototype_trace is None and next(self.parameters(), None) is not None:
            self._only_loaded = True
            try:
                self.initialize(*args)
            finally:
                self._only_loaded = False
            if any(site.plates for site in self._sites()):
                self.prototype_trace = None
        return self.prototype_trace is not None

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every latent site once; Pyro calls this method with the arguments of the model.

        Returns:
            Draws by site name.
        """
        self.initialize(*args, **kwargs)
        return self._within_plates(self._sample_site, *args, **kwargs)

    def _within_plates(
        self, sample: Callable[[GuideSite], Tensor], *args: Any, **kwargs: Any
    ) -> dict[str, Tensor]:
        """Draw every site with ``sample``, inside the plates of the site."""
        plates = self._create_plates(*args, **kwargs)
        result = {}
        for site in self._sites():
            with ExitStack() as stack:
                for plate in site.plates:
                    stack.enter_context(plates[plate])
                result[site.name] = sample(site)
        return result

    def _sample_site(self, site: GuideSite) -> Tensor:
        return site.sample(site.posterior())

    def _marginals(self) -> dict[str, Any]:
        """Posterior marginals of all sites in unconstrained space."""
        return {site.name: site.posterior() for site in self._sites()}

    # Reading the posterior ---------------------------------------------------------------------------------------

    def get_posterior(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Return the posterior marginal of every site, as a distribution over its constrained values."""
        transforms = {site.name: site.transform for site in self._sites()}
        return {
            name: marginal if (t := transforms[name]) is None else dist.TransformedDistribution(marginal, [t])
            for name, marginal in self._marginals().items()
        }

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] | int = ()) -> dict[str, Tensor]:
        """Draw all sites at once, without running the model.

        Args:
            sample_shape: leading dimensions of the draws, or their number.

        Returns:
            Draws of shape ``[*sample_shape, *site]`` by site name.
        """
        shape = torch.Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)
        return {name: posterior.sample(shape) for name, posterior in self.get_posterior().items()}

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the posterior median of every site; for weights, the median is also the mean."""
        return {name: value[0] for name, value in self.quantiles([0.5]).items()}

    @torch.no_grad()
    def quantiles(self, quantiles: Sequence[float] | Tensor, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return posterior quantiles of every site, stacked along a new first dimension.

        Args:
            quantiles: probabilities between 0 and 1.
            args: ignored; accepted for compatibility with Pyro's guides.
            kwargs: also ignored.
        """
        results = {}
        asked = torch.as_tensor(quantiles)
        if bool(((asked < 0) | (asked > 1)).any()):
            raise ArgumentError(f"quantiles must lie between 0 and 1, got {quantiles}")
        for name, marginal in self._marginals().items():
            posterior = strip_event_dims(marginal)
            levels = asked.to(posterior.mean).reshape(-1, *[1] * posterior.mean.dim())
            fixed = isinstance(posterior, dist.Delta)
            results[name] = (posterior.mean + 0 * levels) if fixed else posterior.icdf(levels)
        return self._constrained(results)

    def _constrained(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map unconstrained values of all sites to constrained values."""
        return {site.name: site.constrained(values[site.name]) for site in self._sites()}

    @torch.no_grad()
    def initial_scales(self) -> dict[str, Tensor]:
        """Return the posterior standard deviations at the start of training, in unconstrained space.

        If the standard deviations depend on the mean (as for multiplicative noise), the current mean is used.

        Returns:
            Standard deviations by site name, of the sites whose spread is learned.
        """
        scales = {}
        for site in self._sites():
            if site.spreads is None:
                continue
            loc = site.loc
            prior_scale = prior_scale_of(site.prior, loc)
            if not broadcasts_to(prior_scale.shape, loc.shape):  # it has the shape of one minibatch
                prior_scale = prior_scale.median()
            spread = site.factor.initial(loc, prior_scale, site.event_dim)
            scales[site.name] = site.factor.distribution(loc, spread).stddev
        return scales

    def as_prior(self, *, exclude: str | Iterable[str] = ()) -> PosteriorPrior:
        """Return the posterior as the prior of the next task in continual learning.

        The variances of a cold posterior are divided by its temperature, so that earlier data count once. The posterior
        is copied, so training this guide further does not change the prior. A new guide for the model with this prior
        starts at the means of the old guide. The new prior works with every objective, because the KL divergence to its
        Gaussians is exact.

        Args:
            exclude: names or patterns of sites that keep the prior of the model, such as heads of single tasks and
                constrained sites.

        Returns:
            A function that takes a model and returns it with the new prior.

        Raises:
            ArgumentError: an entry of ``exclude`` matches no site.
            GuideError: the guide is not initialised.
            UnsupportedError: a site is constrained, or its posterior is a point mass.

        Example:
            >>> import torch
            >>> def model(x):
            ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
            ...     pyro.sample("y", dist.Normal(w, 1.0), obs=x)
            >>> from pyro_dvi import MeanFieldGuide
            >>> guide = MeanFieldGuide(model)
            >>> guide.initialize(torch.zeros(()))
            >>> next_model = guide.as_prior()(model)
            >>> trace = pyro.poutine.trace(next_model).get_trace(torch.zeros(()))
            >>> trace.nodes["w"]["fn"].scale.item()
            0.0497...
        """
        posteriors = [(site.name, site.posterior(), site.transform is None) for site in self._sites()]
        return posterior_prior(posteriors, exclude, type(self).__name__, temperature_of(self))

    def _sites(self) -> Iterable[GuideSite]:
        if self.prototype_trace is None:
            raise GuideError(
                f"this {type(self).__name__} is not initialised: call guide.initialize(*args of the model)"
            )
        return self._seen.values()

    # Creating parameters -------------------------------------------------------------------------------------------

    def _setup_prototype(self, *args: Any, **kwargs: Any) -> None:
        with preserve_buffers(), torch.no_grad():
            super()._setup_prototype(*args, **kwargs)
        try:
            trace: Any = self.prototype_trace
            sites = dict(trace.iter_stochastic_nodes())
            loaded = {name for name in sites if owner_of(self.locs, name) is not None}
            if self._only_loaded:
                for name, site in sites.items():
                    site["is_observed"] = name not in loaded
                sites = {name: sites[name] for name in sites if name in loaded}
                # Pyro also collected the plates of observed sites
                self._prototype_frames = {f.name: f for s in sites.values() for f in s["cond_indep_stack"]}
            if not sites:
                raise ModelError(
                    f"{type(self).__name__} found no latent site in the model: add a pyro.sample without obs=. "
                    f"{AS_A_MODEL}"
                )
            fresh = [name for name in sites if name not in loaded]
            if 0 < len(fresh) < len(sites):
                raise GuideError(
                    f"the loaded state has no site {fresh[0]!r}, but this site is latent in the model. If it is data, "
                    "pass the observed values to guide.initialize(*args); otherwise, load a state of this model"
                )
            self._check_sites(sites)
            self._warn_of_shared_parameters(sites)
            self._seen = {name: self._setup_site(name, site) for name, site in sites.items()}
            for site in sites.values():  # from now on, only shapes are read
                site["value"] = site["value"].new_zeros(()).expand(site["value"].shape)
                if hasattr(site["fn"], "initial_value"):
                    site["fn"] = copy(site["fn"])
                    site["fn"].initial_value = None
        except Exception:
            self.prototype_trace = None  # so that a corrected call starts afresh
            raise

    def _check_sites(self, sites: dict[str, Any]) -> None:
        """Raise an error if options of the guide do not fit the sites of the model."""

    def _setup_site(self, name: str, site: Any) -> GuideSite:
        """Create the parameters of a site unless they were loaded, and record where they are."""
        fn = site["fn"]
        if getattr(fn.support, "is_discrete", True):
            raise ModelError(
                f"latent site {name!r} is discrete ({type(strip_event_dims(fn)).__name__}): marginalise it, relax it, "
                "or hide it with pyro.poutine.block. If it is observed, pass the observed values"
            )
        try:
            transform = unconstraining_transform(fn.support)
        except NotImplementedError as error:  # for example a sphere
            raise ModelError(
                f"latent site {name!r} ({type(strip_event_dims(fn)).__name__}) has a support without a transform from "
                f"unconstrained space: reparameterise it, for example with poutine.reparam(model, {{{name!r}: "
                "ProjectedNormalReparam()})"
            ) from error
        value = site["value"].detach()
        loc = value if transform is None else transform.inv(value)
        event_dim = fn.event_dim + loc.dim() - value.dim()
        factor = self._factor_of(name, site, loc)
        prior_scale = prior_scale_of(fn, loc)
        for frame in site["cond_indep_stack"]:
            full_size = frame.full_size or frame.size
            if full_size != frame.size:
                prior_scale = periodic_repeat(prior_scale.expand_as(loc), full_size, frame.dim - event_dim)
                loc = periodic_repeat(loc, full_size, frame.dim - event_dim)
        spread = None if factor.store is None else factor.initial(loc, prior_scale, event_dim)
        values = {"locs": loc.clone(memory_format=torch.contiguous_format)}
        if spread is not None:
            values[str(factor.store)] = spread
        if loaded := self._owners(name):
            complete_loaded(loaded, name, values, event_dim, type(self).__name__)
        else:
            for kind, initial in values.items():
                self._create(kind, name, initial, event_dim)
        plates, owners = tuple(frame.name for frame in site["cond_indep_stack"]), self._owners(name)
        spreads = None if factor.store is None else owners[factor.store]
        return GuideSite(name, fn, transform, event_dim, plates, factor, owners["locs"], spreads)

    def _owners(self, site: str) -> dict[str, Any]:
        """Return the modules that hold the parameters of a site, by kind of parameter."""
        owners = {kind: owner_of(getattr(self, kind), site) for kind in ("locs", *self._constraints)}
        return {kind: owner for kind, owner in owners.items() if owner is not None}

    def _create(self, kind: str, site: str, value: Tensor, event_dim: int = 0) -> None:
        deep_setattr(getattr(self, kind), site, PyroParam(value, self._constraint(kind), event_dim))

    def _constraint(self, kind: str) -> Any:
        return self._constraints.get(kind, constraints.real)

    def __getstate__(self) -> Any:
        # Pyro would drop the model from this guide instead of from the copy, and the guide could no longer predict.
        model, master = self._model, self.master
        try:
            return super().__getstate__()
        finally:
            self._model, self.master = model, master

    def _warn_of_shared_parameters(self, names: Iterable[str]) -> None:
        own = {id(parameter) for parameter in self.parameters()}
        stored = dict(pyro.get_param_store().named_parameters())
        taken = [key for name in names if (key := f"{self._pyro_name}.locs.{name}") in stored]
        taken = [key for key in taken if id(stored[key]) not in own]
        if taken and not pyro.settings.get("module_local_params"):
            warn(
                f"Pyro's parameter store already holds {taken[0]}: this guide will share it (and {len(taken) - 1} "
                "other means) with the guide that created it. To avoid this, call pyro.clear_param_store() first"
            )

    # The state_dict includes the format version and the prediction rule

    def get_extra_state(self) -> Any:
        """Return the format version, the prediction rule and the temperature of the posterior."""
        return encoded(trained_for(self), temperature_of(self))

    def set_extra_state(self, state: Tensor) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        note_trained_for(self, *decoded(state))

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Load a state, as torch's modules do; a guide that is not initialised gets its parameters from the state.

        Raises:
            CheckpointError: the state was written by a later release.
            GuideError: the state belongs to another guide or model.
        """
        try:
            return super().load_state_dict(state_dict, *args, **kwargs)
        except PyroDviError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError) as error:
            raise GuideError(
                f"the state does not fit this {type(self).__name__}: construct guide and model as saved ({error})"
            ) from error

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        # The state may hold parameters only.
        state_dict.setdefault(f"{prefix}_extra_state", self.get_extra_state())
        super()._load_from_state_dict(state_dict, prefix, *args)  # must come first: checks the format version
        if self.prototype_trace is None:
            for key, stored in state_dict.items():
                kind, _, site = key.removeprefix(prefix).partition(".")
                is_ours = key.startswith(prefix) and kind in ("locs", *self._constraints)
                if is_ours and site.endswith("_unconstrained"):
                    value = transform_to(self._constraint(kind))(stored.detach().clone())
                    self._create(kind, site.removesuffix("_unconstrained"), value)


def prior_scale_of(prior: Any, loc: Tensor) -> Tensor:
    """Return the standard deviation of a prior that, given its scale, is Normal in unconstrained space; otherwise 1."""
    base = strip_event_dims(prior)
    if isinstance(base, torch.distributions.TransformedDistribution):
        base = strip_event_dims(base.base_dist)
    known = isinstance(base, torch.distributions.Normal | OptimalScaleNormal)
    scale = base.scale.detach() if known else torch.ones(())
    return scale.to(loc) if scale.dim() <= loc.dim() else loc.new_ones(())
