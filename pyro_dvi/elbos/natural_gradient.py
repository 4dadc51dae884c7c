# SPDX-License-Identifier: Apache-2.0
"""The ELBO whose gradients and curvature feed a natural-gradient optimizer."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import pyro.poutine as poutine
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pyro_dvi.autograd_graph import enters, graph_of, leaves_of
from pyro_dvi.curvature import ObservedSite
from pyro_dvi.curvature.base import sum_of
from pyro_dvi.curvature.rows import ConstantStatistics
from pyro_dvi.curvature.squared_gradients import SquaredGradients
from pyro_dvi.divergences import kl_to_prior, normal_prior, refuse_not_normal
from pyro_dvi.elbos.base import DeterministicELBO
from pyro_dvi.elbos.rows import Run
from pyro_dvi.elbos.served import check_served, wanted_by
from pyro_dvi.elbos.squares import Draw, SquareMeasurement
from pyro_dvi.errors import ArgumentError, DviWarning, GuideError, ModelError, UnsupportedError
from pyro_dvi.handlers.draws import TrackedDraws
from pyro_dvi.handlers.explained import explained_errors
from pyro_dvi.handlers.latents import Latent, match_latents
from pyro_dvi.handlers.observed import observed_sites
from pyro_dvi.natural_state import NaturalState, Statistics, attach, natural_state_of, note_trained, wanted_of
from pyro_dvi.sites import is_data, is_factor
from pyro_dvi.undisturbed import undisturbed

__all__ = ["NaturalGradientELBO"]


class NaturalGradientELBO(DeterministicELBO):
    r"""ELBO of a Gaussian posterior, measured for an update along the natural gradient.

    .. math::
        \mathrm{loss} = -\frac1K\sum_k \sum_s \mathrm{scale}_s \log p_s(y_s \mid w_k)
            + \tau\,\mathrm{KL}(q \,\|\, p), \qquad w_k \sim q

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
        kl_weight: :math:`\tau`, the temperature; positive; a float or a schedule of the training steps done.
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

    @cached_property
    def _squares(self) -> SquareMeasurement:
        return SquareMeasurement()

    _moves_precisions = True
    _optimizer: Any = None
    _opened: dict[int, NaturalState] = {}  # noqa: RUF012 (replaced in each step: those measured in it)
    _guide_id: int | None = None
    _unscaled_data = 0.0  # the largest minibatch of this guide's whose plate says that it is all the data
    _warned = False

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
        if optimizer is not None:
            check_served(optimizer)
        self._drop_measurements()
        before, self._optimizer = self._optimizer, optimizer
        return before

    def _wanted(self, leaf: Tensor) -> Statistics:
        return wanted_of(leaf) if self._optimizer is None else wanted_by(self._optimizer, leaf)

    def _evaluate(
        self, model: Callable, guide: Callable, args: tuple, kwargs: dict, kl_weight: float, training: bool
    ) -> dict[str, Tensor]:
        _check(guide, kl_weight, training)
        draws = TrackedDraws(self._wanted)
        with explained_errors(model, [], args, kwargs), draws:
            guide_trace = poutine.trace(guide).get_trace(*args, **kwargs)
        recorder = _recorder(draws, guide_trace)
        with explained_errors(model, draws.leaves.values(), args, kwargs), recorder:
            model_trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
        latents = match_latents(model_trace, guide_trace, draws.gaussians, guide)
        observed = self._observed(model_trace)
        log_likelihood = observed.log_likelihood()
        kl = sum_of([kl_to_prior(_detached(latent)) for latent in latents])
        if training:
            log_likelihood = _with_idle_draws(log_likelihood, draws)
            terms = observed.terms
            states = [self._state(name, draws, latents, guide) for name in draws.gaussians]
            num_data = max(_num_data(site) for site in terms)
            self._check_minibatches(terms)
            for state in states:
                state.num_data, state.temperature = num_data, kl_weight
            # First what runs backward passes of its own, which would set off the hooks of the others.
            again = partial(_uncoupled_run, model, guide_trace, draws, args, kwargs)
            self._watch_squares(
                draws, states, Run(model, recorder, terms, again), _local_latents(model_trace, latents)
            )
            self._watch_products(draws, states)
            note_trained(leaves_of([log_likelihood, kl]))
        return {"loss": kl_weight * kl - log_likelihood, "log_likelihood": log_likelihood, "kl": kl}

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        self._refuse_unused(guide)
        try:
            return super().loss_and_grads(model, guide, *args, **kwargs)
        except Exception:
            self._drop_measurements()
            raise

    def differentiable_loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Tensor:
        if not torch.is_grad_enabled():
            return super().differentiable_loss(model, guide, *args, **kwargs)
        self._refuse_unused(guide)
        if self._guide_id != id(guide):
            self._guide_id, self._unscaled_data = id(guide), 0.0
        self._opened = {}
        try:
            loss = super().differentiable_loss(model, guide, *args, **kwargs)
        except Exception:
            self._drop_measurements()
            raise
        if self._opened:
            loss.register_hook(partial(_note_factor, list(self._opened.values())))
        return loss

    def _refuse_unused(self, guide: Callable) -> None:
        """Refuse to measure again as long as nobody has used what was measured last."""
        if self._guide_id == id(guide) and any(state.is_fresh for state in self._opened.values()):
            raise GuideError(
                "the gradients of the last step were not used by a natural-gradient optimizer: train with "
                "pyro_dvi.optim.VOGN, OGN or IVON, and take a step after each backward pass. To go on after a backward "
                "pass without a step, drop its measurements by elbo.serve(optimizer)."
            )

    def _check_minibatches(self, terms: list[ObservedSite]) -> None:
        """Warn of minibatches without the plate that says how large the data set is."""
        if self._warned or any(torch.is_tensor(site.scale) or site.scale != 1 for site in terms):
            return
        num_data = max(_unmasked(site) for site in terms)
        if num_data < 0.9 * self._unscaled_data:
            self._warned = True
            warnings.warn(
                f"the data were {self._unscaled_data:g} in one step and {num_data:g} in another, and no plate says how "
                "large the data set is. If these are minibatches, N is the size of the minibatch, and the posterior is "
                'far too wide: write pyro.plate("data", N, subsample_size=len(x)) around the observations, with N the '
                "number of all data; NaturalGradientELBO(num_data=N) then checks it.",
                DviWarning,
                stacklevel=2,
            )
        self._unscaled_data = max(num_data, self._unscaled_data)

    def _drop_measurements(self) -> None:
        for state in self._opened.values():
            state.clear()

    def _state(self, name: str, draws: TrackedDraws, latents: list[Latent], guide: Any) -> NaturalState:
        """Return the state of a site, ready for new measurements."""
        leaf = draws.leaves[name]
        latent = next(latent for latent in latents if latent.source is draws.gaussians[name])
        prior_loc, prior_precision = _fixed_prior(latent, draws)
        state = natural_state_of(leaf)
        if state is None:
            state = NaturalState(guide.precision_parameter(latent.name), prior_loc, prior_precision)
            attach(leaf, state)
        elif id(state) not in self._opened:
            state.clear()  # what another objective may have left
        self._opened[id(state)] = state
        state.measured = draws.asked[name]
        state.prior_loc, state.prior_precision = prior_loc, prior_precision
        return state

    def _watch_products(self, draws: TrackedDraws, states: list[NaturalState]) -> None:
        for (name, gaussian), state in zip(draws.gaussians.items(), states, strict=True):
            if state.measured.noise_products:
                ratio = draws.noise[name] / gaussian.scale.detach()
                gaussian.value.register_hook(partial(_deliver_product, state, ratio))

    def _watch_squares(
        self,
        draws: TrackedDraws,
        states: list[NaturalState],
        run: Run,
        local: set[str],
    ) -> None:
        draw = Draw(
            run,
            [name.removesuffix("_unconstrained") for name in draws.gaussians],
            [gaussian.value for gaussian in draws.gaussians.values()],
            self.num_particles,
            add=lambda k, squares: states[k].add_squares(squares),
        )
        self._squares.measure(
            draw,
            wanted={k for k, state in enumerate(states) if state.measured.squares},
            local={k for k, name in enumerate(draws.gaussians) if name in local},
            loss_factor=lambda: states[0].loss_factor,
        )


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


def _local_latents(trace: Any, latents: list[Latent]) -> set[str]:
    """Names of the guide's sites whose elements belong to one example each, by the plate of the observations.

    Raises:
        ModelError: a prior is scaled or masked: the optimizer knows of neither.
    """
    for latent in latents:
        scaled = torch.is_tensor(latent.plate_scale) or latent.plate_scale != 1
        masked = latent.mask is not None and latent.mask is not True
        if latent.source is not None and (scaled or masked):
            raise ModelError(
                f"latent site {latent.name!r} is scaled or masked, as by a subsampled plate around it; "
                "natural-gradient updates move every element in every step under its whole prior. Use the whole "
                "data set in each step, or TaylorELBO or MomentPropagationELBO for this model."
            )
    observed = [site for site in trace.nodes.values() if is_data(site) or is_factor(site)]
    plates = [{frame.name for frame in site["cond_indep_stack"] if frame.vectorized} for site in observed]
    if len(plates) != 1 or len(plates[0]) != 1:
        return set()
    return {
        latent.source.name
        for latent in latents
        if latent.source is not None
        and plates[0] == {frame.name for frame in trace.nodes[latent.name]["cond_indep_stack"]}
    }


def _with_idle_draws(log_likelihood: Tensor, draws: TrackedDraws) -> Tensor:
    """Give latents that no observation depends on a gradient too, zero: their posterior becomes the prior."""
    graph = graph_of([log_likelihood])
    idle = [g.value.sum() * 0 for g in draws.gaussians.values() if g.value.grad_fn not in graph]
    return log_likelihood + sum_of(idle) if idle else log_likelihood


def _recorder(draws: TrackedDraws, guide_trace: Any) -> SquaredGradients:
    return SquaredGradients([_used_value(name, draws, guide_trace) for name in draws.gaussians])


def _uncoupled_run(model: Callable, guide_trace: Any, draws: TrackedDraws, args: tuple, kwargs: dict) -> Run:
    """Run the model again with the same draws, to see which rows its layers keep apart."""
    recorder = _recorder(draws, guide_trace)
    with undisturbed(), ConstantStatistics(), recorder:
        trace = poutine.trace(poutine.replay(model, trace=guide_trace)).get_trace(*args, **kwargs)
    return Run(
        model,
        recorder,
        observed_sites(trace).terms,
        partial(_uncoupled_run, model, guide_trace, draws, args, kwargs),
    )


def _used_value(name: str, draws: TrackedDraws, guide_trace: Any) -> Tensor | None:
    """The tensor object that the model will compute with, if it is the draw itself."""
    site = guide_trace.nodes.get(name.removesuffix("_unconstrained"))
    value = draws.gaussians[name].value
    return value if site is not None and site["value"] is value else None


def _detached(latent: Latent) -> Latent:
    """The latent with its posterior constant: the divergence moves parameters of priors only."""
    if latent.loc is None or latent.scale is None:
        return latent
    return replace(latent, loc=latent.loc.detach(), scale=latent.scale.detach())


def _fixed_prior(latent: Latent, draws: TrackedDraws) -> tuple[Tensor, Tensor]:
    """Mean and precision of a latent's prior, which no other latent may set."""
    prior = normal_prior(latent)
    if prior is None:
        refuse_not_normal(latent.name, latent.prior)
    values = [g.value for g in draws.gaussians.values()]
    for name, is_parent in zip(draws.gaussians, enters(values, [prior.loc, prior.scale]), strict=True):
        if is_parent:
            raise ModelError(
                f"the prior of site {latent.name!r} depends on site {name!r}; natural-gradient updates need priors "
                "with fixed parameters. Learn the scale instead (bayesian.LearnedScale), or use TaylorELBO."
            )
    return _compact(prior.loc.detach()), _compact(prior.scale.detach()).pow(-2)


def _compact(value: Tensor) -> Tensor:
    """Leave out what ``expand`` repeats: a prior that all weights share then costs the optimizer nothing."""
    for dim, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if stride == 0 and size > 1:
            value = value.narrow(dim, 0, 1)
    return value


def _note_factor(states: list[NaturalState], gradient: Tensor) -> None:
    """Keep what the loss was multiplied with, which its own gradient tells before all others come by."""
    for state in states:
        state.loss_factor = gradient.detach()


def _deliver_product(state: NaturalState, ratio: Tensor, gradient: Tensor) -> None:
    state.add_noise_products(gradient.detach() * (ratio / state.loss_factor))


def _num_data(site: ObservedSite) -> float:
    """Number of examples in the data set: the plate's scale times the minibatch."""
    scale = site.scale.mean().item() if torch.is_tensor(site.scale) else float(site.scale)
    return scale * max(1, torch.Size(site.fn.batch_shape).numel())


def _unmasked(site: ObservedSite) -> float:
    """Number of examples in the minibatch without those that a mask leaves out, as padding."""
    shape = torch.Size(site.fn.batch_shape)  # a plain tuple in some distributions of Pyro
    if not torch.is_tensor(site.mask):
        return float(shape.numel())
    return float(site.mask.expand(torch.broadcast_shapes(shape, site.mask.shape)).sum())
