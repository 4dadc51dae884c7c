# SPDX-License-Identifier: Apache-2.0
"""Predictions, samples and files of a guide that is a point mass until a Gaussian is fitted around it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.core.arguments import check_count, check_positive, with_missing
from pyro_dvi.core.file_format import FORMAT_VERSION, check_format_version
from pyro_dvi.core.undisturbed import device_of
from pyro_dvi.errors import GuideError, warn
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Deterministic, Factor
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.laplace.energy.query import Query, ReadOutputs, refuse_torch_modes
from pyro_dvi.laplace.fitted import Fitted, KnownMinimum, ModelReference, PointMass
from pyro_dvi.laplace.methods.method import GaussianOutputs, LaplacePosterior
from pyro_dvi.links.class_links import ClassLink
from pyro_dvi.runs.log_joint import rescaled_model

_STAY = "predict(model, guide, x, method=Linearised()) linearises the model at the mode."
DRAWN_WEIGHTS = (
    "weights are drawn from a Laplace posterior. They lie outside the neighbourhood of the mode in which the Gaussian "
    f"is accurate, so predictions are too wide; {_STAY}"
)
WIDE_WEIGHTS = (
    "the variances of a Laplace posterior are propagated through the network. Unless the network is linear in these "
    f"weights, like a last layer, predictions can be far too wide; {_STAY}"
)


class GaussianAtMode(FactorisedGuide):
    """The part of :class:`~pyro_dvi.LaplaceGuide` that Pyro, predictions and files use.

    Subclasses find the mode and the Gaussian, and set three attributes. ``_fitted`` is the result of the last fit.
    ``_minimum`` is the minimum that was found last, or None. ``_failed`` is True if a fit failed.
    """

    prediction_rule: Any = "Linearised"  # a rule or its name

    def __init__(
        self,
        model: Callable,
        *,
        kl_weight: float | None = None,
        temperature: float = 1.0,
        init_loc_fn: Callable = init_to_module,
        create_plates: Callable | None = None,
    ) -> None:
        self._learns_kl_weight, kl_weight = kl_weight is None, 1.0 if kl_weight is None else kl_weight
        check_positive("kl_weight", kl_weight)
        check_positive("temperature", temperature)
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.kl_weight, self.temperature = float(kl_weight), float(temperature)
        self.scale_factors: dict[str, float] = {}
        self._fitted: Fitted | None = None
        self._minimum: KnownMinimum | None = None
        self._failed = False
        # The model without the wrapper that initialises means; not a submodule.
        self._plain_model = ModelReference(model)

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        return Deterministic()

    def check_objective(self, objective: Any) -> None:
        """Adopt the KL weight of an objective, unless the guide was given one."""
        if self._learns_kl_weight and hasattr(objective, "current_kl_weight"):
            self.kl_weight = objective.current_kl_weight()

    def unconstrained_mode(self) -> dict[str, Tensor]:
        """Return a copy of the mode of every site in unconstrained space."""
        return {site.name: site.loc.detach().clone() for site in self._sites()}

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the mode of every site; in unconstrained space, the mode is also the median."""
        return self._constrained(self.unconstrained_mode())

    def _point_mass(self, batches: Iterable[Any] | None = None) -> PointMass:
        """Return the current mode; a new guide is first initialised with the first batch."""
        if batches is not None:
            device = device_of(self._plain_model.get())
            refuse_torch_modes(device)
            if self.prototype_trace is None:
                args, kwargs = next(iter(Passes(batches, device)))
                self.initialize(*args, **kwargs)
        factors = dict(self.scale_factors)
        return PointMass(self.unconstrained_mode(), factors, self.kl_weight, self.temperature)

    def predictive(self, *inputs: Any, site: str | None = None, joint: bool = False) -> GaussianOutputs:
        """Return the Gaussian of the model's outputs for some inputs.

        Means and covariances are differentiable with respect to inputs that require gradients.

        Args:
            inputs: positional arguments of the model; observations may be omitted.
            site: name of an observed site, or of a ``pyro.deterministic`` site; None for the only observed site.
            joint: also compute the covariance between examples, ``joint_covariance`` of shape ``[B k, B k]``.

        Raises:
            GuideError: the guide is not fitted, or the mode or the model has changed since the fit.
            DataError: the inputs have no rows, contain NaN, or are not arguments of the model.
            ModelError: the model has no such site, or has several observed sites and ``site`` is None.
            UnsupportedError: the distribution cannot be linearised, or the method does not compute this covariance.
        """
        return GaussianOutputs.of(*self._query(inputs, site), joint=joint)

    def functions(
        self, count: int, *, seed: int | None = None, site: str | None = None
    ) -> Callable[..., Tensor]:
        r"""Sample functions from the posterior of the linearised model.

        .. math:: f_s(x) = f(x; \hat u) + J(x)\,(u_s - \hat u), \qquad u_s \sim \mathcal N(\hat u, P^{-1})

        Each function has the same latents at all inputs, so the functions are as smooth as the model, and their
        covariance between inputs is the ``joint_covariance`` of :meth:`predictive`.

        Args:
            count: S, the number of functions; S vectors of all latents are stored.
            seed: random seed; None takes a seed from torch's global generator.
            site: as in :meth:`predictive`.

        Returns:
            A function of the model's inputs, for any number of calls. It returns means of observations, or logits, of
            shape ``[S, B, ...]``, like the ``mean`` of :meth:`predictive`.

        Raises:
            GuideError: the guide is not fitted. The returned function also raises this error if the mode has moved or
                the guide was fitted again.
            UnsupportedError: the method of the fit cannot draw samples.
        """
        check_count("count", count)
        posterior = self.fitted.posterior
        seed = int(torch.randint(2**31 - 1, ())) if seed is None else seed
        generator = torch.Generator(posterior.mode.device).manual_seed(seed)
        steps = posterior.draw(count, generator).detach() - posterior.mode

        def values(*inputs: Any) -> Tensor:
            now, query = self._query(inputs, site)
            if now is not posterior:
                raise GuideError("guide.fit was called since these functions were drawn: draw them again")
            first = query.outputs.parameters[0]
            drawn = (query.mean + query.forward(steps))[..., : first.size]
            return drawn.reshape(count, -1, *first.shape)

        return values

    def _query(self, inputs: tuple[Any, ...], site: str | None) -> tuple[LaplacePosterior, Query]:
        if self._fitted is not None:
            self.initialize_loaded(*with_missing(self._plain_model.get(), inputs))
        fitted = self.fitted
        self.check_model(self._plain_model.get())
        return fitted.posterior, fitted.point.query(self._plain_model.get(), inputs, fitted.layout, site)

    @property
    def posterior(self) -> LaplacePosterior | None:
        """The Gaussian of the last :meth:`fit`; None before a fit, and after a fit that raised an error."""
        return None if self._fitted is None else self.fitted.posterior

    @property
    def _is_expected(self) -> bool:
        """Whether a Gaussian was requested, even if the fit failed."""
        return self._fitted is not None or self._failed

    @property
    def fitted(self) -> Fitted:
        """The Gaussian, with its mode and the sites that it covers.

        Raises:
            GuideError: there is no Gaussian, or the mode has moved since the fit.
        """
        fitted = self._fitted
        if fitted is None:
            raise GuideError(
                "this LaplaceGuide has no Gaussian: call guide.fit(batches, method) after training (if the fit failed, "
                "after guide.polish(batches), or with GGN()). predict(..., method=AtMean()) needs no Gaussian"
            )
        change = self._point_mass().change_since(fitted.point)
        if change is not None:
            raise GuideError(f"{change}: fit again")
        return fitted

    def check_model(self, model: Callable[..., Any]) -> None:
        """Raise an error if the current mode has a Gaussian, but it was fitted to a different model."""
        fitted = self._fitted
        if fitted is not None and self._point_mass().change_since(fitted.point) is None:
            fitted.check(model, self.median())

    # For predictions ----------------------------------------------------------------------------------------------

    @property
    def factorised(self) -> Callable[..., dict[str, Tensor]] | None:
        """The Gaussian as a guide with independent latents; None if its latents are correlated."""
        return self._at_marginals if self.fitted.posterior.independent else None

    def _at_marginals(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        warn(WIDE_WEIGHTS)
        marginals = self._marginals()
        return self._within_plates(lambda site: site.sample(marginals[site.name]), *args, **kwargs)

    def predicted_model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model with the scales that :meth:`tune` set."""
        return rescaled_model(model, self.scale_factors)

    def example_latents(self) -> dict[str, Tensor]:
        """Return the mode, for runs in which the values of the latents do not matter.

        A draw would not do, because not every method can draw samples.
        """
        return self.median()

    def linearised(
        self, inputs: tuple[Any, ...], read: ReadOutputs, link: ClassLink | None = None
    ) -> GaussianOutputs:
        """Return the Gaussian of the outputs that are computed with ``read``.

        Args:
            inputs: positional arguments of the model.
            read: differentiable function that returns the outputs, given unconstrained latents and the number of rows.
            link: the function of logits that is wanted, if it may need no covariances.
        """
        fitted = self.fitted
        query = Query(read, inputs, fitted.point.locs, fitted.layout, read=read)
        return GaussianOutputs.of(fitted.posterior, query, link=link)

    # For Pyro, files and devices ----------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Sample every latent site; Pyro calls this with the arguments of the model.

        If gradients are enabled, as in training, the values are the mode. If gradients are disabled (``Predictive``,
        ``Samples``) and the guide is fitted, the values are a draw from the Gaussian, and a warning is issued.
        """
        self.initialize(*args, **kwargs)
        if torch.is_grad_enabled() or not self._is_expected:
            return super().forward(*args, **kwargs)
        fitted, change = self._fitted, None
        if fitted is None or (change := self._point_mass().change_since(fitted.point)) is not None:
            change = change or "the last guide.fit raised an error"
            warn(f"{change}: the guide is a point mass until it is fitted again")
            return super().forward(*args, **kwargs)
        warn(DRAWN_WEIGHTS)
        event_dims = {site.name: site.event_dim for site in self._sites()}
        values = self._constrained(fitted.sampled(f"_{self._pyro_name}_latent", event_dims))
        deltas = {s.name: dist.Delta(values[s.name], event_dim=s.prior.event_dim) for s in self._sites()}
        return self._within_plates(lambda site: pyro.sample(site.name, deltas[site.name]), *args, **kwargs)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] | int = ()) -> dict[str, Tensor]:
        """Draw all sites at once from the Gaussian; before :meth:`fit`, every draw is the mode.

        Args:
            sample_shape: leading dimensions of the draws, or their number.

        Returns:
            Draws of shape ``[*sample_shape, *site]`` by site name, in constrained space.

        Raises:
            GuideError: the mode has moved since the fit, or the fit raised an error.
            UnsupportedError: the method of the fit cannot draw samples.
        """
        if not self._is_expected:
            return super().sample(sample_shape)
        shape = torch.Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)
        drawn = self.fitted.draw(shape.numel())
        return self._constrained({name: u.reshape(shape + u.shape[1:]) for name, u in drawn.items()})

    def _marginals(self) -> dict[str, Any]:
        marginals = super()._marginals()
        if self._is_expected:
            for name, variance in self.fitted.marginal_variances().items():
                normal = dist.Normal(marginals[name].mean.detach(), variance.sqrt(), validate_args=False)
                marginals[name] = normal.to_event(self._seen[name].event_dim)
        return marginals

    def get_extra_state(self) -> dict[str, Any]:
        """Return the format version, the Gaussian and the tuned scales, for ``state_dict``.

        A Gaussian that needs the model and the data to predict, such as one with conjugate gradients, is left out with
        a warning.
        """
        return {
            "version": FORMAT_VERSION,
            "gaussian": None if self._fitted is None else self._fitted.state(),
            "scale_factors": dict(self.scale_factors),
            "kl_weight": self.kl_weight,
        }

    def set_extra_state(self, state: Any) -> None:
        """Restore the state that :meth:`get_extra_state` returned.

        Raises:
            CheckpointError: the state was written by a later release, or the class of its Gaussian is unknown.
        """
        state = {} if state is None else state
        check_format_version("the state of the guide", state.get("version", 1))
        self.scale_factors = dict(state.get("scale_factors", {}))
        self.kl_weight = state.get("kl_weight", 1.0) if self._learns_kl_weight else self.kl_weight
        self._fitted, self._failed, self._minimum = Fitted.from_state(state.get("gaussian")), False, None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._fitted = None if self._fitted is None else self._fitted.moved(fn)
        self._minimum = None  # a new dtype rounds the mode
        return self

    def __repr__(self) -> str:
        """Describe the mode, whether it is a minimum, the Gaussian, and multipliers of tuned scales."""
        if self.prototype_trace is None:
            return f"{type(self).__name__}(not initialised)"
        point, known = self._point_mass(), self._minimum
        is_minimum = known is not None and point.change_since(known.point) is None
        found = "a minimum" if is_minimum else "not known to be a minimum"
        if known is not None and is_minimum and len(known.sites) < len(point.locs):
            found += f" in {len(known.sites)} of {len(point.locs)} sites"
        gaussian, change = "no Gaussian yet: guide.fit(batches)", None
        if self._fitted is not None:
            gaussian = f"{self._fitted.posterior!r}, precision {type(self._fitted.precision).__name__}"
            change = point.change_since(self._fitted.point)
        mode = f"mode of {sum(u.numel() for u in point.locs.values())} latents, {found}"
        factors = ", ".join(sorted({f"{factor:.3g}" for factor in self.scale_factors.values()}))
        tuned = f"scale_factors {factors}" if factors else None
        return f"{type(self).__name__}({'; '.join(filter(None, (mode, gaussian, tuned, change)))})"


def largest_variance(guide: GaussianAtMode, size: int) -> dict[str, Tensor]:
    r"""Return masks of the weights with the largest posterior variances, for ``subset=``.

    .. math:: S = \arg\max_{|S| = \text{size}} \sum_{i \in S} \sigma_i^2

    Status: optimal for independent latents; a heuristic for other Gaussians. Optimal means that, among all subsets of
    this size, fixing the other latents at the mode gives the posterior that is closest to the full posterior in
    Wasserstein distance. Variances are in squared units of the latents, so weights that the data do not determine come
    first.

    Args:
        guide: a guide fitted with a method that computes variances, such as ``Diagonal()`` for large networks.
        size: number of latents to choose.

    Returns:
        For each site of the fit, a boolean mask with the shape of the site's unconstrained values.

    Raises:
        ArgumentError: ``size`` is zero.
        GuideError: the guide is not fitted, or its mode has moved since.
        UnsupportedError: the method of the fit does not compute variances.

    Source: Daxberger et al. (2021), "Bayesian Deep Learning via Subnetwork Inference", Section 5.

    Example:
        >>> import pyro_dvi as dvi
        >>> from pyro_dvi.laplace import Dense, Diagonal, LaplaceGuide
        >>> net = dvi.to_bayesian_(torch.nn.Linear(3, 1, bias=False))
        >>> guide = LaplaceGuide(dvi.regressor(net, num_data=2, noise_scale=1.0))
        >>> batches = [(torch.tensor([[3.0, 1.0, 2.0], [3.0, 1.0, 2.0]]), torch.zeros(2, 1))]
        >>> _ = guide.polish(batches, progress=False)
        >>> _ = guide.fit(batches, Diagonal())
        >>> masks = largest_variance(guide, 2)
        >>> masks
        {'net.weight': tensor([[False,  True,  True]])}
        >>> guide.fit(batches, Dense(), subset=masks).precision
        tensor([[3., 4.],
                [4., 9.]], dtype=torch.float64)
    """
    variances, layout = guide.fitted.posterior.marginal_variance(), guide.fitted.layout
    check_count("size", size)
    chosen = torch.zeros_like(variances, dtype=torch.bool)
    chosen[variances.topk(size).indices] = True
    return layout.place(layout.split(chosen))
