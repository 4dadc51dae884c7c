# SPDX-License-Identifier: Apache-2.0
"""The posterior as a Gaussian around its mode."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from pyro_dvi.core.arguments import check_choice, check_count, with_missing
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.layout import Subset
from pyro_dvi.laplace.energy.precision import GGN, PrecisionMatrix
from pyro_dvi.laplace.evidence.criteria import ByEvidence, Candidates, Criterion
from pyro_dvi.laplace.evidence.evidence import Determinant, Evidence, log_evidence
from pyro_dvi.laplace.evidence.scales import PriorPrecision, Scale
from pyro_dvi.laplace.evidence.tuning import TuningCurve, tune
from pyro_dvi.laplace.fitted import Fitted
from pyro_dvi.laplace.gaussian_guide import GaussianGuide
from pyro_dvi.laplace.methods.dense import Dense
from pyro_dvi.laplace.methods.posterior import LaplacePosterior, Method, check_method
from pyro_dvi.laplace.mode.convergence import Unconverged, chosen_policy, warned_if_far
from pyro_dvi.laplace.mode.diagnosis import sound
from pyro_dvi.laplace.outputs import GaussianOutputs


class LaplaceGuide(GaussianGuide):
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
        posterior: what the last :meth:`fit` made; None before, and after an error.
        scale_factors: what multiplies the scale of a site's distribution in U, latent or observed; :meth:`tune` sets
            it, training does not use it.

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
            method: how the Gaussian is represented.
            subset: sites that are uncertain, by name or pattern (``"net.4.*"`` for a last layer), or a mapping of these
                to True, False or boolean masks of their entries (of their unconstrained values, where a latent is
                transformed); see :func:`~pyro_dvi.laplace.largest_variance`. The rest stays at its mode. None: all.
            unconverged: what to do about a mode that is no minimum: ``Refuse()``, the default, raises where the
                precision is the Hessian and warns otherwise; ``UseGGN()``, ``Accept()``.
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
        with progress_bar(progress, None, unit="gradient") as bar:
            energy.work.report = bar.update
            return self._fit(energy, method, policy, lambda used, local: used.fit(local, seed=seed))

    def _fit(
        self,
        energy: Energy,
        method: Method,
        policy: Unconverged,
        posterior_of: Callable[[Method, LocalEnergy], LaplacePosterior],
    ) -> LaplacePosterior:
        """Look at the mode, make the Gaussian by the method that is taken then, and remember it."""
        self._fitted, self._refused = None, method  # an error leaves no Gaussian
        minimum_of, looked_at, known = self._place(self._point_mass(), energy)
        method, found = policy.look(method, looked_at, known)
        posterior = posterior_of(method, energy.at(energy.start))
        energy.work.report = None
        point = self._point_of(energy)
        if found is not None:
            found = warned_if_far(found, posterior, looked_at)
            if found.near:
                self._certify(replace(point, scale_factors=minimum_of.scale_factors), looked_at, found)
        self._method, self._refused = method, None
        self._fitted = Fitted(posterior, energy.layout, point, method.curvature)
        return posterior

    def log_evidence(
        self,
        batches: Iterable[Any],
        *,
        determinant: Determinant | None = None,
        subset: Subset | None = None,
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
            subset: without a fit: what is uncertain. None: that of the fit, or all.

        Returns:
            ``value`` in nats, ``standard_error``, and the parts.

        Raises:
            ArgumentError: ``kl_weight`` is not 1: a tempered posterior has no evidence.
            GuideError: the mode, or the model, has changed since the fit, or the fit ended in an error.
            ModelError: the model draws random numbers of its own.
            NonFiniteError: the likelihood, or the prior, is NaN or infinite.
            NotPositiveDefiniteError: the precision is not positive definite.
        """
        fitted = self.fitted if self._refused or (self._fitted is not None and subset is None) else None
        energy = self.energy(batches, subset=subset if fitted is None else fitted.layout)
        if fitted is not None:
            self.check_model(self._plain_model.get(), plates=True)
        known = () if fitted is None else (fitted.posterior, fitted.point.data)
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
        subset: Subset | None = None,
        values: Sequence[float] | Tensor | None = None,
        refinements: int = 12,
        unconverged: Unconverged | None = None,
        seed: int = 0,
        progress: bool = True,
    ) -> TuningCurve:
        r"""Choose the scale of priors, or of the noise, after training; then fit with it.

        The mode stays where it is, although it is no minimum of U with another scale (``polish`` moves it there, and
        training with another ``prior_scale`` does so from the start). Values are relative to the model as it is
        written; several scales are tuned one after the other. The Gaussian of the best value is the one that is kept.
        Tune a classifier by validation data where there are any: by the evidence its class probabilities are
        under-confident, whatever the method.

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
            subset = self._fitted.layout
        chosen = method or self._method or Dense(self._curvature)
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

        with progress_bar(progress, None, unit="gradient") as bar:
            energy = candidates.local(curve.best).energy
            energy.work.report = bar.update
            self._fit(energy, chosen, policy, posterior_of)
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
