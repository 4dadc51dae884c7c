# SPDX-License-Identifier: Apache-2.0
"""The ELBO whose gradients and curvature feed a natural-gradient optimizer."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyro_dvi.autograd_graph import leaves_of
from pyro_dvi.divergences import kl_to_priors
from pyro_dvi.elbos.base import DeterministicELBO
from pyro_dvi.elbos.drawn_run import DrawnRun
from pyro_dvi.elbos.measurements import Measurements
from pyro_dvi.elbos.squares import Draw, SquareMeasurement
from pyro_dvi.errors import ArgumentError, GuideError, UnsupportedError
from pyro_dvi.handlers.latents import Latent
from pyro_dvi.handlers.means import Call
from pyro_dvi.handlers.minibatch import UnscaledMinibatches, num_data_of
from pyro_dvi.handlers.observed import Observed
from pyro_dvi.natural_state import NaturalState, note_trained

__all__ = ["NaturalGradientELBO"]


class NaturalGradientELBO(DeterministicELBO):
    r"""ELBO of a Gaussian posterior, measured for an update along the natural gradient.

    .. math::
        \mathrm{loss} = -\frac1K\sum_k \sum_s \mathrm{scale}_s \log p_s(y_s \mid w_k)
            + \beta\,\mathrm{KL}(q \,\|\, p), \qquad w_k \sim q

    The backward pass leaves the gradient of the log-likelihood at the draws with the means, and what the optimizer asks
    for beside it: sums of squared per-example gradients (:class:`~pyro_dvi.optim.VOGN`), the same at the
    mean (:class:`~pyro_dvi.optim.OGN`), or products of gradient and noise (:class:`~pyro_dvi.optim.IVON`). The prior
    enters in the optimizer, in closed form.

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

    @cached_property
    def _measurements(self) -> Measurements:
        return Measurements()

    @cached_property
    def _squares(self) -> SquareMeasurement:
        return SquareMeasurement()

    @cached_property
    def _unscaled(self) -> UnscaledMinibatches:
        return UnscaledMinibatches()

    def serve(self, optimizer: Any) -> Any:
        """Measure what this optimizer needs, from the first step on, and drop measurements that were not used.

        ``fit`` and ``load`` do so. In a loop of your own it is optional: an objective that has not been told measures
        for all of them in the first step, at a draw, and for the one that has stepped after that; ``OGN`` leaves out
        that first step.

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
        return self._measurements.serve(optimizer)

    def _evaluate(self, call: Call, kl_weight: float, training: bool) -> dict[str, Tensor]:
        _check(call.guide, kl_weight, training)
        run = DrawnRun.of(call, self._measurements.wanted)
        observed = self._observed(run.model_trace)
        log_likelihood = observed.log_likelihood()
        kl = kl_to_priors(_detached(latent) for latent in run.latents)
        if training:
            log_likelihood = run.with_idle_draws(log_likelihood)
            self._measure(run, observed, kl_weight)
            note_trained(leaves_of([log_likelihood, kl]))
        return {"loss": kl_weight * kl - log_likelihood, "log_likelihood": log_likelihood, "kl": kl}

    def _measure(self, run: DrawnRun, observed: Observed, kl_weight: float) -> None:
        """Have the backward pass of the loss leave what the optimizer wants with the means."""
        draws, states = run.draws, []
        num_data, local = max(map(num_data_of, observed.terms)), run.local()
        self._unscaled.see(observed.terms)
        for name, leaf in draws.leaves.items():
            precision = partial(run.call.guide.precision_parameter, name.removesuffix("_unconstrained"))
            state = self._measurements.open(leaf, precision, run.prior_of(name), draws.asked[name])
            state.num_data, state.temperature = num_data, kl_weight
            states.append(state)
        # First what runs backward passes of its own, which would set off the hooks of the others.
        self._squares.measure(
            Draw(
                run.measured(observed),
                [name.removesuffix("_unconstrained") for name in draws.gaussians],
                [gaussian.value for gaussian in draws.gaussians.values()],
                self.num_particles,
                add=lambda k, squares: states[k].add_squares(squares),
            ),
            wanted={k for k, state in enumerate(states) if state.measured.squares},
            local={k for k, name in enumerate(draws.gaussians) if name in local},
            loss_factor=lambda: states[0].loss_factor,
        )
        for (name, gaussian), state in zip(draws.gaussians.items(), states, strict=True):
            if state.measured.noise_products:
                ratio = draws.noise[name] / gaussian.scale.detach()
                gaussian.value.register_hook(partial(_deliver_product, state, ratio))

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        self._measurements.refuse_unused(guide)
        try:
            return super().loss_and_grads(model, guide, *args, **kwargs)
        except Exception:
            self._measurements.drop()
            raise

    def differentiable_loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().differentiable_loss(model, guide, *args, **kwargs)
        self._measurements.refuse_unused(guide)
        if not self._measurements.begin(guide):
            self._unscaled.largest = 0.0
        try:
            loss = super().differentiable_loss(model, guide, *args, **kwargs)
        except Exception:
            self._measurements.drop()
            raise
        self._measurements.note_factor(loss)
        return loss


def _check(guide: Any, kl_weight: float, training: bool) -> None:
    if not hasattr(guide, "precision_parameter"):
        raise GuideError(
            f"NaturalGradientELBO needs a NaturalGradientGuide, got {type(guide).__name__}: the posterior has to be "
            "stored by mean and precision"
        )
    if training and getattr(DistributedDataParallel, "_active_ddp_module", None) is not None:
        raise UnsupportedError(
            "torch's DistributedDataParallel averages gradients over processes, but not what natural gradients measure "
            "beside them: use pyro_dvi.distributed.DataParallel(NaturalGradientELBO())(model, guide) without it"
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


def _deliver_product(state: NaturalState, ratio: Tensor, gradient: Tensor) -> None:
    state.add_noise_products(gradient.detach() * (ratio / state.loss_factor))
