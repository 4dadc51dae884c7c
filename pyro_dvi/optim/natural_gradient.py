# SPDX-License-Identifier: Apache-2.0
r"""What the natural-gradient optimizers share: measurements, momentum, the schedule, the posterior precision.

Gradients come summed over the data, as Pyro's losses are; divided by N they are means over examples, :math:`\hat g`,
and so are squares, :math:`\hat h`. With the weight :math:`\beta` of the KL (the papers' temperature
:math:`\tau`; :math:`\beta_1` and :math:`\beta_2` are decay rates), data-augmentation factor :math:`\rho` and prior
precision :math:`\delta`, the scaled prior precision and the posterior precision are

.. math:: \tilde\delta = \frac{\beta\delta}{\rho N}, \qquad
    \Lambda = \frac{\rho N}{\beta}(s + \tilde\delta) = \frac{\rho N s}{\beta} + \delta .
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyro_dvi.errors import GuideError
from pyro_dvi.natural_state import NaturalState, Statistics, ask, is_trained, natural_state_of
from pyro_dvi.optim.options import check_options, refuse_unknown

__all__ = ["NaturalGradientOptimizer", "Step"]


@dataclass
class Step:
    r"""One step of the means of a site.

    Attributes:
        loc: the means.
        measured: what was measured.
        memory: "step" (this one, from 1), "momentum" and "curvature", to be updated.
        group: the options.
        factor: of the learning rate, by the schedule.
        gradient: of minus the log-likelihood at the means, summed over the data.
        num_data: :math:`\rho N`, the effective number of data.
        prior: :math:`\tilde\delta`.
        has_start: whether the user said where the curvature starts.
    """

    loc: Tensor
    measured: NaturalState
    memory: dict[str, Any]
    group: dict[str, Any]
    factor: float

    def __post_init__(self) -> None:
        assert self.loc.grad is not None
        self.gradient = self.loc.grad
        self.num_data: float = self.group["data_augmentation"] * self.measured.num_data
        self.prior = self.measured.temperature * self.measured.prior_precision / self.num_data
        self.has_start = self.group["initial_curvature"] is not None

    def initial_curvature(self) -> Tensor:
        r""":math:`s_0`: a number, or the squared gradients of the first minibatch.

        Where another optimizer went before, which asked for no squares, it is that of the posterior as it stands.
        """
        measured = self.measured
        if self.has_start:
            return torch.full_like(self.loc, self.group["initial_curvature"])
        if measured.squares is None:
            return (measured.precision * (measured.temperature / self.num_data) - self.prior).clamp_(min=0)
        return measured.squares / measured.num_data

    def move_along(self, direction: Tensor) -> None:
        """Move against a preconditioned direction, that of each weight bounded by ``clip_radius`` prior scales."""
        if self.group["clip_radius"] is not None:
            bound = self.measured.prior_precision.rsqrt().mul_(self.group["clip_radius"])
            direction.clamp_(-bound, bound)
        self.loc.add_(direction, alpha=-self.factor * self.group["lr"])


class NaturalGradientOptimizer(Optimizer):
    """Base class of torch optimizers that move means along the natural gradient and set posterior precisions.

    Parameters that belong to no latent get a step of Adam.

    The loss may be multiplied with a number before the backward pass, as ``torch.amp.GradScaler`` and losses per
    example do: gradients are divided by it.

    Adding one: say in ``wanted`` what to measure, and write ``_move``.

    Attributes:
        wanted: what to measure in each step.
    """

    wanted: Statistics
    _step_supports_amp_scaling = True  # GradScaler leaves it to the step to skip infinite gradients

    def __init__(
        self,
        params: Iterable[Any],
        *,
        lr: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.999),
        damping: float = 0.0,
        clip_radius: float | None = 0.3,
        data_augmentation: float = 1.0,
        initial_curvature: float | None = None,
        warmup_steps: int = 100,
        total_steps: int | None = None,
        deterministic_lr: float = 1e-2,
        **unknown: Any,
    ) -> None:
        defaults: dict[str, Any] = dict(
            lr=lr,
            betas=betas,
            damping=damping,
            clip_radius=clip_radius,
            data_augmentation=data_augmentation,
            initial_curvature=initial_curvature,
            warmup_steps=warmup_steps,
            total_steps=total_steps,
            deterministic_lr=deterministic_lr,
        )
        refuse_unknown(type(self), unknown, defaults)
        check_options(defaults)
        super().__init__(params, defaults)
        self._told_steps: int | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does, and tell objectives what to measure for them."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["full_lr"] = group[
            "lr"
        ]  # before schedulers, which know one rate only and may change it at once
        self._ask(group["params"])

    def load_state_dict(self, state_dict: Any) -> None:
        """Load, as torch does, and tell objectives what is still to be measured."""
        super().load_state_dict(state_dict)
        self._ask(p for group in self.param_groups for p in group["params"])

    def _ask(self, parameters: Iterable[Tensor]) -> None:
        for parameter in parameters:
            ask(parameter, self.wanted_for(parameter))

    def wanted_for(self, parameter: Tensor) -> Statistics:
        """Return what to measure for a parameter in its next step: squares where its curvature starts with them."""
        if "curvature" in self.state.get(parameter, {}):
            return self.wanted
        group = next(
            (g for g in self.param_groups if any(p is parameter for p in g["params"])), self.defaults
        )
        return replace(self.wanted, squares=self.wanted.squares or group["initial_curvature"] is None)

    def set_total_steps(self, total_steps: int) -> None:
        """Let the learning rate fall to zero over this many steps, where the option ``total_steps`` is not given.

        Args:
            total_steps: steps from the start of training, those already taken included.
        """
        self._told_steps = total_steps

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Move every parameter that has a gradient.

        Args:
            closure: evaluates the loss and its gradients first, as for any torch optimizer.

        Raises:
            GuideError: the loss was no ``NaturalGradientELBO``, or its measurements were used already.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if getattr(self, "found_inf", 0):  # set by GradScaler while its step lasts
            for state in self._states():
                state.clear()  # of a step that is skipped
            return loss
        parameters = [p for group in self.param_groups for p in group["params"]]
        refuse_unmeasured(parameters, type(self).__name__)
        if leave_out_measurements_elsewhere(parameters, self.wanted):
            return loss
        loss_factor = self._loss_factor()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if torch.is_tensor(loss_factor):
                    parameter.grad.div_(loss_factor)
                memory = self.state[parameter]
                for name, value in memory.items():  # a model that was moved or converted since the last step
                    if torch.is_tensor(value):
                        memory[name] = value.to(parameter)
                memory["step"] = memory.get("step", 0) + 1
                total = group["total_steps"] or self._told_steps
                factor = cosine(memory["step"], total)
                measured = natural_state_of(parameter)
                if measured is None:
                    rate = group["deterministic_lr"] * group["lr"] / group["full_lr"]
                    _adam(parameter, memory, factor * rate)
                    continue
                if not measured.is_fresh:
                    raise GuideError(
                        f"{type(self).__name__} got means with a gradient but no curvature: train with "
                        "NaturalGradientELBO, and take one step for each backward pass"
                    )
                rise = warm_up(memory["step"], group["warmup_steps"], total)
                measured.temperature *= rise
                # Any N serves as the unit of averages, as long as it stays the same: gradients and squares are sums
                # over the data. That of a minibatch varies with padding and with scales of examples.
                measured.num_data = memory.setdefault("num_data", measured.num_data)
                step = Step(parameter, measured, memory, group, factor * rise)
                if "curvature" not in memory:
                    memory["momentum"] = torch.zeros_like(parameter)
                    memory["curvature"] = step.initial_curvature()
                measured.precision.data.copy_(self._move(step))
                measured.clear()
                ask(parameter, self.wanted)
        return loss

    def _states(self) -> Iterator[NaturalState]:
        for group in self.param_groups:
            for state in map(natural_state_of, group["params"]):
                if state is not None:
                    yield state

    def _loss_factor(self) -> Tensor | float:
        """What gradients have to be divided by.

        Raises:
            GuideError: ``GradScaler.unscale_`` has divided them by some of it, and does not say by how much.
        """
        factor = next((state.loss_factor for state in self._states() if state.is_fresh), 1.0)
        if not hasattr(self, "found_inf") or getattr(self, "grad_scale", None) is not None:
            return factor
        if math.frexp(float(factor))[0] != 0.5:  # scales are powers of two, by torch's defaults
            raise GuideError(
                f"the loss was multiplied with {float(factor):g} before the backward pass, by GradScaler and by "
                "something else. Where GradScaler.unscale_ is called, its scale alone, a power of two, may do so: "
                "do not divide the loss by the number of data."
            )
        return 1.0

    @abstractmethod
    def _move(self, step: Step) -> Tensor:
        """Move the means in place and return the posterior precision."""


def refuse_unmeasured(parameters: Iterable[Tensor], name: str) -> None:
    """Refuse to step parameters of which none has ever got a gradient from an objective of natural gradients.

    Raises:
        GuideError: saying what goes with natural-gradient optimizers.
    """
    moved = [parameter for parameter in parameters if parameter.grad is not None]
    if moved and not any(map(is_trained, moved)):
        raise GuideError(
            f"{name} found no means with measurements among its parameters: it goes with NaturalGradientGuide and "
            "NaturalGradientELBO. For another guide or objective take an optimizer such as pyro.optim.ClippedAdam with "
            "learning_rates(1e-3)."
        )


def leave_out_measurements_elsewhere(parameters: Iterable[Tensor], wanted: Statistics) -> bool:
    """Drop gradients at draws for an optimizer that wants them at the mean, or the reverse, and ask for others.

    Only the first step of an objective that does not serve this optimizer finds such.
    """
    states = [(p, state) for p in parameters if (state := natural_state_of(p)) is not None and state.is_fresh]
    if all(state.measured.at_mean == wanted.at_mean for _, state in states):
        return False
    for parameter, state in states:
        state.clear()
        ask(parameter, replace(wanted, squares=True))
    return True


def _adam(parameter: Tensor, memory: dict[str, Any], lr: float) -> None:
    """One step of Adam (Kingma & Ba, 2015) with its usual constants."""
    gradient = parameter.grad
    assert gradient is not None
    if "mean" not in memory:
        memory["mean"], memory["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
    mean = memory["mean"].lerp_(gradient, 0.1)
    square = memory["square"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
    step = memory["step"]
    scale = (square / (1 - 0.999**step)).sqrt_().add_(1e-8)
    parameter.addcdiv_(mean, scale, value=-lr / (1 - 0.9**step))


def cosine(step: int, total_steps: int | None) -> float:
    """Half a cosine wave from 1 to 0; 1 where the length of training is not known.

    Example:
        >>> [round(cosine(step, 4), 3) for step in (1, 3, 5)]
        [1.0, 0.5, 0.0]
    """
    if total_steps is None:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(step - 1, total_steps) / total_steps))


def warm_up(step: int, warmup_steps: int, total_steps: int | None) -> float:
    """A straight line from 0 to 1, over at most a quarter of training.

    The curvature of the first steps says little: it is that of a network which has learned nothing, seen through a few
    minibatches. Whole steps by it can carry the means far away for good, and a posterior as wide as it allows drowns
    the gradient in noise: a network that never gets away from its prior is an optimum too.

    Example:
        >>> [warm_up(step, 4, None) for step in (1, 2, 4, 5)]
        [0.25, 0.5, 1.0, 1.0]
    """
    if total_steps is not None:
        warmup_steps = min(warmup_steps, total_steps // 4)
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0
