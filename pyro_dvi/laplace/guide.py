# SPDX-License-Identifier: Apache-2.0
"""``LaplaceGuide``, the posterior as a Gaussian around its mode."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.core.progress import progress_bar
from pyro_dvi.errors import warn
from pyro_dvi.laplace.approximation import GaussianAtMode
from pyro_dvi.laplace.energy.energy import Energy, LocalEnergy
from pyro_dvi.laplace.energy.passes import Passes
from pyro_dvi.laplace.energy.precision import GGN
from pyro_dvi.laplace.energy.query import Query, Subset
from pyro_dvi.laplace.evidence.candidates import PriorPrecision, Scale
from pyro_dvi.laplace.evidence.criteria import ByEvidence, Criterion
from pyro_dvi.laplace.evidence.evidence import ByLanczos, Evidence, differentiable_log_evidence, log_evidence
from pyro_dvi.laplace.evidence.scale_tuning import TuningCurve, tune_together
from pyro_dvi.laplace.fitted import Fitted, KnownMinimum
from pyro_dvi.laplace.methods.full_and_low_rank import Dense
from pyro_dvi.laplace.methods.method import LaplacePosterior, Method, check_method
from pyro_dvi.laplace.mode.diagnosis import Diagnosis, check_mode, check_policy, diagnose, distance_by
from pyro_dvi.laplace.mode.search import Polished, polish
from pyro_dvi.runs.fingerprint import Fingerprint


class LaplaceGuide(GaussianAtMode):
    r"""Laplace's approximation: a Gaussian around the most probable weights.

    .. math:: q(u) = \mathcal N(\hat u, P^{-1}), \qquad \hat u = \arg\min_u U(u), \qquad
        U(u) = \tfrac1T\bigl[-\tfrac1\beta\log p(D \mid u) - \log p(u)\bigr]

    During training with ``SVI`` and any ELBO, the guide is a point mass in unconstrained space, and the loss is
    :math:`\beta T U` up to a constant. After training, :meth:`polish` finds the minimum, and :meth:`fit` fits the
    Gaussian. :meth:`predictive`, ``predict`` and :meth:`log_evidence` use this Gaussian. Predictions linearise the
    model around the mode.

    Status: exact for linear models with Gaussian noise; otherwise a local approximation.

    Args:
        model: a Pyro model whose latents are continuous.
        kl_weight: :math:`\beta`, which tempers the likelihood, :math:`p(D \mid u)^{1/\beta}`. None means the KL weight
            of the objective that trains the guide, or 1 if there is none.
        temperature: T, a factor of the covariance; it does not change the mode.
        init_loc_fn: Pyro's initialisation strategy for the mode. The default is the weights that a network had before
            :func:`~pyro_dvi.to_bayesian_`; the weights of a trained network are therefore already a mode.
        create_plates: as in Pyro's guides.

    Attributes:
        locs: module of modes, ``guide.locs.<site>``.
        scale_factors: multipliers of the scales of latent or observed sites; :meth:`tune` sets them. They enter U, but
            not the loss of training.
        diagnosis: after a fit with ``GGN()``, the distance of the mode from the nearest minimum of U, in posterior
            standard deviations; ``print`` it for a summary. None before, and after other fits that need no diagnosis.

    Raises:
        ModelError: a latent is discrete, or the model has no latents.
        ArgumentError: the KL weight or the temperature is not positive.

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

    diagnosis: Diagnosis | None = None

    # The mode -----------------------------------------------------------------------------------------------------

    def energy(self, batches: Iterable[Any], *, subset: Subset | None = None) -> Energy:
        """Return U on all the data, with its gradient and curvature products; see :meth:`fit` for the arguments."""
        return self._point_mass(batches).energy(self._plain_model.get(), batches, subset)

    def query(self, *inputs: Any, site: str | None = None, subset: Subset | None = None) -> Query:
        """Return the outputs at the mode, with Jacobian products, as input to methods of ``guide.posterior``.

        Args:
            inputs: as in :meth:`predictive`.
            site: as in :meth:`predictive`.
            subset: as in :meth:`fit`.
        """
        point = self._point_mass()
        return point.query(self._plain_model.get(), inputs, point.layout(subset), site)

    def polish(
        self,
        batches: Iterable[Any],
        *,
        subset: Subset | None = None,
        tolerance: float = 1e-10,
        max_gradients: int = 10_000,
        progress: bool = True,
    ) -> Polished:
        r"""Move the mode to a minimum of U, and verify the minimum with products of the true Hessian.

        After Ctrl-C or an error, the guide keeps the best point so far.

        Status: finds a local minimum, where the Hessian is positive definite as far as 200 Lanczos steps can tell. If U
        has kinks (ReLU), finds a point where the Newton decrement of the Gauss-Newton matrix is small, or issues a
        warning.

        Args:
            batches: all the data, unchanged between passes.
            subset: the latents to optimise, as in :meth:`fit`.
            tolerance: bound on the Newton decrement :math:`g^\top P^{-1} g`, in squared posterior standard deviations.
            max_gradients: maximum work of the search, in full-data gradients, after which an error is raised.
            progress: show a progress bar in a terminal or notebook.

        Raises:
            UnconvergedError: no minimum was found; ``report`` describes the last point.
            NonFiniteError: U is NaN or infinite at the mode.
            DataError: the batches do not hold all data, or change between passes.
        """

        def keep(point: Tensor) -> None:
            with torch.no_grad():
                for name, value in energy.layout.place(energy.layout.split(point), energy.locs).items():
                    self._seen[name].loc.copy_(value)

        energy = self.energy(batches, subset=subset)
        report = polish(energy, keep, tolerance=tolerance, max_gradients=max_gradients, progress=progress)
        if report.converged and report.curvature == "Hessian":
            self._minimum = KnownMinimum.of(self._point_mass(), energy, report.value)
        return report

    def diagnose(
        self,
        batches: Iterable[Any],
        *,
        subset: Subset | None = None,
        tolerance: float = 1e-2,
        steps: int = 200,
    ) -> Diagnosis:
        r"""Check whether the mode is a minimum of U, without moving it.

        ``print`` the result for a summary. After ``tune``, U has the tuned scales, so a mode that was trained with
        other scales is not a minimum of this U.

        Args:
            batches: all the data.
            subset: as in :meth:`fit`.
            tolerance: bound on the Newton decrement :math:`g^\top P^{-1} g`; 0.01 means a tenth of a standard
                deviation.
            steps: number of Lanczos steps and of conjugate-gradient steps; each costs up to two full-data gradients.

        Raises:
            DataError: the batches do not hold all data, or change between passes.
            ModelError: the model draws random numbers in its own code, or a latent is NaN.
            NonFiniteError: U is NaN or infinite.
        """
        energy = self.energy(batches, subset=subset)
        found = diagnose(energy, tolerance=tolerance, steps=steps)
        if found.converged:
            self._minimum = KnownMinimum.of(self._point_mass(), energy, found.value)
        return found

    # Its Gaussian -------------------------------------------------------------------------------------------------

    def fit(
        self,
        batches: Iterable[Any],
        method: Method | None = None,
        *,
        subset: Subset | None = None,
        unconverged: str = "refuse",
        seed: int = 0,
        progress: bool = True,
    ) -> LaplacePosterior:
        """Fit the Gaussian around the mode.

        The result is also ``guide.posterior``. Without tuning, class probabilities are often far too uncertain; see
        :meth:`tune`. After :meth:`polish` on the same data, the mode is not diagnosed again. If a fit raises an error,
        the guide has no Gaussian.

        Args:
            batches: all the data, as a loader or a list of batches; see :func:`~pyro_dvi.fit`.
            method: representation of the Gaussian; by default, ``Dense()``.
            subset: sites that get a posterior, by name or pattern (``"net.4.*"`` for a last layer), or a mapping from
                these to True, False or boolean masks of their unconstrained entries; see
                :func:`~pyro_dvi.laplace.largest_variance`. All other latents stay at the mode. None means all.
            unconverged: what to do if the mode is not a minimum, or U has kinks (ReLU): ``"refuse"`` raises an error if
                the precision is the Hessian and warns otherwise; ``"accept"`` does not check.
            seed: random seed.
            progress: show the progress, in full-data gradients, in a terminal or notebook.

        Raises:
            UnconvergedError: the precision is the Hessian, and the mode is not a minimum or U has kinks (ReLU);
                ``diagnosis`` states the reason.
            DataError: the batches do not hold all data, change between passes, or contain NaN.
            ModelError: the model draws random numbers in its own code.
            NonFiniteError: the likelihood or the prior is NaN or infinite.
        """
        method = Dense() if method is None else method
        check_policy(unconverged)
        check_method(method)
        energy = self._point_mass(batches).energy(self._plain_model.get(), batches, subset)
        return self._fit(energy, method, unconverged, lambda local: method.fit(local, seed=seed), progress)

    def _fit(
        self,
        energy: Energy,
        method: Method,
        policy: str,
        make: Callable[[LocalEnergy], LaplacePosterior],
        progress: bool,
    ) -> LaplacePosterior:
        """Check that the mode is a minimum, and construct the Gaussian with ``make``.

        The check uses tuned scales only if the mode was polished after tuning; otherwise, it uses the scales in the
        model's code.
        """
        point, model = self._point_mass(), self._plain_model.get()
        self._fitted, self._failed = None, True
        known, used, looked_at = self._minimum, point, energy
        if known is None or point.change_since(known.point) is not None:
            used, looked_at = replace(point, scale_factors={}), energy.with_factors({})
            known = known if known and used.change_since(known.point) is None else None
        with progress_bar(progress, None, unit="gradient") as bar:
            energy.work.report = bar.update
            found = check_mode(policy, method, looked_at, known)
            posterior = make(energy.at(energy.start))
            value = float(energy.at(energy.start).value)
            energy.work.report = None
            if isinstance(method.precision, GGN):
                found = distance_by(posterior, looked_at)
                if policy == "refuse" and found.decrement_at_least > found.tolerance:
                    warn(f"the Gaussian is fitted around a mode that is not a minimum. {found}")
        self.diagnosis = found
        if found is not None and found.converged:
            self._minimum = KnownMinimum.of(used, looked_at, found.value)
        fingerprint = Fingerprint.of(model, *next(iter(energy.passes)), self.median())
        self._fitted = Fitted(posterior, energy.layout, point, value, fingerprint, method.precision, method)
        self._failed = False
        return posterior

    def scale_moved(self, site: str, batches: Iterable[Any]) -> None:
        """Keep the Gaussian after the factor of a site was moved from ``scale_factors`` into the model.

        Args:
            site: the site, whose scale in the model is now the product of its former scale and the factor.
            batches: the data of the fit.
        """
        fitted = self.fitted
        del self.scale_factors[site]
        args, kwargs = next(iter(Passes(batches, fitted.posterior.mode.device)))
        model = Fingerprint.of(self._plain_model.get(), args, kwargs, self.median())
        self._fitted = replace(fitted, point=self._point_mass(), model=model)

    def log_evidence(
        self,
        batches: Iterable[Any],
        *,
        determinant: ByLanczos | None = None,
        subset: Subset | None = None,
    ) -> Evidence:
        r"""Estimate the log evidence of the model with Laplace's method, including all constants.

        .. math:: \log p(D) \approx -U(\hat u) + \tfrac D2 \log 2\pi - \tfrac12 \log\det P

        Status: exact for linear models with Gaussian noise; otherwise Laplace's approximation, which accounts for a
        single mode. With a subset, the evidence is conditional on the fixed sites.

        Args:
            batches: all the data, those of the last fit if there was one.
            determinant: ``ByLanczos(num_probes, steps)``. None means the determinant of the last :meth:`fit`, if its
                method has one. Otherwise, the determinant is exact for D up to 1,000, and Lanczos quadrature is used
                for larger D.
            subset: as in :meth:`fit`; by default, the subset of the last fit, or all.

        Raises:
            ArgumentError: ``kl_weight`` or ``temperature`` is not 1, because a tempered posterior has no evidence.
            GuideError: the mode, the model or the data have changed since the fit, or the fit raised an error.
            ModelError: the model draws random numbers in its own code.
            NonFiniteError: the likelihood or the prior is NaN or infinite.
            NotPositiveDefiniteError: the precision is not positive definite.
        """
        fitted = self.fitted if self._failed or (self._fitted and subset is None) else None
        energy = self.energy(batches, subset=subset if fitted is None else fitted.layout)
        if fitted is not None:
            fitted.check_value(energy)
        precision = GGN() if self._fitted is None else self._fitted.precision
        return log_evidence(energy, precision, determinant, None if fitted is None else fitted.posterior)

    def differentiable_log_evidence(
        self, batches: Iterable[Any], method: Method | None = None, *, subset: Subset | None = None
    ) -> Tensor:
        r"""Return the log evidence as a differentiable function of tensors of the model.

        Gradients reach all tensors that require gradients: scales of priors and of the noise, ``pyro.param``, and
        parameters of networks without priors. The mode is treated as constant; at a minimum, gradients therefore omit
        only the effect of the mode on the determinant. Alternate between steps of an optimizer and :meth:`polish`.

        Args:
            batches: all the data; the graphs of all batches are in memory at the same time.
            method: method for the determinant: ``Dense()``, the default, ``Diagonal()``, ``KroneckerFactored()`` or
                ``Functional()``, with ``GGN()``.
            subset: as in :meth:`fit`.

        Returns:
            The value of :meth:`log_evidence` after a fit with this method, a scalar.

        Raises:
            ArgumentError: ``kl_weight`` or ``temperature`` is not 1: a tempered posterior has no evidence.
            UnsupportedError: the determinant of the method is not differentiable.
            NotPositiveDefiniteError: the precision is not positive definite.

        Source: Immer et al. (2021), "Scalable marginal likelihood estimation for model selection in deep learning".
        """
        method = Dense() if method is None else method
        check_method(method)
        energy = self._point_mass(batches).energy(
            self._plain_model.get(), batches, subset, differentiable=True
        )
        return differentiable_log_evidence(energy, method)

    def tune(
        self,
        batches: Iterable[Any],
        scale: Scale | Sequence[Scale] | None = None,
        criterion: Criterion | None = None,
        *,
        method: Method | None = None,
        subset: Subset | None = None,
        values: Sequence[float] | Tensor | None = None,
        refinements: int = 12,
        unconverged: str = "refuse",
        seed: int = 0,
        progress: bool = True,
    ) -> TuningCurve:
        r"""Choose the scale of the priors or of the noise after training, and fit again.

        The mode does not move, although U has another minimum with other scales (``polish`` moves the mode there).
        Values are relative to the scales in the code of the model; several scales are tuned in turn until none changes.
        If possible, tune classifiers on validation data. Tuning with the evidence makes their probabilities
        under-confident, so it issues a warning for them.

        Args:
            batches: all the data.
            scale: ``PriorPrecision()`` for one multiplier of all priors (the default), ``PriorPrecision("net.0.*")``,
                ``NoiseScale()``, or a list of these for different sites.
            criterion: ``ByEvidence()``, the default, or ``ByValidation(batches)``.
            method: as in :meth:`fit`; by default, the method of the last fit.
            subset: as in :meth:`fit`; by default, the subset of the last fit.
            values: values to try; by default, 25 values from 0.001 to 1,000 for a prior precision, and 17 values from
                0.1 to 10 for a noise scale.
            refinements: number of additional values between the neighbours of the best value.
            unconverged: as in :meth:`fit`.
            seed: random seed.
            progress: show a progress bar.

        Returns:
            The scores of all values. The ``best`` value determines ``guide.scale_factors``; there is a warning if it is
            the smallest or largest value. For several scales, this is the curve of the first scale; its attribute
            ``others`` contains the other curves.

        Raises:
            ArgumentError: a value is not positive, the criterion is the evidence of a tempered posterior, or two scales
                belong to the same site.
            ModelError, UnsupportedError: the model has no such scale.
        """
        last = self._fitted
        if last is not None and subset is None:
            subset = last.layout
        chosen = method or (last and last.method) or Dense(GGN() if last is None else last.precision)
        scale = PriorPrecision() if scale is None else scale
        scales: Any = scale if isinstance(scale, list | tuple) else [scale]
        criterion = ByEvidence() if criterion is None else criterion
        check_method(chosen)
        check_choice("criterion", criterion, Criterion, "ByEvidence() or ByValidation(batches)")
        check_count("refinements", refinements, least=0)
        check_policy(unconverged)
        point = self._point_mass(batches)
        whole = point.energy(self._plain_model.get(), batches, subset)
        options: Any = {"values": values, "refinements": refinements, "progress": progress}
        curve, factors, candidates, value = tune_together(
            scales, whole, criterion, method=chosen, seed=seed, **options
        )
        self.scale_factors = factors

        energy = candidates.local(value).energy
        self._fit(energy, chosen, unconverged, lambda local: candidates.chosen(value), progress)
        return curve
