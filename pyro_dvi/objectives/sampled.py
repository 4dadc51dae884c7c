# SPDX-License-Identifier: Apache-2.0
"""The ELBO with sampled weights and, unlike Pyro's ELBOs, with a weight for the KL divergence."""

from contextlib import nullcontext
from typing import Any

import torch
from pyro.distributions.util import scale_and_mask, sum_rightmost
from torch import Tensor, distributions as td

from pyro_dvi.core.undisturbed import undisturbed
from pyro_dvi.curvature.linearisation import sum_of
from pyro_dvi.errors import GuideError
from pyro_dvi.gaussians.normals import is_joint
from pyro_dvi.objectives.objective import Objective
from pyro_dvi.runs.divergences import refuse_free_scales
from pyro_dvi.runs.latents import GaussianSite, unconstraining_transform
from pyro_dvi.runs.posterior_run import Call, GuideRun, PosteriorRun, run_at_means
from pyro_dvi.runs.sites import core, is_latent, sites_of
from pyro_dvi.runs.structure import check_gradients, refuse_dependent


class SampledELBO(Objective):
    r"""Objective of variational inference with sampled weights, and, with an ``AutoDelta``, of MAP estimation.

    .. math::
        \mathrm{loss} = -\frac1K \sum_{k=1}^K \sum_s \mathrm{scale}_s \log p_s(y_s \mid w_k)
            + \beta\, \mathrm{KL}(q \,\|\, p), \qquad w_k \sim q

    At :math:`\beta = 1`, the loss has the same expectation as the loss of Pyro's ``Trace_ELBO``, in which the KL
    divergence is sampled and cannot be weighted. With ``AutoDelta``, nothing is drawn: the loss is
    :math:`-\log p(y \mid w) - \beta \log p(w)`, so training converges to the MAP estimate under the prior
    :math:`p(w)^\beta`.

    Status: unbiased. For factorised Gaussian guides and point masses, the KL divergence is computed in closed form (or
    with quadrature, see the conventions). For all other guides, such as ``AutoMultivariateNormal``, flows or guides
    whose sites depend on each other, it is estimated from the same draws as the likelihood,
    :math:`\log q(w_k) - \log p(w_k)`. The attribute ``divergence`` states which of the two is used.

    Predict with :class:`~pyro_dvi.Samples`, or ``AtMean()`` after ``AutoDelta``.

    Args:
        kl_weight: :math:`\beta`, a float, or a schedule, which is called with the number of completed training steps.
        temperature: T, factor of the entropy, see :class:`~pyro_dvi.objectives.Objective`; it has no effect on
            ``AutoDelta``.
        num_data: size of the data set, which is compared with the plate's scale; None skips the check.
        num_particles: K, number of draws per step.

    Attributes:
        divergence: ``"closed form"`` or ``"sampled"``; None before the first evaluation.
        terms: detached "loss", "log_likelihood", "kl" and "kl_weight" of the last evaluation.

    Raises:
        GuideError: if a site of the guide cannot be sampled with reparameterisation, for example a discrete site.
        ModelError: if nothing is observed, or a latent site is missing in the guide.
        NonFiniteError: if the loss is NaN or infinite; no update is made.

    Source: Blundell et al. (2015), "Weight uncertainty in neural networks", Eq. 2; Kingma & Welling (2014),
    "Auto-encoding variational Bayes", Eq. 7, for the KL divergence in closed form.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro.infer.autoguide import AutoDelta
        >>> from pyro_dvi.optim import Adam
        >>> def model(x, y=None):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)
        >>> x = torch.ones(4)
        >>> guide, elbo = AutoDelta(model), SampledELBO(kl_weight=4.0)
        >>> svi = SVI(model, guide, Adam({"lr": 0.1}), loss=elbo)
        >>> losses = [svi.step(x, 2 * x) for _ in range(200)]
        >>> round(guide.median()["w"].item(), 2), elbo.divergence  # 4 data of 2, 4 priors of 0
        (1.0, 'closed form')
    """

    divergence: str | None = None
    _known: tuple[Any, bool] = (None, False)  # the last guide, and whether it is a factorised Gaussian

    def evaluate(self, call: Call, kl_weight: float, training: bool) -> dict[str, Tensor]:
        first, factorised = self._known[0] is not call.guide, self._is_factorised(call)
        self.divergence = "closed form" if factorised else "sampled"
        if factorised:
            self.structure(call, training)
        run = PosteriorRun.of(call, _GaussianDraws() if factorised else _Draws(), nullcontext)
        log_likelihood = self.observed(run.model_trace).log_likelihood()
        if first and not factorised:
            check_gradients(call, run.model_trace, log_likelihood, factorised=False)
        kl, divergence = self.divergences(run.latents)
        log_density = run.guide.log_density()
        kl, divergence = kl + log_density, divergence + log_density
        if self.temperature != 1 and not factorised:
            if self.temperature < 1:
                refuse_free_scales(run.latents, drawn=True)
            divergence = divergence + (self.temperature - 1) * (log_density + run.guide.log_volume())
        return {"loss": kl_weight * divergence - log_likelihood, "log_likelihood": log_likelihood, "kl": kl}

    def _is_factorised(self, call: Call) -> bool:
        """Return True if the guide is a factorised Gaussian; the check runs once per guide."""
        if self._known[0] is not call.guide:
            try:
                with undisturbed():
                    gaussians = run_at_means(call).gaussians
                    refuse_dependent(gaussians)
                self._known = (call.guide, not any(is_joint(site.base) for site in gaussians))
            except GuideError:
                self._known = (call.guide, False)
        return self._known[1]


class _GaussianDraws(GuideRun):
    """Draw the Gaussian sites of a guide; the divergence is computed from their marginals."""

    def _chosen(self, name: str, base: td.Normal, transforms: tuple[Any, ...]) -> GaussianSite:
        value = base.loc + base.scale * torch.randn_like(base.loc)
        return GaussianSite(name, value, base, transforms, sampled=True)

    def log_density(self) -> float:
        """Return the log-density of q that the divergence lacks: zero, because the closed form already contains it."""
        return 0.0


class _Draws(GuideRun):
    """Draw from any guide; the model receives the draws as point masses, and the density of q is added separately."""

    def _value_of(self, site: Any) -> None:
        if not site["fn"].has_rsample:
            raise GuideError(
                f"guide site {site['name']!r} is {type(core(site['fn'])).__name__}, whose draws have no gradient. Use "
                "a reparameterised distribution, sum a discrete variable out of the model, or train with Pyro's "
                "Trace_ELBO"
            )

    def log_density(self) -> Tensor:
        """Return the log-density of the draws; the divergence already contains that of point masses."""
        drawn = self._drawn()
        self.trace.compute_log_prob(lambda _name, site: any(site is one for one in drawn))
        return sum_of([site["log_prob_sum"] for site in drawn])

    def log_volume(self) -> Tensor | float:
        """Return the log-determinant that converts the draws' log-density to the one of their unconstrained values."""
        terms = []
        for site in self._drawn():
            transform, value = unconstraining_transform(site["fn"].support), site["value"]
            if transform is not None:
                volume = transform.log_abs_det_jacobian(transform.inv(value), value)
                volume = sum_rightmost(volume, volume.dim() - len(site["fn"].batch_shape))
                terms.append(scale_and_mask(volume, site["scale"], site["mask"]).sum())
        return sum_of(terms) if terms else 0.0

    def _drawn(self) -> list[Any]:
        return [
            site for site in sites_of(self.trace, is_latent) if type(core(site["fn"])).__name__ != "Delta"
        ]
