# SPDX-License-Identifier: Apache-2.0
r"""Sampling-free variational inference: means and variances are propagated through the model in one pass."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.core.densities import mask_of, with_any
from pyro_dvi.core.undisturbed import undisturbed
from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.errors import ArgumentError, ModelError, UnsupportedError, warn
from pyro_dvi.expectations.logits import LogitEstimator
from pyro_dvi.expectations.points import are_distinct, gaussian_of
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.full_covariance import full_covariances
from pyro_dvi.moments.shared_noise import has_covariances
from pyro_dvi.moments.value import variance_floor
from pyro_dvi.moments.weight_uses import warned_of_repeated_uses
from pyro_dvi.objectives.objective import Objective
from pyro_dvi.runs.latents import Latent
from pyro_dvi.runs.observed import observed_sites
from pyro_dvi.runs.posterior_run import Call, run_at_means, run_with_moments
from pyro_dvi.runs.structure import Structure, check_gradients, reached_by
from pyro_dvi.runs.uncertain import rebuilt, refuse_moments, uncertain_likelihoods, uncertain_part


@dataclass(frozen=True)
class VarianceWeighted:
    r"""Weights of observations, proportional to a power of their noise variance, with mean 1 over the batch.

    .. math:: w_i \propto \sigma_i^{2\gamma_t}

    A network that predicts its own noise scale learns slowly where it predicts large noise, because the gradients of
    the mean are divided by :math:`\sigma^2`. Such a network may explain the data as noise. The weights undo this
    division. Let the exponent decay to 0, so that training ends with the plain objective.

    Status: if the exponent is not 0, the loss is not a bound. Observations that are masked do not count in the mean.

    Args:
        exponent: :math:`\gamma` (the paper's :math:`\beta`), a number or a function of the completed training steps; 0
            means no weighting, and 1 corresponds to squared errors.
        dim: dimension of the batch over which weights have mean 1; None means all dimensions.

    Source: Seitzer et al. (2022), "On the pitfalls of heteroscedastic uncertainty estimation", Eq. 5.

    Example:
        >>> import pyro.distributions as dist
        >>> noise = dist.Normal(torch.zeros(2), torch.tensor([1.0, 3.0]))
        >>> VarianceWeighted(0.5)(noise, step=0)
        tensor([0.5000, 1.5000])
    """

    exponent: float | Callable[[int], float] = 0.5
    dim: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.exponent) and not 0 <= self.exponent <= 1:
            raise ArgumentError(f"exponent must be between 0 and 1, got {self.exponent!r}")

    def __call__(self, fn: Any, step: int) -> Tensor:
        exponent = self.exponent(step) if callable(self.exponent) else self.exponent
        if exponent == 0:
            return torch.ones(())
        try:
            variance: Tensor = fn.variance.detach()
        except (NotImplementedError, AttributeError) as error:
            raise ModelError(
                f"{type(fn).__name__} has no variance with which to weight observations: leave out weighting="
            ) from error
        for _ in fn.event_shape:
            variance = variance.mean(-1)
        weights = variance.pow(exponent)
        mask = mask_of(fn)
        counts = torch.ones_like(weights) if mask is None else with_any(mask, len(fn.event_shape)).to(weights)
        total, number = (v.sum(self.dim, keepdim=True) for v in (weights * counts, counts))
        return torch.where(number > 0, weights * number / total, 0.0)


class MomentPropagationELBO(Objective):
    r"""Objective of moment propagation: means and variances of the weights, not draws, pass through the network.

    .. math::
        \mathrm{loss} = -\sum_s \mathrm{scale}_s\, \mathrm E_{f \sim \mathcal N(m_f, v_f)}[\log p_s(y_s \mid f)]
            + \beta\, \mathrm{KL}(q \,\|\, p)

    Each Gaussian latent enters the model as a mean and a variance. Every function of the model propagates them
    (:mod:`pyro_dvi.moments`), and the log-likelihood is averaged over the Gaussian outputs
    (:mod:`pyro_dvi.expectations`). The code of the model does not change. A pass costs two to three times as much as a
    deterministic pass.

    Status: as in the paper, units are treated as independent Gaussians, unless ``full_covariance=True``. This is exact
    if every weight enters each output once: for linear models ``x @ w``, and for the moments of networks with one
    hidden layer. In deeper networks, and if kernels act at many positions or weights are used twice, covariances and
    thus part of the variance are lost; :func:`~pyro_dvi.diagnostics.compare_with_sampling` measures how much. Write
    ``(a - b) @ w``, not ``a @ w - b @ w``. The objective is not a bound. The KL divergence is exact for Normal priors.
    Latents on which the prior of other latents depends, and latents with a constrained support (such as a positive
    noise scale), are sampled with reparameterisation.

    The guide must consist of independent Gaussians: :class:`~pyro_dvi.MultiplicativeNoiseGuide` (MNVI),
    :class:`~pyro_dvi.MeanFieldGuide`, Pyro's ``AutoNormal`` or ``AutoDiagonalNormal`` (mean-field), or hand-written
    Normal sites. Only the last layer may have covariances: use :class:`~pyro_dvi.LastLayerGuide`, or Pyro's
    ``AutoMultivariateNormal`` over the sites of this layer. Predict with :class:`~pyro_dvi.Moments`.

    Args:
        kl_weight: :math:`\beta` (the paper's :math:`\kappa`), a float or a function of the completed training steps.
        temperature: temperature T of the posterior; see :class:`~pyro_dvi.objectives.Objective`.
        estimator: estimator of the expected log-normaliser of class probabilities; by default, ``Sobol(64)``.
            ``TiltedBound()`` needs no quadrature points.
        weighting: weights of the log-likelihood of single observations: ``VarianceWeighted()``, or a function of an
            observed site's distribution at the mean parameters and of the completed training steps. None means equal
            weights.
        full_covariance: propagate the covariances between the activations of an example (DVI in the paper; without
            covariances, the paper calls the method dDVI). Only dense ReLU networks are supported, and memory and time
            grow with the square of the width.
        variance_floor: smallest variance of the inputs of nonlinearities; the paper uses 1e-5 (Appendix A).
        num_data: size of the data set, compared with the plate's scale; None skips the check.
        num_particles: number of runs to average if some latents are sampled.

    Attributes:
        terms: detached "loss", "log_likelihood", "kl" and "kl_weight" of the last evaluation.

    Raises:
        GuideError: the guide is not a factorised Gaussian (except for a last layer).
        ModelError: nothing is observed, or a latent site is missing from the guide.
        UnsupportedError: a function or distribution of the model has no rule, or the model is a mixture.
        NonFiniteError: the loss is NaN or infinite; no update is made.

    Source: Schmitt & Roth (2021), "Sampling-free variational inference for neural networks with multiplicative
    activation noise", Eq. 6-17; Wu et al. (2019), "Deterministic variational inference for robust Bayesian neural
    networks".

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_dvi import MeanFieldGuide
        >>> from pyro_dvi.optim import Adam
        >>> def model(x, y=None):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
        >>> x = torch.linspace(-1, 1, 20)
        >>> guide = MeanFieldGuide(model)
        >>> svi = SVI(model, guide, Adam({"lr": 0.05}), loss=MomentPropagationELBO())
        >>> losses = [svi.step(x, 2 * x) for _ in range(300)]
        >>> bool(abs(guide.median()["w"] - 2) < 0.1)
        True
    """

    prediction_rule = "Moments"
    takes_joint = True

    def __init__(
        self,
        *,
        kl_weight: float | Callable[[int], float] = 1.0,
        temperature: float = 1.0,
        estimator: LogitEstimator | None = None,
        weighting: Callable[[Any, int], Tensor] | None = None,
        full_covariance: bool = False,
        variance_floor: float | None = None,
        num_data: int | None = None,
        num_particles: int = 1,
    ) -> None:
        super().__init__(
            kl_weight=kl_weight, temperature=temperature, num_data=num_data, num_particles=num_particles
        )
        if estimator is not None:
            check_choice("estimator", estimator, LogitEstimator, "Sobol(64) or TiltedBound()")
        if variance_floor is not None and not variance_floor >= 0:
            raise ArgumentError(f"variance_floor must not be negative, got {variance_floor}")
        self.estimator = estimator
        self.weighting = weighting
        self.variance_floor = variance_floor
        self.full_covariance = full_covariance
        if full_covariance:
            self.prediction_rule = "FullCovariance"

    def recorded_for(self, guide: Any) -> Any:
        exponent = getattr(self.weighting, "exponent", None)
        if self.weighting is None or isinstance(exponent, (int, float)):
            return ()
        if not isinstance(self.weighting, VarianceWeighted):
            raise UnsupportedError("a custom weighting may depend on the number of steps")
        return exponent(self._step)  # type: ignore[misc]

    def evaluate(self, call: Call, kl_weight: float, training: bool) -> dict[str, Tensor]:
        structure, first = self.structure(call, training, gradients=False)
        run = run_with_moments(call, structure.sampled, partial(self._moments_taken, first))
        observed = self.observed(run.model_trace)
        for site in observed.sites:
            refuse_moments(site.fn, site.name)
            if first:
                _check_shape(site, structure.shapes.get(site.name))
                _warn_of_shared_outputs(site)
        if self.weighting is not None and training:
            for site in observed.sites:
                fn: Any = rebuilt(site.fn, lambda part: part.at_mean)
                fn = fn if site.mask is None else fn.mask(site.mask)
                site.scale = site.scale * self.weighting(fn, self._step)
        log_likelihood = observed.log_likelihood()
        if first:
            _check_reached(call, log_likelihood, run.latents, structure)
        kl, divergence = self.divergences(run.latents)
        return {"loss": kl_weight * divergence - log_likelihood, "log_likelihood": log_likelihood, "kl": kl}

    @contextmanager
    def _moments_taken(self, first: bool, given: Mapping[str, GaussianMoments]) -> Iterator[None]:
        with (
            nullcontext() if self.variance_floor is None else variance_floor(self.variance_floor),
            full_covariances(self.full_covariance),
            uncertain_likelihoods(self.estimator),
            warned_of_repeated_uses(given) if first else nullcontext(),
        ):
            yield


def _check_shape(site: ObservedSite, expected: torch.Size | None) -> None:
    """Compare the shape with the shape in a run on tensors; they differ if the model branches on the type of values."""
    shape = site.fn.batch_shape + site.fn.event_shape
    if expected is not None and shape != expected:
        raise ModelError(
            f"observed site {site.name!r} has the shape {tuple(expected)} if the latents are tensors, but "
            f"{tuple(shape)} if they are moments, for which torch.is_tensor(x) is False: use hasattr(x, 'shape')"
        )


def _warn_of_shared_outputs(site: ObservedSite) -> None:
    """Warn if two parameters of a distribution, which are treated as independent, depend on the same outputs."""
    part = uncertain_part(site.fn)
    parameters = part.parameters if part else {}
    behind = {k: gaussian_of(p) for k, p in parameters.items() if isinstance(p, GaussianMoments)}
    if has_covariances(*behind.values()) or not are_distinct(behind.values()):
        return  # they are averaged jointly
    means = [g.loc.sum() for g in behind.values() if g.loc.requires_grad]
    for root in map(_root, behind.values()) if len(means) > 1 else ():
        found = [torch.autograd.grad(m, root, retain_graph=True, allow_unused=True)[0] for m in means]
        used = [gradient != 0 for gradient in found if gradient is not None]
        if len(used) > 1 and bool((torch.stack(used).sum(0) > 1).any()):
            return warn(
                f"observed site {site.name!r}: {' and '.join(behind)} depend on the same outputs, as in Normal(f + g, "
                "softplus(g)), but are treated as independent. Use separate outputs for each, or train with TaylorELBO"
            )


def _root(gaussian: GaussianMoments) -> Tensor:
    """Return the tensor of means from which a Gaussian's means were taken, before a shift or scaling."""
    while gaussian.origin is not None:
        gaussian = gaussian.origin.inner
    return gaussian.loc if gaussian.loc._base is None else gaussian.loc._base


def _check_reached(call: Call, log_likelihood: Tensor, latents: list[Latent], structure: Structure) -> None:
    """Raise an error if a function drops the gradients of moments because moments are not tensors."""
    locs = dict(
        (one.name, one.value) if one.source is None else (one.source.name, one.source.loc) for one in latents
    )
    trainable = {name for name, loc in locs.items() if loc.requires_grad}
    missing = trainable - reached_by(log_likelihood, locs) - structure.sampled.keys()
    if missing - structure.reached:
        with undisturbed():
            trace = run_at_means(call).model_trace
            check_gradients(call, trace, observed_sites(trace).log_likelihood())
    lost = sorted(missing & structure.reached)
    if lost:
        raise ModelError(
            f"gradients of the likelihood do not reach latent site {lost[0]!r} when means and variances are "
            "propagated, because a custom torch.autograd.Function or a reentrant checkpoint drops the gradients. Call "
            "torch functions directly (or write a moment rule), and use checkpoint(..., use_reentrant=False)."
        )
