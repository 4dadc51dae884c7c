# SPDX-License-Identifier: Apache-2.0
"""The base class of objectives: KL weight, step count, and Pyro's interface."""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from pyro.infer.elbo import ELBO
from torch import Tensor

from pyro_dvi.core.arguments import check_count, check_kl_weight, check_positive
from pyro_dvi.core.autograd_graph import leaves_of
from pyro_dvi.core.recorder import refuse_to_record
from pyro_dvi.curvature.linearisation import sum_of, twice_differentiated
from pyro_dvi.errors import CheckpointError, NonFiniteError, PyroDviError, UnsupportedError
from pyro_dvi.runs.divergences import entropy, kl_to_priors, refuse_free_scales
from pyro_dvi.runs.latents import Latent
from pyro_dvi.runs.observed import Observed, check_num_data, observed_sites
from pyro_dvi.runs.posterior_run import Call, refuse_site
from pyro_dvi.runs.structure import FirstRuns, Structure, start_apart
from pyro_dvi.runs.trained_for import check_trainable, note_trained_for


class Objective(ELBO):
    r"""Base class of objectives, which are used like Pyro's ELBOs: either in ``SVI`` or as ``elbo(model, guide)``.

    .. math::
        \mathrm{loss} = \mathrm E_q[-\log p(y \mid w)]
            + \beta\,\bigl(\mathrm E_q[-\log p(w)] - T\,\mathrm H[q]\bigr)

    At :math:`T = 1`, the term in parentheses is the KL divergence. As in Pyro, losses are summed over the whole data
    set. The loss is the objective that is actually optimised. With a ``kl_weight`` or ``temperature`` other than one,
    the parts of the untempered ELBO are in ``elbo.terms``.

    To add an objective, write :meth:`evaluate`, and set ``prediction_rule`` if its posteriors should not predict with
    drawn weights. ``fit``, checkpoints, ``predict`` and ``DataParallel`` then work. In ``evaluate``, first call
    ``structure, _ = self.structure(call, training)``. Then run guide and model once, for example with
    ``run_at_means(call, structure.sampled)`` of :mod:`pyro_dvi.runs.posterior_run`, which samples latents that set the
    priors of other latents. Take the likelihood from ``self.observed(run.model_trace)`` and the divergence from
    ``self.divergences(run.latents)``. If an objective needs more, override :meth:`prepare`, :meth:`begin`,
    :meth:`returned`, :meth:`state_dict` and :meth:`load_state_dict`.

    Args:
        kl_weight: :math:`\beta`, factor of the KL divergence: a float, or a schedule, which is called with the number
            of completed training steps.
        temperature: T, factor of the posterior's entropy H in unconstrained space. Below 1, the posterior is cold: it
            is narrower, while the effect of the prior on the mean is unchanged. Point masses have no entropy.
        num_data: size of the data set, which is compared with the plate's scale; None skips the check.
        num_particles: number of runs to average. More than one is needed only if a latent that sets the prior of
            another latent is sampled.

    Attributes:
        step: number of completed training steps; only evaluations that record gradients count.
        terms: detached parts of the last loss.
        prediction_rule: the prediction rule for posteriors trained with this objective: the name of a rule that
            :mod:`pyro_dvi.predictive` exports, or your own rule. Saved files contain only the name of a rule.
        takes_joint: True if guides may have Gaussian vectors with covariances, as in ``LastLayerGuide``.
    """

    prediction_rule: Any = "Samples"
    takes_joint: ClassVar[bool] = False

    def __init__(
        self,
        *,
        kl_weight: float | Callable[[int], float] = 1.0,
        temperature: float = 1.0,
        num_data: int | None = None,
        num_particles: int = 1,
    ) -> None:
        check_positive("temperature", temperature)
        check_count("num_particles", num_particles)
        if num_data is not None:
            check_count("num_data", num_data)
        super().__init__(num_particles=num_particles)
        if not callable(kl_weight):
            check_kl_weight("kl_weight", kl_weight)
        self.kl_weight = kl_weight
        self.temperature = float(temperature)
        self.num_data = num_data
        self._step = 0
        self.terms: dict[str, Tensor] = {}
        self._first_runs = FirstRuns()

    @property
    def step(self) -> int:
        """Number of completed training steps. A recorded step must not depend on it; see :meth:`recorded_for`."""
        refuse_to_record("the objective reads the number of steps")
        return self._step

    @step.setter
    def step(self, value: int) -> None:
        self._step = value

    # Hooks -------------------------------------------------------------------------------------------------------

    @abstractmethod
    def evaluate(self, call: Call, kl_weight: float, training: bool) -> dict[str, Tensor]:
        """Return the terms of one run: at least "loss", "log_likelihood" and "kl" (unweighted).

        Args:
            call: model and guide with their arguments.
            kl_weight: factor of the KL divergence in this step.
            training: True if a backward pass follows.
        """

    def prepare(self, guide: Any, optimizer: Any) -> None:
        """Inspect the optimizer before it trains the guide; called by ``fit`` and ``load``."""

    def begin(self, guide: Any) -> None:
        """Begin a training step."""

    def returned(self, loss: Tensor, guide: Any) -> None:
        """Inspect the loss that is returned; the caller may multiply it, and then starts the backward pass."""

    def recorded_for(self, guide: Any) -> Any:
        """Return everything that determines the operators of the next step, except tensors and modules' plain values.

        Raises:
            UnsupportedError: if this is not known, so that a step cannot be recorded.
        """
        return ()

    def record_of(self, guide: Any) -> Any:
        """Return what the last step stored in the guide besides gradients, in lists and tuples."""
        return ()

    def set_record(self, guide: Any, record: Any) -> None:
        """Store in the guide what :meth:`record_of` returned after a step."""

    # For hooks -----------------------------------------------------------------------------------------------------

    def structure(self, call: Call, training: bool, gradients: bool = True) -> tuple[Structure, bool]:
        """Return the structure of model and guide, and True in their first run.

        Before the first training step, this also breaks an all-zero start.
        """
        structure, first = self._first_runs.of(call, gradients)
        if structure.joint and not self.takes_joint:
            refuse_site(*next(iter(structure.joint.items())))
        if training and self._step == 0:
            start_apart(structure.starts)
        return structure, first

    def observed(self, trace: Any) -> Observed:
        """Return the observed sites of a model run, after comparing their scales with the size of the data set."""
        observed = observed_sites(trace)
        if self.num_data is not None:
            check_num_data(observed.sites, self.num_data)
        return observed

    def divergences(self, latents: list[Latent]) -> tuple[Tensor, Tensor]:
        r"""Return the KL divergence, and the term that ``kl_weight`` multiplies; they are equal at temperature 1.

        .. math:: \mathrm{KL}(q \,\|\, p) + (1 - T)\,\mathrm H[q]
        """
        kl = kl_to_priors(latents)
        if self.temperature == 1:
            return kl, kl
        if self.temperature < 1:
            refuse_free_scales(latents)
        return kl, kl + (1 - self.temperature) * entropy(latents)

    # Pyro's interface --------------------------------------------------------------------------------------------

    def current_kl_weight(self) -> float:
        """Return the KL weight of the next training step."""
        weight = self.kl_weight(self.step) if callable(self.kl_weight) else self.kl_weight
        check_kl_weight("kl_weight, or the value of its schedule,", weight)
        return float(weight)

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return the loss as a number, without counting a training step."""
        return self.total(Call(model, guide, args, kwargs), training=False).item()

    def differentiable_loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> Tensor:
        """Return the loss as a tensor to call ``backward`` on; counts a training step if gradients are recorded."""
        loss = self._differentiable(Call(model, guide, args, kwargs))
        if loss.requires_grad:
            self.returned(loss, guide)
        return loss

    def loss_and_grads(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Accumulate gradients and return the loss, as ``SVI.step`` expects.

        Raises:
            NonFiniteError: if the loss is NaN or infinite. Parameters are unchanged, and gradients are cleared.
        """
        with twice_differentiated():
            loss = self._differentiable(Call(model, guide, args, kwargs))
            if loss.requires_grad:
                loss.backward(retain_graph=self.retain_graph)
        value = loss.item()
        if not math.isfinite(value):
            for leaf in leaves_of([loss]):  # gradients of the failed step must not enter the next one
                leaf.grad = None
            raise NonFiniteError(self._diagnosis(value))
        return value

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the objective, which a resumed run needs besides model, guide and optimizer."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state returned by :meth:`state_dict`."""
        if not isinstance(state, dict) or "step" not in state:
            raise CheckpointError(
                f"this is not the state of a {type(self).__name__}: the entry 'step' is missing"
            )
        self.step = int(state["step"])

    def _differentiable(self, call: Call) -> Tensor:
        if not torch.is_grad_enabled():
            return self.total(call, training=False).detach()
        with self.training_step(call.guide):
            return self.total(call, training=True)

    # For captured steps --------------------------------------------------------------------------------------------

    @contextmanager
    def training_step(self, guide: Any) -> Iterator[None]:
        """Count a training step."""
        check_trainable(guide, self)
        self.begin(guide)
        yield
        note_trained_for(guide, self.prediction_rule, self.temperature)
        self.step += 1

    def total(self, call: Call, training: bool) -> Tensor:
        """Return the loss, and store its terms."""
        if torch.is_inference_mode_enabled():
            raise PyroDviError(
                f"{type(self).__name__} differentiates the model: use torch.no_grad(), not torch.inference_mode()"
            )
        weight = self.current_kl_weight()
        # A surrounding autocast context keeps low-precision copies of parameters, which the last step may have changed.
        torch.clear_autocast_cache()
        with torch.enable_grad():
            terms = self.averaged(call, weight, training)
        kind = terms["loss"].device.type
        if torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) is torch.float16:
            raise UnsupportedError(
                f"{type(self).__name__} squares gradients and variances, which exceed the range of float16: use "
                f"torch.autocast({kind!r}, torch.bfloat16), which needs no GradScaler"
            )
        self.keep(terms, weight)
        return terms["loss"]

    def averaged(self, call: Call, kl_weight: Any, training: bool) -> dict[str, Tensor]:
        """Return the terms of the loss, averaged over ``num_particles`` runs."""
        runs = [self.evaluate(call, kl_weight, training) for _ in range(self.num_particles)]
        if len(runs) == 1:
            return runs[0]
        return {k: sum_of([run[k] for run in runs]) / len(runs) for k in runs[0]}

    def keep(self, terms: dict[str, Tensor], kl_weight: float) -> None:
        """Store the terms of a loss."""
        self.terms = {k: v.detach() if v.requires_grad else v for k, v in terms.items()}
        self.terms["kl_weight"] = torch.tensor(kl_weight)

    def _diagnosis(self, value: float) -> str:
        parts = {k: v.item() for k, v in self.terms.items() if k != "loss"}
        bad = [k for k, v in parts.items() if not math.isfinite(v)]
        listed = ", ".join(f"{k}={v:.4g}" for k, v in parts.items())
        return (
            f"the loss is {value} in step {self.step} ({listed}); not finite: {', '.join(bad) or 'their sum'}. "
            "No update was made. Lower the learning rate (of the scales first), or train in float64."
        )

    def _get_trace(self, model: Callable, guide: Callable, args: tuple, kwargs: dict) -> Any:
        raise UnsupportedError(
            f"{type(self).__name__} does not sample traces: call loss, differentiable_loss or loss_and_grads"
        )


class WrappedObjective(ELBO):
    """Base class of objectives that wrap another objective, ``elbo``, whose attributes are also theirs."""

    _own: ClassVar[tuple[str, ...]] = ("elbo",)
    _get_trace = Objective._get_trace

    def __getattr__(self, name: str) -> Any:
        if name == "elbo" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.elbo, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name.startswith("_") or name in self._own
        object.__setattr__(self if own else self.elbo, name, value)

    def loss(self, model: Callable, guide: Callable, *args: Any, **kwargs: Any) -> float:
        """Return the loss on the data of this process as a number, without counting a training step."""
        return self.elbo.loss(model, guide, *args, **kwargs)  # type: ignore[no-any-return]
