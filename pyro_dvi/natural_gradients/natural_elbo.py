# SPDX-License-Identifier: Apache-2.0
"""The ELBO for natural-gradient optimizers, with gradients and curvature."""

from functools import cached_property
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyro_dvi.core.autograd_graph import graph_of
from pyro_dvi.errors import ArgumentError, GuideError, UnsupportedError
from pyro_dvi.natural_gradients.drawn_run import DrawnRun, SquareMeasurement
from pyro_dvi.natural_gradients.estimates import Estimate, NaturalStep
from pyro_dvi.natural_gradients.optimizer import wanted_by
from pyro_dvi.objectives.objective import Objective
from pyro_dvi.runs.observed import num_data_of
from pyro_dvi.runs.posterior_run import Call
from pyro_dvi.runs.structure import check_gradients


class NaturalGradientELBO(Objective):
    r"""Objective of VOGN, OGN, IVON and NoisyKFAC: the loss at draws of the weights, and the curvature.

    .. math::
        \mathrm{loss} = -\frac1K\sum_k \sum_s \mathrm{scale}_s \log p_s(y_s \mid w_k)
            + \beta\,\mathrm{KL}(q \,\|\, p), \qquad w_k \sim q

    The backward pass fills the ``grad`` of the means with the gradient of the negative log-likelihood at the draws. It
    fills the ``grad`` of the precisions with the curvature that the optimizer requests. This is the sum of squared
    per-example gradients at the draws (:func:`~pyro_dvi.VOGN`) or at the mean (:func:`~pyro_dvi.OGN`), or the product
    of gradient and noise (:func:`~pyro_dvi.IVON`). The optimizer adds the prior in closed form.

    Status: the loss is an unbiased estimate of the (tempered) negative ELBO. An example is one element of an observed
    site's batch shape. If batch normalisation in training mode couples examples, each row of a layer is treated as one
    example when gradients are squared, as in the paper. A latent that is used outside the layers that have a rule needs
    one backward pass per example.

    The objective requires a :class:`~pyro_dvi.NaturalGradientGuide` (for NoisyKFAC, a
    :class:`~pyro_dvi.KroneckerGuide`), Normal priors whose parameters do not depend on latents, and one of the
    optimizers above. With Adam, the optimizer also updates deterministic parameters: batch normalisation, a learned
    noise scale, or a learned prior scale.

    Args:
        kl_weight: :math:`\beta > 0`, a float or a schedule of the completed training steps. Like the temperature
            :math:`\tau` of the papers, it divides the posterior precision and multiplies the prior precision.
        temperature: temperature T of the posterior; see :class:`~pyro_dvi.objectives.Objective`. It divides the
            posterior precision and does not change the prior.
        num_data: N, compared with the plate's scale; None skips the check.
        num_particles: K, the number of draws of the weights per step.

    Raises:
        GuideError: the guide is not a ``NaturalGradientGuide``, or no optimizer has used the last measurements.
        ModelError: a prior is not Normal, a prior depends on another latent, or nothing is observed.
        UnsupportedError: the model uses reentrant checkpointing, sparse embeddings, or torch's DistributedDataParallel.
        ArgumentError: ``temperature`` is zero.
        NonFiniteError: the loss is NaN or infinite; no update is made.

    Source: Osawa et al. (2019), "Practical deep learning with Bayesian principles", Eq. 2 and Algorithm 1.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_dvi import NaturalGradientGuide
        >>> from pyro_dvi.natural_gradients import VOGN
        >>> def model(x, y=None):
        ...     w = pyro.sample("w", dist.Normal(0.0, 1.0))
        ...     with pyro.plate("data", len(x)):
        ...         return pyro.sample("y", dist.Normal(w * x, 0.5), obs=y)
        >>> x = torch.linspace(-1, 1, 20)
        >>> guide = NaturalGradientGuide(model)
        >>> svi = SVI(model, guide, VOGN({"lr": 0.1}), loss=NaturalGradientELBO())
        >>> losses = [svi.step(x, 2 * x) for _ in range(300)]
        >>> bool(abs(guide.median()["w"] - 2) < 0.3)
        True
    """

    moves_precisions = True

    @cached_property
    def _squares(self) -> SquareMeasurement:
        return SquareMeasurement(self.num_particles)

    def prepare(self, guide: Any, optimizer: Any) -> None:
        """Make the next step of the guide measure the curvature that an optimizer needs, and drop unused measurements.

        ``fit`` and ``load`` call this method. In a loop of your own, you can call it before the first step and after
        loading states. Without this call, the next step measures squared gradients at a draw, and an optimizer that
        needs another curvature, such as ``OGN``, ignores the step.

        Args:
            guide: a ``NaturalGradientGuide``.
            optimizer: a natural-gradient optimizer for Pyro or torch, or a Pyro scheduler of one.

        Raises:
            GuideError: the guide or the optimizer is of another kind.

        Example:
            >>> from pyro_dvi import NaturalGradientGuide, OGN
            >>> guide, optimizer = NaturalGradientGuide(lambda: None), OGN({})
            >>> elbo = NaturalGradientELBO()
            >>> elbo.prepare(guide, optimizer)  # and SVI(model, guide, optimizer, loss=elbo)
            >>> guide.natural_step.wanted
            Squares(at_mean=True)
        """
        step = _step_of(guide)
        wanted = wanted_by(optimizer)
        _check_estimate(guide, wanted)
        step.wanted = wanted
        step.drop()

    def evaluate(self, call: Call, kl_weight: float, training: bool) -> dict[str, Tensor]:
        step = _step_of(call.guide)
        _check_estimate(call.guide, step.wanted)
        run = DrawnRun.measuring(step.measured if training else step.wanted, call)
        observed = self.observed(run.model_trace)
        log_likelihood = observed.log_likelihood()
        if training and not step.sites:
            check_gradients(call, run.model_trace, log_likelihood)
        kl, divergence = self.divergences(run.latents)
        if training:
            graph = graph_of([log_likelihood, divergence])
            log_likelihood = run.with_idle_draws(log_likelihood, graph)
            step.num_data = max(map(num_data_of, observed.terms))
            step.sites = run.sites()
            leaves = [node.variable for node in graph if hasattr(node, "variable")]
            for parameter in (*leaves, *(site.loc for site in step.sites)):
                parameter.natural_step = step
            step.measured.measure(run, observed.terms, self._squares)
        return {"loss": kl_weight * divergence - log_likelihood, "log_likelihood": log_likelihood, "kl": kl}

    def begin(self, guide: Any) -> None:
        step = _step_of(guide)
        _check_training(self.current_kl_weight())
        step.begin()
        step.kl_weight, step.temperature = self.current_kl_weight(), self.temperature

    def recorded_for(self, guide: Any) -> Any:
        return guide.natural_step.wanted, bool(guide.natural_step.sites)

    def record_of(self, guide: Any) -> Any:
        return guide.natural_step.num_data, guide.natural_step.sites

    def set_record(self, guide: Any, record: Any) -> None:
        guide.natural_step.num_data, guide.natural_step.sites = record

    def returned(self, loss: Tensor, guide: Any) -> None:
        if self.step & (self.step - 1) == 0:  # only occasionally, because this reads a value
            loss.register_hook(_check_factor)


def _check_factor(gradient: Tensor) -> None:
    """Raise if the loss was multiplied by a factor before the backward pass."""
    if gradient.item() != 1:
        raise UnsupportedError(
            f"the loss was multiplied by {gradient.item():g} before the backward pass, which makes squared gradients "
            "wrong: call loss.backward() without scaling (the optimizer divides by N itself, and autocast with "
            "bfloat16 needs no GradScaler)"
        )


def _step_of(guide: Any) -> NaturalStep:
    if not hasattr(guide, "natural_step"):
        raise GuideError(
            f"NaturalGradientELBO needs a NaturalGradientGuide, got {type(guide).__name__}: use "
            "pyro_dvi.NaturalGradientGuide(model), or another objective for this guide"
        )
    return guide.natural_step  # type: ignore[no-any-return]


def _check_estimate(guide: Any, estimate: Estimate) -> None:
    if estimate.factored != hasattr(guide, "layers"):
        raise GuideError(
            f"a {type(guide).__name__} must be trained with {guide.trained_by}: VOGN, OGN and IVON set the precisions "
            "of a NaturalGradientGuide(model), and NoisyKFAC sets the Kronecker factors of a KroneckerGuide(model)"
        )


def _check_training(kl_weight: float) -> None:
    if getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise UnsupportedError(
            "torch's DistributedDataParallel does not average squared gradients over processes: use "
            "pyro_dvi.training.DataParallel(NaturalGradientELBO())(model, guide) instead"
        )
    if not kl_weight > 0:
        raise ArgumentError(
            "the precision of the posterior is divided by kl_weight, which must be positive, also at the start of a "
            "schedule: LinearWarmup(steps, start=0.1). For a point estimate, use AutoDelta with SampledELBO"
        )
