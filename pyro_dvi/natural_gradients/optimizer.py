# SPDX-License-Identifier: Apache-2.0
r"""The base class of natural-gradient optimizers: measurements, momentum, learning-rate schedule, precisions.

Like Pyro's losses, gradients and squared gradients are sums over the data; divided by N, they are means over examples,
:math:`\hat g` and :math:`\hat h`. The KL weight is :math:`\beta` (the papers' temperature :math:`\tau`), whereas
:math:`\beta_1` and :math:`\beta_2` are decay rates. With the temperature T of a cold posterior, the data-augmentation
factor :math:`\rho` and the prior precision :math:`\delta`, the scaled prior precision and the posterior precision are

.. math:: \tilde\delta = \frac{\beta\delta}{\rho N}, \qquad
    \Lambda = \frac{\rho N}{\beta T}(s + \tilde\delta) = \frac1T\Bigl(\frac{\rho N s}{\beta} + \delta\Bigr) .
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from pyro_dvi.core.arguments import check_count, check_positive, is_number
from pyro_dvi.errors import ArgumentError, GuideError
from pyro_dvi.natural_gradients.estimates import Estimate, steps_of
from pyro_dvi.natural_gradients.natural_update import NaturalUpdate
from pyro_dvi.natural_gradients.site_update import SiteUpdate
from pyro_dvi.optim.launched_updates import FixedUpdate

DEFAULTS: dict[str, Any] = {
    "lr": 10.0,
    "betas": (0.9, 0.999),
    "damping": 0.0,
    "max_step": 0.15,
    "data_augmentation": 1.0,
    "initial_curvature": None,
    "warmup_steps": 100,
    "total_steps": None,
    "deterministic_lr": 1e-2,
}


class NaturalGradientOptimizer(Optimizer):
    """Base class of torch optimizers that update means along the natural gradient and set posterior precisions.

    Parameters that are not the mean of a latent are updated with Adam.

    To add a method, set ``estimate`` to the curvature to measure, and implement ``_rates`` and ``_move``.

    Attributes:
        estimate: the curvature to measure once the optimizer has started.
        options: the options with their defaults.
        rate_factor: factor of the learning rate in the last step, from warm-up and cosine decay.
    """

    estimate: Estimate
    options: ClassVar[dict[str, Any]] = DEFAULTS
    rate_factor = 1.0

    def __init__(self, params: Iterable[Any], **options: Any) -> None:
        _check_options(type(self).__name__, options, self.options)
        super().__init__(params, {**self.options, **options})
        self._told_steps: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies and pickles, including attributes that torch leaves out."""
        kept = {"_told_steps", "formulation", "estimate"}
        return {**super().__getstate__(), **{name: vars(self)[name] for name in kept & vars(self).keys()}}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as torch does."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        # This must come before schedulers: they know a single rate, and may change it immediately.
        group["full_lr"] = group["lr"]

    @property
    def steps_done(self) -> int:
        """Number of steps in which a curvature was measured."""
        return max((memory["step"] for memory in self.state.values() if "curvature" in memory), default=0)

    @property
    def wanted(self) -> Estimate:
        """The curvature to measure for the next step."""
        return self.estimate

    def set_total_steps(self, total_steps: int) -> None:
        """Make the learning rate decay to zero over this many steps, unless the option ``total_steps`` is given.

        Args:
            total_steps: number of steps since the start of training, including those already taken.
        """
        self._told_steps = total_steps

    def fixed_update(self) -> FixedUpdate | None:
        """Return the next update if a launch can repeat it; by default, None.

        A subclass may return ``NaturalUpdate.fixed(self)`` if it calls the same functions in each step, with no other
        numbers than :class:`~pyro_dvi.natural_gradients.site_update.Numbers`.
        """
        return None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Update every parameter that has a gradient.

        Args:
            closure: function that first evaluates the loss and its gradients, as in any torch optimizer.

        Raises:
            GuideError: the loss was not a ``NaturalGradientELBO``, or its measurements were already used.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        moved = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        steps = steps_of(moved)
        sites = [(step, site) for step in steps for site in step.sites]
        ids = set(map(id, moved))
        means = [site for _, site in sites if id(site.loc) in ids]
        if moved and not (steps and all(site.precision.grad is not None for site in means)):
            raise GuideError(
                f"{type(self).__name__.removesuffix('Optimizer')} found no posterior means among its parameters, or no "
                "squared gradients for them. Train a NaturalGradientGuide with NaturalGradientELBO, and take one step "
                "after each backward pass. For other guides, use pyro_dvi.optim.Adam(learning_rates(1e-3))"
            )
        if means and any(step.measured != self.wanted for step in steps):
            # This happens only in the first step of an objective that was not prepared for this optimizer.
            for step in steps:
                step.drop()
                step.wanted = self.wanted
            return loss
        self._bring_memories(moved)
        update = NaturalUpdate(self)
        update.numbers()
        update.run()
        update.finish()
        return loss

    def _bring_memories(self, parameters: Iterable[Tensor]) -> None:
        """Move the memories of parameters to their devices and dtypes."""
        for parameter in parameters:
            memory = self.state[parameter]
            for name, value in memory.items():
                if torch.is_tensor(value):
                    memory[name] = value.to(parameter)

    def deterministic_rate(self, count: int, group: dict[str, Any]) -> float:
        """Return the learning rate of deterministic parameters in a step."""
        rate: float = group["deterministic_lr"] * group["lr"] / group["full_lr"]
        return rate * cosine(count, self._length(group))

    def _length(self, group: dict[str, Any]) -> int | None:
        return group["total_steps"] or self._told_steps

    def factors(self, count: int, group: dict[str, Any]) -> tuple[float, float]:
        """Return the factors of the learning rate and of the KL weight in a step, from warm-up and cosine decay."""
        total = self._length(group)
        rise = warm_up(count, group["warmup_steps"], total)
        tempering = rise if total is None or not group["warmup_steps"] else min(1.0, 2 * count / total) ** 2
        return cosine(count, total) * rise, tempering

    @abstractmethod
    def _rates(self, update: SiteUpdate) -> tuple[float, float, float]:
        """Return the first three of the update's :class:`~pyro_dvi.natural_gradients.site_update.Numbers`."""

    @abstractmethod
    def _move(self, update: SiteUpdate) -> None:
        """Update means and set posterior precisions, both in place."""


def _check_options(optimizer: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Check the options.

    Raises:
        ArgumentError: an option is unknown or out of range.
    """
    for name, value in options.items():
        if name not in known:
            raise ArgumentError(
                f"{optimizer} has no option {name!r}: choose from {', '.join(sorted(known))}, formulation and estimate "
                "(the last two not for IVON). Instead of weight decay, choose a Normal prior in the model"
            )
        if name == "betas":
            rates = value if isinstance(value, tuple | list) else ()
            pairs = zip(rates, known["betas"], strict=False)
            if len(rates) != 2 or not all(rate == default or is_number(rate, 1) for rate, default in pairs):
                raise ArgumentError(
                    f"betas must be two numbers in [0, 1), such as (0.9, 0.999), got {value!r}"
                )
        elif name == "damping":
            if not is_number(value):
                raise ArgumentError(f"damping must be a finite, nonnegative number, got {value!r}")
        elif value is not None or name not in ("max_step", "initial_curvature", "total_steps"):
            if name.endswith(("_steps", "_interval")):
                check_count(name, value, int(name != "warmup_steps"))
            else:
                check_positive(name, value)


def wanted_by(optimizer: Any) -> Estimate:
    """Return the curvature that an optimizer for Pyro or torch needs in its next step.

    Raises:
        GuideError: it is not a natural-gradient optimizer.
    """
    made = [getattr(one, "optimizer", one) for one in getattr(optimizer, "optim_objs", {}).values()]
    made.sort(key=lambda one: -getattr(one, "steps_done", 0))  # the other optimizers have no means
    for one in (*made, optimizer):
        if isinstance(found := getattr(one, "wanted", None), Estimate):
            return found
    constructor = getattr(optimizer, "pt_optim_constructor", type(optimizer))
    if not (isinstance(constructor, type) and issubclass(constructor, NaturalGradientOptimizer)):
        raise GuideError(
            f"{getattr(constructor, '__name__', 'unknown')} cannot train with NaturalGradientELBO. Use VOGN, OGN or "
            "IVON, or NoisyKFAC with a KroneckerGuide. For elbo(model, guide), use a torch optimizer of "
            "pyro_dvi.natural_gradients, such as VOGNOptimizer. An optimizer that wraps one of these must forward the "
            "attribute 'wanted'"
        )
    options = {} if callable(optimizer.pt_optim_args) else optimizer.pt_optim_args
    first = constructor([torch.zeros(())], **options)
    for state in optimizer._state_waiting_to_be_consumed.values():
        if not first.steps_done:
            first.load_state_dict(state.get("optimizer", state))
    return first.wanted


def cosine(step: int, total_steps: int | None) -> float:
    """Return the factor of a cosine decay from 1 to 0; 1 if the length of training is not known.

    Example:
        >>> [round(cosine(step, 4), 3) for step in (1, 3, 5)]
        [1.0, 0.5, 0.0]
    """
    if total_steps is None:
        return 1.0
    return 0.5 * (1 + math.cos(math.pi * min(step - 1, total_steps) / total_steps))


def warm_up(step: int, warmup_steps: int, total_steps: int | None) -> float:
    """Return the factor of a linear warm-up from 0 to 1, over at most a quarter of training.

    The curvature of the first steps is unreliable, because the network is untrained and few minibatches were measured.
    With this curvature, full steps can move the means far away permanently. The posterior is also so wide that noise
    dominates the gradient, and the network may then stay at its prior, which is also an optimum. Therefore the KL
    weight rises more slowly, quadratically over half of training, if the length of training is known.

    Example:
        >>> [warm_up(step, 4, None) for step in (1, 2, 4, 5)]
        [0.25, 0.5, 1.0, 1.0]
    """
    if total_steps is not None:
        warmup_steps = min(warmup_steps, total_steps // 4)
    return min(1.0, step / warmup_steps) if warmup_steps else 1.0
