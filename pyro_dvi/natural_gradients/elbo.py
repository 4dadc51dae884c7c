# SPDX-License-Identifier: Apache-2.0
"""The ELBO whose gradients and curvature feed a natural-gradient optimizer."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyro_dvi.core.autograd_graph import graph_of
from pyro_dvi.core.natural_step import STEPS, NaturalStep, Statistic
from pyro_dvi.errors import ArgumentError, GuideError, UnsupportedError
from pyro_dvi.natural_gradients.drawn_run import DrawnRun
from pyro_dvi.natural_gradients.squares import Draw, SquareMeasurement
from pyro_dvi.objectives.base import DeterministicELBO
from pyro_dvi.runs.divergences import kl_to_priors
from pyro_dvi.runs.latents import Latent
from pyro_dvi.runs.minibatch import UnscaledMinibatches, num_data_of
from pyro_dvi.runs.observed import Observed
from pyro_dvi.runs.posterior_run import Call
from pyro_dvi.runs.structure import check_gradients


class NaturalGradientELBO(DeterministicELBO):
    r"""Objective of VOGN, OGN and IVON: the loss at draws of the weights, and the curvature that they need.

    .. math::
        \mathrm{loss} = -\frac1K\sum_k \sum_s \mathrm{scale}_s \log p_s(y_s \mid w_k)
            + \beta\,\mathrm{KL}(q \,\|\, p), \qquad w_k \sim q

    The backward pass gives each mean the gradient of the log-likelihood at the draws, and each precision, in the place
    of a gradient, the curvature that the optimizer asks for: sums of squared per-example gradients at the draws
    (:class:`~pyro_dvi.natural_gradients.VOGN`) or at the mean (:class:`~pyro_dvi.natural_gradients.OGN`), or products of gradient and noise
    (:class:`~pyro_dvi.natural_gradients.IVON`). The optimizer adds the prior, in closed form.

    Status: the loss is an unbiased estimate of the (tempered) negative ELBO. An example is an element of an observed
    site's batch shape; where batch normalisation in training mode couples examples, squared gradients are those of each
    layer's own rows, as in the paper. Latents that no layer with a rule uses cost a backward pass per example.

    Needs :class:`~pyro_dvi.NaturalGradientGuide`, Normal priors whose parameters depend on no latent, and one of the
    optimizers above. Parameters that are no latents (batch normalisation, a learned noise scale, a learned prior scale)
    get an ordinary Adam step from the same optimizer.

    Args:
        kl_weight: :math:`\beta` (the papers' temperature :math:`\tau`); positive; a float or a schedule of the
            training steps done.
        num_data: N, compared with the plate's scale; None skips the check.
        num_particles: K, draws of the weights a step.

    Raises:
        GuideError: the guide is no ``NaturalGradientGuide``, or the last measurements were never used.
        ModelError: a prior is not Normal, or depends on another latent; or nothing is observed.
        UnsupportedError: reentrant checkpointing, sparse embeddings, or torch's DistributedDataParallel.
        ArgumentError: a temperature of zero.
        NonFiniteError: the loss is NaN or infinite; no update is made.

    Source: Osawa et al. (2019), "Practical deep learning with Bayesian principles", Eq. 2 and Algorithm 1.

    Example:
        >>> import pyro, pyro.distributions as dist
        >>> from pyro.infer import SVI
        >>> from pyro_dvi import NaturalGradientGuide
        >>> from pyro_dvi.optim import VOGN
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

    _moves_precisions = True
    _optimizer: Any = None  # the one that is served
    _told: Statistic | None = None  # what a checkpoint says is to be measured next
    _guide_id: int | None = None
    _step: NaturalStep | None = None  # while it is being evaluated
    _is_whole = False

    @cached_property
    def _squares(self) -> SquareMeasurement:
        return SquareMeasurement()

    @cached_property
    def _unscaled(self) -> UnscaledMinibatches:
        return UnscaledMinibatches()

    def serve(self, optimizer: Any) -> Any:
        """Measure what this optimizer needs, from the first step on, and drop measurements that were not used.

        ``fit`` and ``load`` do so. In a loop of your own it is optional: an objective that has not been told measures
        squared gradients at a draw in the first step, and for the optimizer that has stepped after that; ``OGN`` leaves
        out that first step.

        Args:
            optimizer: a natural-gradient optimizer of Pyro or torch, or a scheduler of Pyro for one; None: whichever
                steps.

        Returns:
            What was served before.

        Raises:
            GuideError: another optimizer.

        Example:
            >>> from pyro_dvi.optim import OGN
            >>> elbo, optimizer = NaturalGradientELBO(), OGN({})
            >>> elbo.serve(optimizer)  # and SVI(model, guide, optimizer, loss=elbo)
        """
        if optimizer is not None:
            wanted_by(optimizer)
        if (last := self._last()) is not None:
            last.drop()
        before, self._optimizer = self._optimizer, optimizer
        return before

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, with what the optimizer wants measured in the next step."""
        wanted = self._wanted()
        return super().state_dict() | ({} if wanted is None else {"wanted": wanted.value})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._told = Statistic(state["wanted"]) if "wanted" in state else None

    def __getstate__(self) -> dict[str, Any]:
        """Let copies, whose guide may be a copy too, measure the same next."""
        return {**self.__dict__, "_guide_id": None, "_told": self._wanted()}

    def _wanted(self) -> Statistic | None:
        """What is to be measured next, as far as that is known without an optimizer."""
        last = self._last()
        return self._told if self._told is not None or last is None else last.wanted

    def _last(self) -> NaturalStep | None:
        """The step of the guide that was trained last."""
        return next((step for guide, step in STEPS.items() if id(guide) == self._guide_id), None)

    def _next(self, guide: Any) -> NaturalStep:
        """Begin a step of a guide, or an evaluation."""
        last = STEPS.get(guide)
        if self._told is not None:
            return NaturalStep(self._told)
        if self._optimizer is not None:
            return NaturalStep(wanted_by(self._optimizer))
        return NaturalStep(Statistic.SQUARES if last is None else last.wanted)

    def _evaluate(self, call: Call, kl_weight: float, training: bool) -> dict[str, Tensor]:
        _check(call.guide, kl_weight, training)
        step = self._step or self._next(call.guide)
        run = DrawnRun.measuring(step, call)
        observed = self._observed(run.model_trace)
        log_likelihood = observed.log_likelihood()
        if training and call.guide not in STEPS:
            check_gradients(call, run.model_trace, log_likelihood)
        if training and run.has_learned_priors():
            kl = kl_to_priors(_detached(latent) for latent in run.latents)
        else:
            with torch.no_grad():
                kl = kl_to_priors(run.latents)
        if training:
            graph = graph_of([log_likelihood, kl])
            log_likelihood = run.with_idle_draws(log_likelihood, graph)
            step.num_data, step.temperature = max(map(num_data_of, observed.terms)), kl_weight
            step.sites = run.sites()
            step.trained |= {id(node.variable): node.variable for node in graph if hasattr(node, "variable")}
            step.trained |= {id(site.loc): site.loc for site in step.sites.values()}
            self._unscaled.see(observed.terms)
            if step.measured is not Statistic.NOISE_PRODUCTS:
                self._measure_squares(run, observed)
        return {"loss": kl_weight * kl - log_likelihood, "log_likelihood": log_likelihood, "kl": kl}

    def _measure_squares(self, run: DrawnRun, observed: Observed) -> None:
        """Have the backward pass of the loss leave squares with the precisions."""
        gaussians, local = run.guide.gaussians, run.local()
        curvatures = [drawn.curvature for drawn in gaussians.values()]
        draw = Draw(
            run.measured(observed),
            [name.removesuffix("_unconstrained") for name in gaussians],
            [drawn.value for drawn in gaussians.values()],
            self.num_particles,
            add=lambda k, squares, power: curvatures[k].add(squares, power),
        )
        self._squares.measure(draw, {k for k, name in enumerate(gaussians) if name in local})

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        self._is_whole = True  # the loss is differentiated as it is
        try:
            return super().loss_and_grads(model, guide, *args, **kwargs)
        finally:
            self._is_whole = False

    def differentiable_loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().differentiable_loss(model, guide, *args, **kwargs)
        if self._guide_id != id(guide):
            self._guide_id, self._unscaled.largest = id(guide), 0.0
        elif (last := self._last()) is not None and last.is_unused:
            raise GuideError(
                "the gradients of the last step were not used by a natural-gradient optimizer: train with "
                "pyro_dvi.natural_gradients.VOGN, OGN or IVON, and take a step after each backward pass. To go on after a backward "
                "pass without a step, set gradients to None, or drop its measurements by elbo.serve(optimizer)."
            )
        self._step = step = self._next(guide)
        try:
            loss = super().differentiable_loss(model, guide, *args, **kwargs)
        finally:
            self._step = self._told = None
        STEPS[guide] = step
        if not self._is_whole:
            loss.register_hook(step.note_factor)
        return loss


def _check(guide: Any, kl_weight: float, training: bool) -> None:
    if not hasattr(guide, "precision_parameter"):
        raise GuideError(
            f"NaturalGradientELBO needs a NaturalGradientGuide, got {type(guide).__name__}: the posterior has to be "
            "stored by mean and precision. Take pyro_dvi.NaturalGradientGuide(model), or another objective for this "
            "guide."
        )
    if training and getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise UnsupportedError(
            "torch's DistributedDataParallel averages gradients over processes, but not what natural gradients measure "
            "beside them: use pyro_dvi.training.DataParallel(NaturalGradientELBO())(model, guide) without it"
        )
    if training and not kl_weight > 0:
        raise ArgumentError(
            "kl_weight is the temperature of the posterior here and must be positive: at 0 its variance vanishes. Try "
            "0.1, also where a schedule starts, as in LinearWarmup(steps, start=0.1); or AutoDelta with Trace_ELBO for "
            "a point estimate."
        )


def _detached(latent: Latent) -> Latent:
    """The latent with its posterior constant: the divergence moves parameters of priors only."""
    if latent.loc is None or latent.scale is None:
        return latent
    return replace(latent, loc=latent.loc.detach(), own_scale=latent.scale.detach())


def wanted_by(optimizer: Any) -> Statistic:
    """Return what an optimizer of Pyro or torch wants measured in its next step.

    Raises:
        GuideError: it knows nothing of natural gradients.
    """
    constructor = getattr(optimizer, "pt_optim_constructor", type(optimizer))
    made = [getattr(one, "optimizer", one) for one in getattr(optimizer, "optim_objs", {}).values()]
    for one in (optimizer, *made):
        if isinstance(found := getattr(one, "wanted", None), Statistic):
            return found
    if isinstance(first := getattr(constructor, "first", None), Statistic):
        return first  # a scheduler of Pyro, before its first step
    raise GuideError(
        f"{getattr(constructor, '__name__', 'unknown')} cannot train by NaturalGradientELBO, whose gradients are those "
        "of the likelihood alone: take pyro_dvi.natural_gradients.VOGN, OGN or IVON, which add the prior (VOGNOptimizer, "
        "OGNOptimizer or IVONOptimizer for elbo(model, guide)). An optimizer of your own that wraps one of them must "
        "pass on its attribute 'wanted'."
    )
