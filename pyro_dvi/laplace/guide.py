# SPDX-License-Identifier: Apache-2.0
"""The posterior as a Gaussian around its mode."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.bayesian import init_to_module
from pyro_dvi.core.arguments import check_choice, check_count, check_positive, with_missing
from pyro_dvi.errors import warn
from pyro_dvi.guides.base import FactorisedGuide
from pyro_dvi.guides.factors import Deterministic, Factor
from pyro_dvi.laplace.approximation import DRAWN_WEIGHTS, WIDE_WEIGHTS, Approximation
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.laplace.energy.precision import GGN
from pyro_dvi.laplace.energy.query import Query, ReadOutputs, Subset, refuse_torch_modes
from pyro_dvi.laplace.evidence.candidates import Candidates, PriorPrecision, Scale
from pyro_dvi.laplace.evidence.evidence import ByLanczos, Evidence, log_evidence
from pyro_dvi.laplace.evidence.scale_tuning import ByEvidence, Criterion, TuningCurve, tune
from pyro_dvi.laplace.fitted import Fitted, ModelReference, PointMass, rescaled_model
from pyro_dvi.laplace.methods.dense_precision import Dense
from pyro_dvi.laplace.methods.method import GaussianOutputs, LaplacePosterior, Method, check_method
from pyro_dvi.laplace.mode.convergence import Certificate, Unconverged, chosen_policy
from pyro_dvi.laplace.mode.diagnosis import Diagnosis, diagnose, sound
from pyro_dvi.laplace.mode.search import Polished, polish


class LaplaceGuide(FactorisedGuide):
    r"""Laplace's approximation: a Gaussian around the most probable weights.

    .. math:: q(u) = \mathcal N(\hat u, P^{-1}), \qquad \hat u = \arg\min_u U(u), \qquad
        U(u) = -\tfrac1\beta\log p(D \mid u) - \log p(u)

    In training it is a point mass in unconstrained space, for ``SVI`` with any ELBO: its loss is
    :math:`\beta U` up to a constant. Then :meth:`polish` finds the minimum itself, :meth:`fit` the Gaussian, and
    :meth:`predictive`, ``predict`` and :meth:`log_evidence` use it. Predictions linearise the model around the mode.

    Status: the Gaussian is exact for linear models with Gaussian noise; elsewhere a local approximation.

    Args:
        model: a Pyro model whose latents are continuous.
        kl_weight: :math:`\beta`, as the objective had it in training; the posterior is that of the tempered
            likelihood :math:`p(D \mid u)^{1/\beta}`.
        init_loc_fn: Pyro initialisation strategy of the mode; by default the weights that a network had before
            :func:`~pyro_dvi.to_bayesian_`: a trained network is a mode already.
        create_plates: as in Pyro's guides.

    Attributes:
        locs: module of modes, ``guide.locs.<site>``.
        posterior: result of the last :meth:`fit`; None before, and after an error.
        scale_factors: multipliers of the scales of sites in U, latent or observed; set by :meth:`tune`, not used in
            training.

    Raises:
        ModelError: a latent is discrete, or there is none.
        ArgumentError: a KL weight that is not positive.

    Source: MacKay (1992); Immer, Korzepa & Bauer (2021) for the linearised predictive.

    Example:
        >>> import pyro, pyro.distributions as dist, torch
        >>> def model(x, y=None):
        ...     slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)
        >>> x = torch.ones(3)
        >>> guide = LaplaceGuide(model)
        >>> guide.initialize(x, x)
        >>> _ = guide.polish([(x, x)], progress=False)
        >>> _ = guide.fit([(x, x)], Dense())
        >>> guide.predictive(x).variance
        tensor([0.2500, 0.2500, 0.2500])
    """

    prediction_rule: Any = "Linearised"  # the name of a rule, or a rule

    def __init__(
        self,
        model: Callable,
        *,
        kl_weight: float = 1.0,
        init_loc_fn: Callable = init_to_module,
        create_plates: Callable | None = None,
    ) -> None:
        check_positive("kl_weight", kl_weight)
        super().__init__(model, init_loc_fn=init_loc_fn, create_plates=create_plates)
        self.kl_weight = float(kl_weight)
        self.scale_factors: dict[str, float] = {}
        self._known = Approximation()
        self._plain_model = ModelReference(model)  # without the initialisation of means, and no submodule

    def _factor_of(self, name: str, site: Any, loc: Tensor) -> Factor:
        return Deterministic()

    # The mode -----------------------------------------------------------------------------------------------------

    def unconstrained_mode(self) -> dict[str, Tensor]:
        """Return a copy of the mode of every site in unconstrained space."""
        return {site.name: site.loc.detach().clone() for site in self._sites()}

    @torch.no_grad()
    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Return the mode of every site; in unconstrained space that is the median."""
        return self._constrained(self.unconstrained_mode())

    def _point_mass(self, batches: Iterable[Any] | None = None) -> PointMass:
        """Return the mode as it is; a guide that has not seen its model yet looks at it with the first batch."""
        if batches is not None:
            device = self._plain_model.device
            refuse_torch_modes(device)
            if self.prototype_trace is None:
                args, kwargs = next(iter(Passes(batches, device)))
                self.initialize(*args, **kwargs)
        return PointMass(self.unconstrained_mode(), dict(self.scale_factors), self.kl_weight)

    def _point_seen(self, energy: Energy) -> PointMass:
        return self._point_mass().seen_with(energy, self._plain_model.get(), self.median())

    def energy(self, batches: Iterable[Any], *, subset: Subset | None = None) -> Energy:
        """Return U on these batches, with its gradient and products.

        Args:
            batches: all the data: a loader or a list of batches, as for :func:`~pyro_dvi.fit`.
            subset: the latents that vary, as in ``guide.fit``; the rest stays at its mode. None: all.
        """
        return self._point_mass(batches).energy(self._plain_model.get(), batches, subset)

    def query(self, *inputs: Any, site: str | None = None, subset: Subset | None = None) -> Query:
        """Return the outputs at the mode for some inputs, with products of their Jacobian.

        ``guide.predictive(x)`` does with it what is usually wanted; ``guide.posterior`` takes it for the rest.

        Args:
            inputs: positional arguments of the model; observations may be left out.
            site: an observed site, or one of ``pyro.deterministic``; None for the one observed site.
            subset: the latents that vary, as in ``guide.fit``.
        """
        point = self._point_mass()
        return point.query(self._plain_model.get(), inputs, point.layout(subset), site)

    def polish(
        self,
        batches: Iterable[Any],
        *,
        subset: Subset | None = None,
        tolerance: float = 1e-10,
        max_gradients: int = 3000,
        progress: bool = True,
    ) -> Polished:
        r"""Bring the mode to the minimum of U, and prove it by the true Hessian, which is known by its products only.

        Ctrl-C ends the search; the best point so far is kept then, and after any error.

        Status: a local minimum with a positive definite Hessian, as far as 200 Lanczos steps show. Where U has kinks
        (ReLU), a point at rest in the norm of the Gauss-Newton matrix, or a warning.

        Args:
            batches: all the data, the same in every pass.
            subset: the latents that may move, as in ``guide.fit``; None: all.
            tolerance: on the Newton decrement :math:`g^\top P^{-1} g`, in squared posterior standard deviations.
            max_gradients: of all data, that the search may take: by default as many as a training of 3,000 steps.
            progress: show a progress bar where there is a terminal or notebook.

        Raises:
            UnconvergedError: no minimum was found; ``report`` says how far it came.
            NonFiniteError: U is NaN or infinite at the mode.
            DataError: batches that do not hold all data, or change.
        """

        def keep(point: Tensor) -> None:
            with torch.no_grad():
                for name, value in energy.layout.place(energy.layout.split(point), energy.locs).items():
                    self._seen[name].loc.copy_(value)

        energy = self.energy(batches, subset=subset)
        report = polish(energy, keep, tolerance=tolerance, max_gradients=max_gradients, progress=progress)
        if report.converged:
            self._known.certificate = Certificate.of(self._point_seen(energy), energy, report)
        return report

    def diagnose(
        self,
        batches: Iterable[Any],
        *,
        subset: Subset | None = None,
        tolerance: float = 1e-2,
        steps: int = 200,
    ) -> Diagnosis:
        r"""Find out whether the mode is a minimum of U, without moving it; ``print`` the result.

        After ``tune``, U has the tuned scales, of which a mode that was trained before is no minimum.

        Args:
            batches: all the data.
            subset: the latents that vary, as in ``guide.fit``; None: all.
            tolerance: on the Newton decrement :math:`g^\top P^{-1} g`; 0.01 is a tenth of a standard deviation.
            steps: of the Lanczos recursion, and of conjugate gradients; up to two gradients of all data each.

        Raises:
            DataError: batches that do not hold all data, or change.
            ModelError: the model draws random numbers of its own, or a latent is NaN.
            NonFiniteError: U is NaN or infinite.
        """
        energy = self.energy(batches, subset=subset)
        found = diagnose(energy, tolerance=tolerance, steps=steps)
        if found.near:
            self._known.certificate = Certificate.of(self._point_seen(energy), energy, found)
        return found

    # Its Gaussian -------------------------------------------------------------------------------------------------

    def fit(
        self,
        batches: Iterable[Any],
        method: Method | None = None,
        *,
        subset: Subset | None = None,
        unconverged: Unconverged | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> LaplacePosterior:
        """Put the Gaussian around the mode.

        Untuned, class probabilities are often far less certain than the data warrant: see :meth:`tune`. After
        :meth:`polish` on the same data the mode is not looked at again. A fit that ends in an error leaves no Gaussian.

        Args:
            batches: all the data: a loader or a list of batches, as for :func:`~pyro_dvi.fit`.
            method: for the representation of the Gaussian; ``Dense()`` by default.
            subset: uncertain sites, by name or pattern (``"net.4.*"`` for a last layer), or a mapping of these to True,
                False or boolean masks of their unconstrained entries; see
                :func:`~pyro_dvi.laplace.largest_variance`. The rest stays at its mode. None: all.
            unconverged: policy for a mode that is no minimum: ``Refuse()``, the default, raises where the precision is
                the Hessian and warns otherwise; ``UseGGN()``, ``Accept()``.
            seed: of random numbers.
            progress: count the work, in gradients of all data, where there is a terminal or notebook.

        Returns:
            the Gaussian; also ``guide.posterior``.

        Raises:
            UnconvergedError: the precision is the Hessian, and the mode no minimum, or U has kinks (ReLU);
                ``diagnosis`` says why.
            DataError: batches that do not hold all data, or change, or hold NaN.
            ModelError: the model draws random numbers of its own.
            NonFiniteError: the likelihood, or the prior, is NaN or infinite.
        """
        method = Dense() if method is None else method
        policy = chosen_policy(unconverged)
        check_method(method)
        energy = self._point_mass(batches).energy(self._plain_model.get(), batches, subset)
        return self._fit(energy, method, policy, lambda used, local: used.fit(local, seed=seed), progress)

    def _fit(
        self,
        energy: Energy,
        method: Method,
        policy: Unconverged,
        make: Callable[[Method, LocalEnergy], LaplacePosterior],
        progress: bool,
    ) -> LaplacePosterior:
        point, model = self._point_mass(), self._plain_model.get()
        return self._known.fit(
            energy, method, policy, point, model, self.median(), make=make, progress=progress
        )

    def log_evidence(
        self,
        batches: Iterable[Any],
        *,
        determinant: ByLanczos | None = None,
        subset: Subset | None = None,
    ) -> Evidence:
        r"""Estimate the log evidence of the model by Laplace's method, with every constant.

        .. math:: \log p(D) \approx -U(\hat u) + \tfrac D2 \log 2\pi - \tfrac12 \log\det P

        Status: exact for linear models with Gaussian noise; elsewhere Laplace's approximation, which counts one mode.
        With a subset it is the evidence given the sites that stay fixed.

        Args:
            batches: all the data.
            determinant: ``ByLanczos(num_probes, steps)``. None: the determinant of the last :meth:`fit`, if its method
                knows one and the batches are the same; else of the matrix up to D = 1,000, and by Lanczos beyond.
            subset: without a fit: uncertain sites. None: that of the fit, or all.

        Raises:
            ArgumentError: ``kl_weight`` is not 1: a tempered posterior has no evidence.
            GuideError: the mode, or the model, has changed since the fit, or the fit ended in an error.
            ModelError: the model draws random numbers of its own.
            NonFiniteError: the likelihood, or the prior, is NaN or infinite.
            NotPositiveDefiniteError: the precision is not positive definite.
        """
        fitted = self.fitted if self._known.failed or (self._known.fitted and subset is None) else None
        energy = self.energy(batches, subset=subset if fitted is None else fitted.layout)
        if fitted is not None:
            self.check_model(self._plain_model.get(), plates=True)
        known = () if fitted is None else (fitted.posterior, fitted.point.data)
        precision = GGN() if self._known.fitted is None else self._known.fitted.precision
        return log_evidence(energy, precision, determinant, *known)

    def tune(
        self,
        batches: Iterable[Any],
        scale: Scale | None = None,
        criterion: Criterion | None = None,
        *,
        method: Method | None = None,
        subset: Subset | None = None,
        values: Sequence[float] | Tensor | None = None,
        refinements: int = 12,
        unconverged: Unconverged | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> TuningCurve:
        r"""Choose the scale of priors, or of the noise, after training; then fit with it.

        The mode stays where it is, although it is no minimum of U with another scale (``polish`` moves it there).
        Values are relative to the model as it is written; several scales are tuned one after the other. Tune a
        classifier by validation data where there are any: by the evidence its class probabilities are under-confident.

        Args:
            batches: all the data.
            scale: ``PriorPrecision()`` for one multiplier of all priors (the default), ``PriorPrecision("net.0.*")``,
                ``NoiseScale()``.
            criterion: ``ByEvidence()``, the default, or ``ByValidation(batches)``.
            method: as for :meth:`fit`; None: that of the last fit.
            subset: as for :meth:`fit`; None: that of the last fit.
            values: to try; by default 25 from 0.001 to 1,000 for a precision, 17 from 0.1 to 10 for a noise.
            refinements: more values, between the neighbours of the best one.
            unconverged: as for :meth:`fit`.
            seed: of random numbers.
            progress: show a progress bar.

        Returns:
            The curve; ``best`` is the value that was taken, and is in ``guide.scale_factors``.

        Warns:
            DviWarning: the best value is the smallest or largest.

        Raises:
            ArgumentError: values that are not positive; the evidence of a tempered posterior.
            ModelError, UnsupportedError: there is no such scale in the model.
        """
        last = self._known.fitted
        if last is not None and subset is None:
            subset = last.layout
        chosen = method or (last and last.method) or Dense(GGN() if last is None else last.precision)
        scale = PriorPrecision() if scale is None else scale
        criterion = ByEvidence() if criterion is None else criterion
        check_method(chosen)
        check_choice("scale", scale, Scale, "PriorPrecision('net.0.*') or NoiseScale()")
        check_choice("criterion", criterion, Criterion, "ByEvidence() or ByValidation(batches)")
        check_count("refinements", refinements, least=0)
        policy = chosen_policy(unconverged)
        model, point = self._plain_model.get(), self._point_mass(batches)
        sites = scale.sites(point.energy(model, batches, subset))
        others = {name: factor for name, factor in self.scale_factors.items() if name not in sites}
        energy = replace(point, scale_factors=others).energy(model, batches, subset)
        sound(energy)
        candidates = Candidates(energy, scale, sites, chosen, seed)
        curve = tune(candidates, criterion, values=values, refinements=refinements, progress=progress)
        self.scale_factors = {**others, **dict.fromkeys(sites, scale.factor(curve.best))}

        def posterior_of(used: Method, local: LocalEnergy) -> LaplacePosterior:
            known = candidates.reweighted(curve.best) if used is chosen else None
            return used.fit(local, seed=seed) if known is None else known

        self._fit(candidates.local(curve.best).energy, chosen, policy, posterior_of, progress)
        return curve

    def predictive(self, *inputs: Any, site: str | None = None, joint: bool = False) -> GaussianOutputs:
        """Return the Gaussian over the outputs for some inputs.

        Args:
            inputs: positional arguments of the model; observations may be left out.
            site: an observed site, or one of ``pyro.deterministic``; None for the one observed site.
            joint: also the covariance between examples, ``joint_covariance`` of shape ``[B k, B k]``.

        Raises:
            GuideError: not fitted yet, or the mode or the model has changed since.
            DataError: no rows, NaN, or inputs that the model cannot take.
            ModelError: no such site, or several to choose from.
            UnsupportedError: a distribution that cannot be linearised, or a method without what is asked for.
        """
        if self._known.fitted is not None:
            self.initialize_loaded(*with_missing(self._plain_model.get(), inputs))
        fitted = self.fitted
        self.check_model(self._plain_model.get())
        query = fitted.point.query(self._plain_model.get(), inputs, fitted.layout, site)
        return GaussianOutputs.of(fitted.posterior, query, joint=joint)

    @property
    def posterior(self) -> LaplacePosterior | None:
        """The Gaussian of the last :meth:`fit`; None before, and after an error.

        Raises:
            GuideError: the mode has moved since.
        """
        return None if self._known.fitted is None else self.fitted.posterior

    @property
    def fitted(self) -> Fitted:
        """The Gaussian with its mode and the sites that it is over.

        Raises:
            GuideError: not fitted yet, or the mode has moved since, or the last fit ended in an error.
        """
        return self._known.at(self._point_mass)

    def check_model(self, model: Callable[..., Any], plates: bool = False) -> None:
        """Refuse a model that is not the one of the fit. Does nothing before a fit, or after the mode has moved.

        Args:
            model: the model.
            plates: see :meth:`Fitted.check`.

        Raises:
            GuideError: naming what differs.
        """
        fitted = self._known.fitted
        if fitted is not None and self._known.change_since(self._point_mass()) is None:
            fitted.check(model, self.median(), plates)

    # What predictions ask of a guide, this one or another's -------------------------------------------------------

    @property
    def factorised(self) -> Callable[..., dict[str, Tensor]] | None:
        """The Gaussian as a guide of independent sites; None where it couples latents.

        Raises:
            GuideError: not fitted yet, or the mode has moved since.
        """
        return self._at_marginals if self.fitted.posterior.independent else None

    def _at_marginals(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        warn(WIDE_WEIGHTS)
        marginals = self._marginals()
        return self._within_plates(lambda site: site.sample(marginals[site.name]), *args, **kwargs)

    def predicted_model(self, model: Callable[..., Any]) -> Callable[..., Any]:
        """Return the model as it is predicted with: its scales times those that :meth:`tune` has set."""
        return rescaled_model(model, self.scale_factors)

    def example_latents(self) -> dict[str, Tensor]:
        """Return values to look at the model with: the mode, since not every method has draws."""
        return self.median()

    def linearised(self, inputs: tuple[Any, ...], read: ReadOutputs) -> GaussianOutputs:
        """Return the Gaussian over outputs that someone else reads.

        Args:
            inputs: positional arguments of the model.
            read: returns the outputs at unconstrained values of the latents, as nodes of the graph of these; it is
                also given the number of rows.

        Raises:
            GuideError: not fitted yet, or the mode has moved since.
        """
        fitted = self.fitted
        query = Query(read, inputs, fitted.point.locs, fitted.layout, read=read)
        return GaussianOutputs.of(fitted.posterior, query)

    # What a guide is to Pyro, to files and to devices -----------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Give every latent site a value; Pyro calls it with the arguments of the model.

        With gradients enabled, as in training, this is the mode. Without (``Predictive``, ``Samples``) and after
        :meth:`fit` it is a draw from the Gaussian, with a warning: a network run at such weights is no linearised
        prediction.
        """
        self.initialize(*args, **kwargs)
        if torch.is_grad_enabled() or not self._known.requested:
            return super().forward(*args, **kwargs)
        fitted, change = self._known.fitted, self._known.change_since(self._point_mass())
        if change is not None or fitted is None:
            warn(f"{change}: a point mass until it is fitted again")
            return super().forward(*args, **kwargs)
        warn(DRAWN_WEIGHTS)
        event_dims = {site.name: site.event_dim for site in self._sites()}
        values = self._constrained(fitted.sampled(f"_{self._pyro_name}_latent", event_dims))
        deltas = {s.name: dist.Delta(values[s.name], event_dim=s.prior.event_dim) for s in self._sites()}
        return self._within_plates(lambda site: pyro.sample(site.name, deltas[site.name]), *args, **kwargs)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] | int = ()) -> dict[str, Tensor]:
        """Draw all sites at once: from the Gaussian after :meth:`fit`, the mode before.

        Args:
            sample_shape: leading dimensions of the draws; a number of draws, or a shape.

        Returns:
            draws of shape ``[*sample_shape, *site]`` by site name, in their own (constrained) space.

        Raises:
            GuideError: the mode has moved since the fit, or that ended in an error.
            UnsupportedError: the method of the fit has no draws.
        """
        if not self._known.requested:
            return super().sample(sample_shape)
        shape = torch.Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)
        drawn = self.fitted.draw(shape.numel())
        return self._constrained({name: u.reshape(shape + u.shape[1:]) for name, u in drawn.items()})

    def _marginals(self) -> dict[str, Any]:
        marginals = super()._marginals()
        if self._known.requested:
            for name, variance in self.fitted.marginal_variances().items():
                normal = dist.Normal(marginals[name].mean.detach(), variance.sqrt(), validate_args=False)
                marginals[name] = normal.to_event(self._seen[name].event_dim)
        return marginals

    def get_extra_state(self) -> dict[str, Any] | None:
        """Return the Gaussian of the last fit, tuned scales and what was shown of the mode, for ``state_dict``.

        A method that needs the model and the data to predict (conjugate gradients, say) is left out, with a warning.
        """
        if self._known == Approximation() and not self.scale_factors:
            return None
        return {**self._known.state(), "scale_factors": dict(self.scale_factors)}

    def set_extra_state(self, state: Any) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        self.scale_factors = {} if state is None else dict(state["scale_factors"])
        self._known = Approximation.from_state(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._known = self._known.moved(fn)
        return self

    def __repr__(self) -> str:
        """Describe the mode, the evidence that it is a minimum, and the Gaussian."""
        unseen = self.prototype_trace is None
        found = "has not seen its model yet" if unseen else self._known.describe(self._point_mass())
        return f"{type(self).__name__}({found})"
