# SPDX-License-Identifier: Apache-2.0
"""The posterior as a Gaussian around its mode."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from pyro_dvi.choice import check_choice
from pyro_dvi.errors import DviWarning, GuideError
from pyro_dvi.handlers.fingerprint import Fingerprint
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix
from pyro_dvi.laplace.energy.query import Query, ReadOutputs
from pyro_dvi.laplace.evidence.criteria import ByEvidence, Candidates, Criterion
from pyro_dvi.laplace.evidence.evidence import Determinant, Evidence, log_evidence
from pyro_dvi.laplace.evidence.scales import PriorPrecision, Scale, rescaled_model
from pyro_dvi.laplace.evidence.tuning import TuningCurve, tune
from pyro_dvi.laplace.fitted import Draws, Fitted
from pyro_dvi.laplace.methods.dense import Dense
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method, check_method
from pyro_dvi.laplace.mode.convergence import Refuse, Unconverged
from pyro_dvi.laplace.mode_guide import ModeGuide
from pyro_dvi.laplace.outputs import GaussianOutputs
from pyro_dvi.progress import progress_bar
from pyro_dvi.signatures import with_missing

__all__ = ["DRAWN_WEIGHTS", "LaplaceGuide"]

DRAWN_WEIGHTS = (
    "weights are drawn from a Laplace posterior: a network run at them leaves the neighbourhood in which the Gaussian "
    "was fitted, and predicts too widely. predict(model, guide, x, method=Linearised()) stays at the mode."
)


class LaplaceGuide(ModeGuide):
    r"""Train a mode, then put a Gaussian around it.

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
        posterior: what the last :meth:`fit` made; None before.
        scale_factors: what multiplies the scale of a site's distribution in U, latent or observed; :meth:`tune` sets
            it, training does not use it.

    Raises:
        ModelError: a latent is discrete, or there is none.
        ArgumentError: a KL weight that is not positive.

    Source: MacKay (1992); Immer, Korzepa & Bauer (2021) for the linearised predictive.

    Example:
        >>> import pyro, pyro.distributions as dist
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

    _method: Method | None = None
    _fitted: Fitted | None = None

    # The Gaussian -----------------------------------------------------------------------------------------------------

    def fit(
        self,
        batches: Iterable[Any],
        method: Method | None = None,
        *,
        subset: str | Iterable[str] | None = None,
        unconverged: Unconverged | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> LaplacePosterior:
        """Put the Gaussian around the mode.

        Untuned, class probabilities are often far less certain than the data warrant: see :meth:`tune`.

        Args:
            batches: all the data: a loader or a list of batches, as for :func:`~pyro_dvi.fit`.
            method: how the Gaussian is represented.
            subset: sites that are uncertain, by name or pattern (``"net.4.*"`` for a last layer); the others stay at
                their mode. None: all.
            unconverged: what to do about a mode that is no minimum: ``Refuse()``, the default, raises where the
                precision is the Hessian and warns otherwise; ``UseGGN()``, ``Accept()``.
            seed: of random numbers.
            progress: count the work, in gradients of all data, where there is a terminal or notebook.

        Returns:
            the Gaussian; also ``guide.posterior``.

        Raises:
            UnconvergedError: the precision is the Hessian, and the mode no minimum; ``diagnosis`` says why.
            DataError: batches that do not hold all data, or change, or hold NaN.
            ModelError: the model draws random numbers of its own.
        """
        method = Dense() if method is None else method
        unconverged = Refuse() if unconverged is None else unconverged
        check_method(method)
        check_choice("unconverged", unconverged, Unconverged, "Refuse(), UseGGN() or Accept()")
        model, point = self._plain_model.get(), self._point_mass(batches)
        energy = point.energy(model, batches, subset)
        energies = [energy]
        if self.scale_factors:  # a mode of before :meth:`tune`, or polished since
            energies.insert(0, replace(point, scale_factors={}).energy(model, batches, subset))
        method = unconverged.method(method, energies)
        with progress_bar(progress, None, unit="gradient") as bar:
            energy.report = bar.update
            posterior = method.fit(energy.at(energy.start), seed=seed)
            energy.report = None
        seen = Fingerprint.of(model, *next(iter(energy.passes)), self.median())
        checksum = energy.passes.checksum
        self._method = method
        self._fitted = Fitted(posterior, energy.layout, point, method.curvature, seen, checksum)
        return posterior

    @property
    def posterior(self) -> LaplacePosterior | None:
        """The Gaussian of the last :meth:`fit`; None before.

        Raises:
            GuideError: the mode has moved since.
        """
        return None if self._fitted is None else self.fitted.posterior

    @property
    def fitted(self) -> Fitted:
        """The Gaussian with its mode and the sites that it is over.

        Raises:
            GuideError: not fitted yet, or the mode has moved since.
        """
        if self._fitted is None:
            raise GuideError(
                "this LaplaceGuide is a point mass so far: call guide.fit(batches, method) after training. "
                "predict(..., method=AtMean()) predicts at the mode"
            )
        stale = self._stale()
        if stale is not None:
            raise GuideError(f"{stale}: fit again")
        return self._fitted

    def check_model(self, model: Callable[..., Any], plates: bool = False) -> None:
        """Refuse a model that is not the one of the fit. Does nothing before a fit, or after the mode has moved.

        Args:
            model: the model.
            plates: see :meth:`Fitted.check`.

        Raises:
            GuideError: naming what differs.
        """
        if self._fitted is not None and self._stale() is None:
            self._fitted.check(model, self.median(), plates)

    def _stale(self) -> str | None:
        """What is no longer as it was in the fit."""
        assert self._fitted is not None
        return self._point_mass().change_since(self._fitted.point)

    def log_evidence(
        self,
        batches: Iterable[Any],
        *,
        determinant: Determinant | None = None,
        subset: str | Iterable[str] | None = None,
    ) -> Evidence:
        r"""Estimate the log evidence of the model by Laplace's method, with every constant.

        .. math:: \log p(D) \approx -U(\hat u) + \tfrac D2 \log 2\pi - \tfrac12 \log\det P

        Status: exact for linear models with Gaussian noise; elsewhere Laplace's approximation, which counts one mode.
        The log determinant is that of the last :meth:`fit` where its method knows it (exact for ``Dense()``), as good
        as the method's approximation of P, if the batches are those of the fit; otherwise that of the matrix itself,
        exactly up to D = 1,000 and by Lanczos beyond. ``print`` says which. With a subset it is the evidence given the
        sites that stay fixed.

        Args:
            batches: all the data.
            determinant: ``Exactly()`` or ``ByLanczos(probes, steps)``, instead of the one of the fit.
            subset: without a fit: sites that are uncertain. None: those of the fit, or all.

        Returns:
            ``value`` in nats, ``standard_error``, and the parts.

        Raises:
            ArgumentError: ``kl_weight`` is not 1: a tempered posterior has no evidence.
            GuideError: the mode, or the model, has changed since the fit.
            NotPositiveDefiniteError: the precision is not positive definite.
        """
        fitted = None if self._fitted is None or subset is not None else self.fitted
        energy = self.energy(batches, subset=subset if fitted is None else fitted.layout.names)
        if fitted is not None:
            self.check_model(self._plain_model.get(), plates=True)
        known = () if fitted is None else (fitted.posterior, fitted.data)
        return log_evidence(energy, self._curvature, determinant, *known)

    @property
    def _curvature(self) -> PrecisionMatrix:
        return GGN() if self._fitted is None else self._fitted.curvature

    def tune(
        self,
        batches: Iterable[Any],
        scale: Scale | None = None,
        criterion: Criterion | None = None,
        *,
        method: Method | None = None,
        subset: str | Iterable[str] | None = None,
        values: Sequence[float] | Tensor | None = None,
        refinements: int = 12,
        unconverged: Unconverged | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> TuningCurve:
        r"""Choose the scale of priors, or of the noise, after training; then fit with it.

        The mode stays where it is, although it is no minimum of U with another scale (``polish`` moves it there, and
        training with another ``prior_scale`` does so from the start). Values are relative to the model as it is
        written; several scales are tuned one after the other. Where probabilities of known classes matter, tune by
        validation data: by the evidence a classifier often stays less certain than the data warrant.

        Args:
            batches: all the data.
            scale: ``PriorPrecision()`` for one multiplier of all priors (the default), ``PriorPrecision("net.0.*")``,
                ``NoiseScale()``.
            criterion: ``ByEvidence()``, the default, or ``ByValidation(batches)``.
            method: as for :meth:`fit`; None: that of the last fit.
            subset: as for :meth:`fit`; None: that of the last fit.
            values: to try; by default 25 from 0.001 to 1,000 for a precision, 0.1 to 10 for a noise.
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
        if self._fitted is not None and subset is None:
            subset = self._fitted.layout.names
        chosen = method or self._method or Dense(self._curvature)
        scale = PriorPrecision() if scale is None else scale
        criterion = ByEvidence() if criterion is None else criterion
        check_method(chosen)
        check_choice("scale", scale, Scale, "PriorPrecision('net.0.*') or NoiseScale()")
        check_choice("criterion", criterion, Criterion, "ByEvidence() or ByValidation(batches)")
        model, point = self._plain_model.get(), self._point_mass(batches)
        sites = scale.sites(point.energy(model, batches, subset))
        others = {name: factor for name, factor in self.scale_factors.items() if name not in sites}
        energy = replace(point, scale_factors=others).energy(model, batches, subset)
        candidates = Candidates(energy, scale, sites, chosen, seed)
        curve = tune(candidates, criterion, values=values, refinements=refinements, progress=progress)
        self.scale_factors = {**others, **dict.fromkeys(sites, scale.factor(curve.best))}
        self.fit(batches, chosen, subset=subset, unconverged=unconverged, seed=seed, progress=progress)
        return curve

    def predictive(self, *inputs: Any, site: str | None = None, joint: bool = False) -> GaussianOutputs:
        """Return the Gaussian over the outputs for some inputs.

        Args:
            inputs: positional arguments of the model; observations may be left out.
            site: an observed site, or one of ``pyro.deterministic``; None for the one observed site.
            joint: also the covariance between examples, ``joint_covariance`` of shape ``[B k, B k]``.

        Returns:
            ``mean`` and ``variance`` of the prediction ``[B, ...]``, ``covariance`` ``[B, k, k]``.

        Raises:
            GuideError: not fitted yet, or the mode or the model has changed since.
            DataError: no rows, NaN, or inputs that the model cannot take.
            ModelError: no such site, or several to choose from.
            UnsupportedError: a distribution that cannot be linearised, or a method without what is asked for.
        """
        if self._fitted is not None:
            self.initialize_loaded(*with_missing(self._plain_model.get(), inputs))
        fitted = self.fitted
        self.check_model(self._plain_model.get())
        query = fitted.point.query(self._plain_model.get(), inputs, fitted.layout, site)
        return GaussianOutputs.of(fitted.posterior, query, joint=joint)

    # What predictions ask of a guide, this one or another's -------------------------------------------------------

    prediction_rule: Any = "Linearised"  # the name of a rule, or a rule
    is_factorised = False  # the Gaussian couples latents, so that their marginals do not determine it

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
        if self._fitted is None or torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        stale = self._stale()
        if stale is not None:
            warnings.warn(f"{stale}: a point mass until it is fitted again", DviWarning, stacklevel=2)
            return super().forward(*args, **kwargs)
        warnings.warn(DRAWN_WEIGHTS, DviWarning, stacklevel=2)
        vectors = pyro.sample(
            f"_{self._pyro_name}_latent", Draws(self._fitted.posterior), infer={"is_auxiliary": True}
        )
        values = self._constrained(self._fitted.values_of(vectors, self._event_dims))

        def drawn(name: str, prior: Any) -> Tensor:
            return pyro.sample(name, dist.Delta(values[name], event_dim=prior.event_dim))

        return self._within_plates(drawn, *args, **kwargs)

    @torch.no_grad()
    def sample(self, sample_shape: Sequence[int] | int = ()) -> dict[str, Tensor]:
        """Draw all sites at once: from the Gaussian after :meth:`fit`, the mode before.

        Args:
            sample_shape: leading dimensions of the draws; a number of draws, or a shape.

        Returns:
            draws of shape ``[*sample_shape, *site]`` by site name, in their own (constrained) space.

        Raises:
            GuideError: the mode has moved since the fit.
            UnsupportedError: the method of the fit has no draws.
        """
        if self._fitted is None:
            return super().sample(sample_shape)
        shape = torch.Size([sample_shape] if isinstance(sample_shape, int) else sample_shape)
        drawn = self.fitted.draw(shape.numel())
        return self._constrained({name: u.reshape(shape + u.shape[1:]) for name, u in drawn.items()})

    def _marginals(self) -> dict[str, Any]:
        marginals = super()._marginals()
        if self._fitted is not None:
            variances = self.fitted.posterior.marginal_variance().detach()
            for name, variance in self.fitted.layout.named(variances).items():
                normal = dist.Normal(marginals[name].mean.detach(), variance.sqrt(), validate_args=False)
                marginals[name] = normal.to_event(self._event_dims[name])
        return marginals

    def get_extra_state(self) -> dict[str, Any] | None:
        """Return the Gaussian of the last fit, and tuned scales, for ``state_dict``, in tensors and plain values.

        A method that needs the model and the data to predict (conjugate gradients, say) is left out, with a warning.
        """
        if self._fitted is None and not self.scale_factors:
            return None
        return {
            "gaussian": None if self._fitted is None else self._fitted.state(),
            "scale_factors": dict(self.scale_factors),
        }

    def set_extra_state(self, state: Any) -> None:
        """Take over what :meth:`get_extra_state` returned."""
        self.scale_factors = {} if state is None else dict(state["scale_factors"])
        self._fitted = None if state is None else Fitted.from_state(state["gaussian"])
        self._method = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self._fitted is not None:
            self._fitted = self._fitted.moved(fn)
        return self
