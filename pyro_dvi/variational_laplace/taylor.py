# SPDX-License-Identifier: Apache-2.0
"""Variational Laplace: the log-likelihood at the mean, a squared-gradient penalty, and the KL divergence."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pyro_dvi.core.arguments import check_choice
from pyro_dvi.core.kinks import PIECEWISE_LINEAR
from pyro_dvi.curvature import Curvature, Fisher, Linearisation
from pyro_dvi.errors import warn
from pyro_dvi.objectives.objective import Objective
from pyro_dvi.runs.divergences import prior_precision
from pyro_dvi.runs.observed import Observed
from pyro_dvi.runs.posterior_run import Call, PosteriorRun, run_at_means


class TaylorELBO(Objective):
    r"""Objective of Variational Laplace: the loss at the posterior mean plus a penalty on squared gradients.

    For :math:`q = \mathcal N(\mu, \mathrm{diag}\,\sigma^2)` over the latents and a minibatch with plate scale N/M,

    .. math::
        \mathrm{loss} = -\sum_s \mathrm{scale}_s \log p_s(y_s \mid \mu)
            + \tfrac12 \sum_\lambda \sigma_\lambda^2\, c_\lambda + \beta\, \mathrm{KL}(q \,\|\, p),

    where the curvature c is by default the squared gradient for labels drawn from the model at :math:`\mu`
    (:class:`~pyro_dvi.curvature.Fisher`).

    Status: a second-order Taylor approximation of the ELBO in each latent; exact for linear models with Gaussian noise,
    otherwise not a bound. The KL divergence is exact for Normal priors. Latents on which the prior of other latents
    depends (such as a hierarchical scale) are not expanded but sampled with reparameterisation.

    The guide must consist of independent Gaussians: :class:`~pyro_dvi.MeanFieldGuide`, Pyro's ``AutoNormal`` and
    ``AutoDiagonalNormal``, or hand-written Normal sites; ``AutoDelta`` gives MAP estimation. Predict at the mean,
    because draws of all weights of a network lie outside the neighbourhood in which the expansion is accurate.

    Args:
        curvature: the curvature c of the penalty; by default, ``Fisher()``.
        kl_weight: :math:`\beta`, a float or a schedule called with the number of completed training steps.
        temperature: temperature T of the posterior; see :class:`~pyro_dvi.objectives.Objective`.
        num_data: size of the data set, compared with the plate's scale; None skips the check.
        num_particles: number of runs to average if some latents are sampled.

    Attributes:
        terms: detached "loss", "log_likelihood", "penalty", "kl" and "kl_weight" of the last evaluation.

    Raises:
        GuideError: the guide is not a factorised Gaussian.
        ModelError: nothing is observed, or a latent site is missing from the guide.
        DataError: observed values are outside the support of the likelihood, or a minibatch is not scaled.
        NonFiniteError: the loss is NaN or infinite; no update is made.

    Source: Unlu & Aitchison (2021), "Gradient regularization as approximate variational inference", Entropy 23(12),
    1629, Eqs. 11-30.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro.infer.autoguide import AutoNormal
        >>> from pyro_dvi.optim import Adam
        >>> def model(x, y=None):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(w * x, 0.1), obs=y)
        >>> x = torch.linspace(-1, 1, 20)
        >>> guide = AutoNormal(model, init_scale=0.02)
        >>> svi = SVI(model, guide, Adam({"lr": 0.05}), loss=TaylorELBO())
        >>> losses = [svi.step(x, 2 * x) for _ in range(300)]
        >>> bool(abs(guide.median()["w"] - 2) < 0.1)
        True
    """

    prediction_rule = "AtMean"

    def __init__(
        self,
        *,
        curvature: Curvature | None = None,
        kl_weight: float | Callable[[int], float] = 1.0,
        temperature: float = 1.0,
        num_data: int | None = None,
        num_particles: int = 1,
    ) -> None:
        curvature = Fisher() if curvature is None else curvature
        check_choice("curvature", curvature, Curvature, "Fisher() or GGNDiagonal()")
        super().__init__(
            kl_weight=kl_weight, temperature=temperature, num_data=num_data, num_particles=num_particles
        )
        self.curvature = curvature

    def recorded_for(self, guide: Any) -> Any:
        return self.curvature.weight(self._step)

    def evaluate(self, call: Call, kl_weight: float, training: bool) -> dict[str, Tensor]:
        structure, first = self.structure(call, training)
        penalty_weight = self.curvature.weight(self._step) if training else 1.0
        recorder = self.curvature.recorder if penalty_weight else None
        run = run_at_means(call, structure.sampled, recorder)
        if first and run.gaussians:  # a point mass has no penalty
            _warn_of_kinks(structure.function_names)
        observed = self.observed(run.model_trace)
        log_likelihood = observed.log_likelihood()
        kl, divergence = self.divergences(run.latents)
        penalty = torch.zeros_like(log_likelihood)
        if penalty_weight and run.gaussians:
            likelihood = self._linearised(run, observed, kl_weight)
            penalty = penalty_weight * self.curvature.penalty(likelihood)
        loss = penalty - log_likelihood + kl_weight * divergence
        return {"loss": loss, "log_likelihood": log_likelihood, "penalty": penalty, "kl": kl}

    def _linearised(self, run: PosteriorRun, observed: Observed, kl_weight: float) -> Linearisation:
        """Return the linearised likelihood for the curvature."""
        return Linearisation(
            names=[g.name for g in run.gaussians],
            values=[g.value for g in run.gaussians],
            scales=[g.expanded_scale() for g in run.gaussians],
            sites=observed.sites,
            precision_limits=lambda: _precision_limits(run, kl_weight),
            factors=observed.factors,
            recorder=run.recorder,
            model=run.call.model,
        )


def _precision_limits(run: PosteriorRun, kl_weight: float) -> list[Tensor | None]:
    """Return kl_weight / s² for every Gaussian with a Normal prior of scale s, times the plate scale as in the KL."""
    limits: list[Tensor | None] = []
    for gaussian in run.gaussians:
        latents = [latent for latent in run.latents if latent.source is gaussian]
        parts: list[Tensor] = []
        for latent in latents:
            precision = prior_precision(latent)
            if precision is None or latent.loc is None:
                parts = []
                break
            parts.append((precision * latent.plate_scale).expand_as(latent.loc).reshape(-1))
        # A joint vector contains its sites one after the other; any other site is a single part.
        limits.append(kl_weight * torch.cat(parts).reshape(gaussian.value.shape) if parts else None)
    return limits


def _warn_of_kinks(function_names: frozenset[str]) -> None:
    kinks = sorted(PIECEWISE_LINEAR & function_names)
    if kinks:
        warn(
            f"the model uses {', '.join(kinks)}, whose second derivative is zero wherever it exists, so the gradient "
            "of TaylorELBO's penalty ignores the kinks. Use softplus, GELU, SiLU or tanh instead "
            "(pyro_dvi.bayesian.smooth_activations_ replaces activation modules)."
        )
