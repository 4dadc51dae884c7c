# SPDX-License-Identifier: Apache-2.0
"""VOGN, OGN and IVON: variational online Gauss-Newton and Newton, as optimizers for torch and for Pyro."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pyro_dvi.core.arguments import check_choice, check_count
from pyro_dvi.errors import ArgumentError, UnsupportedError
from pyro_dvi.natural_gradients.estimates import Estimate, NoiseProducts, Squares, steps_of
from pyro_dvi.natural_gradients.natural_update import NaturalUpdate
from pyro_dvi.natural_gradients.optimizer import DEFAULTS, NaturalGradientOptimizer
from pyro_dvi.natural_gradients.site_update import SiteUpdate, Tensors
from pyro_dvi.optim.joint_optim import JointOptim, Options, for_svi
from pyro_dvi.optim.launched_updates import FixedUpdate

_LEAST_PRECISION = 0.1  # least precision of IVON before an update, as a fraction of the prior precision


class Formulation(ABC):
    """Update rules of momentum, curvature and precision, given the measurements.

    Attributes:
        options: default options of the optimizer with this formulation.
        initial_batches: number of minibatches that are measured at the mean before the first step.
        constant_rate: whether the learning rate is constant, even in ``fit``.
    """

    options: ClassVar[Mapping[str, Any]] = {}
    initial_batches: int = 0
    constant_rate: ClassVar[bool] = False

    @abstractmethod
    def rates(self, update: SiteUpdate) -> tuple[float, float, float]:
        """Return the first three of the update's numbers."""

    @abstractmethod
    def update_momentum(self, update: SiteUpdate) -> None:
        """Update momenta in place with gradients that include the prior."""

    @abstractmethod
    def set_precisions(self, update: SiteUpdate, damped: Tensors) -> None:
        r"""Replace :math:`N(s + \tilde\delta)` in place by posterior precisions; ``damped`` is the sum plus damping."""


@dataclass(frozen=True)
class Consistent(Formulation):
    r"""The default update, whose averages converge to the optimum of the tempered ELBO.

    .. math::
        m \leftarrow \beta_1 m + (1-\beta_1) \hat g, \quad \hat m = \frac{m}{1-\beta_1^t}, \qquad
        s \leftarrow s + r_t (\hat h - s), \quad r_t = \max\Bigl(1-\beta_2, \frac{\eta+1}{\eta+t}\Bigr), \qquad
        \Lambda = \frac{N}{\beta T}(s + \tilde\delta)

    At the fixed point, the precision is :math:`(N\hat h/\beta + \delta)/T`, the optimum for ``kl_weight`` :math:`\beta`
    and ``temperature`` T. Damping shortens the steps and does not change the posterior.

    Squared gradients shrink by orders of magnitude while a network learns. At a constant rate, the first minibatch,
    which has the largest gradients, would influence the curvature for about :math:`1/(1-\beta_2)` steps. During this
    time, the steps would be far too short and the posterior would be far too narrow. With :math:`r_t`, the measurement
    of step i has a weight of about :math:`i^\eta`, and the averaging window grows to at most :math:`1/(1-\beta_2)`
    steps. If ``initial_curvature`` is given, the rate is :math:`1-\beta_2` from the start, so that the given value is
    not forgotten too early.

    Args:
        forgetting: :math:`\eta`; 0 weights all steps equally until the averaging window is full.

    Raises:
        ArgumentError: ``forgetting`` is negative or infinite.

    Source: the averages of Shamir & Zhang (2013), "Stochastic gradient descent for non-smooth optimization", section 4,
    applied to the curvature.
    """

    forgetting: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.forgetting < math.inf:
            raise ArgumentError(f"forgetting must be a finite, nonnegative number, got {self.forgetting}")

    def rates(self, update: SiteUpdate) -> tuple[float, float, float]:
        beta1, beta2 = update.group["betas"]
        rate = 1 - beta2
        if not update.has_start:
            rate = max(rate, (self.forgetting + 1) / (self.forgetting + update.measurements))
        return 1 - rate, rate, 1 - beta1**update.count

    def update_momentum(self, update: SiteUpdate) -> None:
        torch._foreach_lerp_(update.momenta, update.gradients, 1 - update.group["betas"][0])

    def set_precisions(self, update: SiteUpdate, damped: Tensors) -> None:
        torch._foreach_mul_(update.precisions, update.numbers.inverse_temperature)


@dataclass(frozen=True)
class AsPrinted(Formulation):
    r"""The update exactly as printed in Algorithm 1 of Osawa et al. (2019).

    .. math::
        m \leftarrow \beta_1 m + \hat g, \qquad s \leftarrow (1 - \beta b)s + b\hat h, \quad b = 1 - \beta_2, \qquad
        \Lambda = N(s + \tilde\delta + \gamma)

    The momentum is a sum, so steps are :math:`1/(1-\beta_1)` times as long. At the fixed point,
    :math:`s = \hat h/\beta` and the precision is :math:`N\hat h/\beta + \beta\delta + N\gamma`, so the prior is also
    tempered, and damping narrows the posterior. Up to the length of the steps, both formulations agree at
    :math:`\beta = 1, \gamma = 0`.

    The formulation changes the defaults of the optimizer: no warm-up, no bound on the steps, a constant learning rate
    (even in ``fit``), and ``lr=0.001``. Before the first step, minibatches are measured at the mean; their squared
    gradients are :math:`s_0`, unless ``initial_curvature`` is given. Deterministic parameters are updated during this
    time. The first draws have the precision :math:`N(s_0 + \tilde\delta + \gamma)`, as in line 9 of the algorithm. The
    text of the paper has :math:`N(s_0 + \tilde\delta) / \beta`, which contradicts line 9.

    Args:
        initial_batches: number of minibatches that are measured before the first step; they have equal weights. The
            paper uses 1; ``len(loader)`` uses all data.

    Raises:
        ArgumentError: ``initial_batches`` is not a positive integer.
    """

    initial_batches: int = 1
    options: ClassVar[Mapping[str, Any]] = {"lr": 1e-3, "max_step": None, "warmup_steps": 0}
    constant_rate: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_count("initial_batches", self.initial_batches, 1)

    def rates(self, update: SiteUpdate) -> tuple[float, float, float]:
        if update.step.temperature != 1:
            raise UnsupportedError(
                "AsPrinted() does not support temperature, because the temperature of the paper is kl_weight: leave "
                "temperature at 1, or use Consistent()"
            )
        rate = 1 - update.group["betas"][1]
        return 1 - update.kl_weight * rate, rate, 1.0

    def update_momentum(self, update: SiteUpdate) -> None:
        torch._foreach_mul_(update.momenta, update.group["betas"][0])
        torch._foreach_add_(update.momenta, update.gradients)

    def set_precisions(self, update: SiteUpdate, damped: Tensors) -> None:
        torch._foreach_copy_(update.precisions, damped)
        torch._foreach_mul_(update.precisions, update.group["data_augmentation"])


class VOGNOptimizer(NaturalGradientOptimizer):
    r"""Variational online Gauss-Newton as a torch optimizer.

    .. math::
        \hat g = \frac1M\sum_i g_i + \tilde\delta(\mu - m_0), \qquad \hat h = \frac1M\sum_i g_i^2, \qquad
        \mu \leftarrow \mu - \alpha\,\frac{\hat m}{s + \tilde\delta + \gamma}

    The formulation defines the momentum :math:`\hat m`, the curvature s and the posterior precision. Gradients are
    averaged over draws :math:`w = \mu + \epsilon\Lambda^{-1/2}`.

    Status: a stochastic natural-gradient step in which squared per-example gradients replace the Gauss-Newton
    curvature, so precisions depend on the residuals of the data, not on the residuals that the model predicts.

    Args:
        params: means, and any other parameters, which are updated with Adam.
        lr: :math:`\alpha`; 1 is a full Newton step with a diagonal curvature. The default is larger, because Newton
            steps with the squared gradients of an untrained network are far too short: these exceed the curvature by
            the squared errors in units of the noise. ``max_step`` bounds the steps.
        betas: decay rates of the momentum and, after many steps, of the curvature; see the formulation.
        damping: :math:`\gamma`, in units of the curvature of one example.
        data_augmentation: :math:`\rho`, the factor by which augmentation increases the effective number of examples.
        initial_curvature: :math:`s_0`; None takes the squared gradients of the first minibatch.
        max_step: maximum :math:`|\Delta\mu|` of a weight per step, relative to the size of the weights of its site.
            This size is the standard deviation of their means when training starts. It is at least
            :math:`0.1\,s / \sqrt n` for a prior scale s and a layer with n inputs. The bound decreases in proportion to
            the learning rate. None means no bound.
        warmup_steps: number of steps over which the learning rate rises from 0, at most a quarter of training; 0 means
            no warm-up. The KL weight rises quadratically over half of training if the length of training is known,
            otherwise with the learning rate.
        total_steps: number of steps in which a cosine decay reduces the learning rate to zero. If this is None, ``fit``
            uses the length of training, unless the optimizer has a scheduler. Without ``fit`` or a scheduler, the rate
            is constant. If both a number and a scheduler are given, their factors are multiplied. At a constant rate,
            means keep fluctuating, by more than a posterior standard deviation if the posterior is cold.
        deterministic_lr: learning rate of Adam for deterministic parameters (batch normalisation, a noise scale). The
            cosine and schedulers also apply to it, so it decreases in proportion to ``lr``. It has no warm-up.
        formulation: ``Consistent()``, or ``AsPrinted()``, which changes the defaults of the options above.
        estimate: estimate of the curvature; by default, ``Squares()``, squared per-example gradients.

    Raises:
        ArgumentError: an option is out of range.
        GuideError: in a step, the loss was not a ``NaturalGradientELBO``.

    Source: Osawa et al. (2019), "Practical deep learning with Bayesian principles", Algorithm 1 and section 3. Bounded
    steps: Liu et al. (2024), "Sophia", section 2.2; bounds in proportion to the weights: You et al. (2020), "Large
    batch optimization for deep learning", section 3.
    """

    estimate: Estimate = Squares()
    formulations: ClassVar[tuple[type, str]] = (Formulation, "Consistent() or AsPrinted()")
    estimates: ClassVar[tuple[type, str]] = (Estimate, "Squares()")

    def __init__(
        self,
        params: Iterable[Any],
        *,
        formulation: Formulation | None = None,
        estimate: Estimate | None = None,
        **options: Any,
    ) -> None:
        self.formulation = Consistent() if formulation is None else formulation
        self.estimate = type(self).estimate if estimate is None else estimate
        check_choice("formulation", self.formulation, *self.formulations)
        check_choice("estimate", self.estimate, *self.estimates)
        super().__init__(params, **{**self.formulation.options, **options})

    @property
    def wanted(self) -> Estimate:
        """The curvature to measure for the next step."""
        return Squares(at_mean=True) if self.steps_done < self.formulation.initial_batches else self.estimate

    def _length(self, group: dict[str, Any]) -> int | None:
        return group["total_steps"] if self.formulation.constant_rate else super()._length(group)

    def fixed_update(self) -> FixedUpdate | None:
        known = type(self) in (VOGNOptimizer, OGNOptimizer) and type(self.formulation) in (
            Consistent,
            AsPrinted,
        )
        update = NaturalUpdate.fixed(self) if known else None
        return None if update is None or update.is_at_start(self.formulation.initial_batches) else update

    def _rates(self, update: SiteUpdate) -> tuple[float, float, float]:
        return self.formulation.rates(update)

    def _move(self, update: SiteUpdate) -> None:
        if update.count <= self.formulation.initial_batches:
            if not update.has_start:
                torch._foreach_lerp_(update.curvatures, update.measured, 1 / update.count)
            self._preconditioned(update)
            return
        if update.is_new:
            update.add_measured()
        update.add_priors(update.gradients)
        self.formulation.update_momentum(update)
        update.move_along(self._preconditioned(update))

    def _preconditioned(self, update: SiteUpdate) -> Tensors:
        """Return the directions for the means, and set the precisions."""
        update.sum_into_precisions()
        damped, directions = update.damped(), update.measured
        torch._foreach_copy_(directions, update.momenta)
        torch._foreach_div_(directions, damped)
        self.formulation.set_precisions(update, damped)
        return directions


class OGNOptimizer(VOGNOptimizer):
    """Online Gauss-Newton: :class:`VOGNOptimizer` with gradients at the mean instead of at draws.

    Status: deterministic, given the minibatch; the precision is a Gauss-Newton approximation at the mode, as in
    Laplace's approximation.

    Source: Osawa et al. (2019), section 3; Khan et al. (2018).
    """

    estimate = Squares(at_mean=True)


class IVONOptimizer(NaturalGradientOptimizer):
    r"""Improved variational online Newton as a torch optimizer.

    With one draw :math:`w = \mu + \sigma\epsilon` and the mean gradient :math:`\hat g` at w,

    .. math::
        \hat h &= \hat g\,\frac{\epsilon}{\sigma}, \qquad
        h \leftarrow \beta_2 h + (1-\beta_2)\hat h
            + \frac{(1-\beta_2)^2}{2}\frac{(h - \hat h)^2}{h + \tilde\delta}, \\
        \mu &\leftarrow \mu - \alpha\,\frac{\hat m + \tilde\delta(\mu - m_0)}{h + \tilde\delta}

    and :math:`\sigma^{-2} = \tfrac{N}{\beta T}(h + \tilde\delta)`. The last term of h keeps h above
    :math:`-\tilde\delta` if :math:`\tilde\delta` is constant. Because :math:`\tilde\delta` decreases with the KL weight
    or a learned prior precision, h is raised to at least :math:`-0.9\,\tilde\delta` before each update. The posterior
    variance of a weight is then less than about twenty times its prior variance.

    Status: :math:`\hat h` is an unbiased estimate of the expected diagonal of the Hessian (Stein's lemma), so the
    precision converges to the optimum of the mean-field ELBO. The estimate is noisier than squared gradients. A step
    costs about as much as a step of Adam.

    By default, the average at step t extends over about :math:`\min(1000, 10 + t/10)` steps, so that curvature measured
    far from the optimum is forgotten even in short trainings. In linear regression with three weights, 95 percent of
    standard deviations are 0.7 to 1.3 times the optimal ones after 400 steps, and 0.8 to 1.2 times after 1,600 steps.
    With ``betas=(0.9, 0.999)``, whose average extends over 1,000 steps from the start, most are less than 0.4 times the
    optimal ones after 400 steps (``tests/natural_gradients/test_updates_ivon.py``).

    Args:
        params: means, and any other parameters, which are updated with Adam.
        lr: :math:`\alpha`. The default, 100, is large, because the curvature of the first steps (at the start, the
            squared gradients of an untrained network) is too large. ``max_step`` bounds the steps.
        betas: decay rates of the momentum and of the curvature. If the second is None, as in the default,
            :math:`1 - \beta_2 = \max(0.001, 1 / (10 + t/10))` in step t, or 0.001 with ``initial_curvature``.
        **options: further options as in :class:`VOGNOptimizer`, except ``formulation`` and ``estimate``. ``damping`` is
            added to the denominator of the step, and ``initial_curvature`` is :math:`h_0`.

    Raises:
        ArgumentError: an option is out of range.
        GuideError: in a step, the loss was not a ``NaturalGradientELBO``.

    Source: Shen et al. (2024), "Variational learning is effective for large deep networks", Algorithm 1; Lin et al.
    (2020) for the correction of h. Implemented from the equations.
    """

    estimate = NoiseProducts()
    options: ClassVar[dict[str, Any]] = DEFAULTS | {"lr": 100.0, "betas": (0.9, None)}

    @property
    def wanted(self) -> Estimate:
        """The curvature to measure in the next step; squared gradients if they initialise the curvature."""
        starts = any(group["initial_curvature"] is None for group in self.param_groups)
        return Squares() if starts and not self.steps_done else self.estimate

    def fixed_update(self) -> FixedUpdate | None:
        return NaturalUpdate.fixed(self) if type(self) is IVONOptimizer else None

    def _rates(self, update: SiteUpdate) -> tuple[float, float, float]:
        beta1, beta2 = update.group["betas"]
        memory = 1000.0 if update.has_start else min(1000.0, 10 + update.count / 10)
        rate = 1 / memory if beta2 is None else 1 - beta2
        return 1 - rate, rate, 1 - beta1**update.count

    def _move(self, update: SiteUpdate) -> None:
        curvatures, measured = update.curvatures, update.measured
        torch._foreach_lerp_(update.momenta, update.gradients, 1 - update.group["betas"][0])
        torch._foreach_maximum_(curvatures, torch._foreach_mul(update.priors, _LEAST_PRECISION - 1))
        if update.is_new:
            torch._foreach_sub_(measured, curvatures)
            update.sum_into_precisions()
            torch._foreach_mul_(measured, update.numbers.rate)
            torch._foreach_add_(curvatures, measured)
            torch._foreach_mul_(measured, measured)
            torch._foreach_addcdiv_(curvatures, measured, update.precisions, value=0.5)
        torch._foreach_copy_(measured, update.momenta)
        update.add_priors(measured, update.numbers.correction)
        update.sum_into_precisions()
        torch._foreach_div_(measured, update.damped())
        update.move_along(measured)
        torch._foreach_mul_(update.precisions, update.numbers.inverse_temperature)


# For pyro.infer.SVI ----------------------------------------------------------------------------------------------


class NaturalGradientOptim(JointOptim):
    """A :class:`JointOptim` that is told the length of training.

    Args:
        constructor: class of the torch optimizer.
        optim_args: its options, or a function from parameter names to options.
        clip_args: as in :class:`JointOptim`.

    Raises:
        ArgumentError: an option is unknown or out of range.
    """

    total_steps: int | None = None

    def __init__(
        self, constructor: type[NaturalGradientOptimizer], optim_args: Options, clip_args: Any = None
    ) -> None:
        if isinstance(optim_args, dict):
            constructor([torch.zeros(())], **optim_args)  # raises errors now instead of in the first step
        super().__init__(constructor, optim_args, clip_args)

    def set_total_steps(self, total_steps: int) -> None:
        """Make the learning rate decay to zero over this many steps, unless an option sets another length.

        Args:
            total_steps: number of steps since the start of training, including those already taken.
        """
        self.total_steps = total_steps
        for optimizer in self.optim_objs.values():
            optimizer.set_total_steps(total_steps)

    def __call__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Update the parameters; called by Pyro's SVI.

        Gradients of precisions are not clipped, because they are measurements of curvature.
        """
        params = list(params)
        precisions = {id(site.precision) for step in steps_of(params) for site in step.sites}
        super().__call__([p for p in params if id(p) not in precisions], *args, **kwargs)

    def _get_optim(self, param: Any) -> Any:
        optimizer = super()._get_optim(param)
        if self.total_steps is not None:
            optimizer.set_total_steps(self.total_steps)
        return optimizer


@for_svi(VOGNOptimizer)
def VOGN(optim_args: Options, clip_args: Any = None) -> NaturalGradientOptim:  # noqa: N802 (Pyro's style)
    """VOGN for SVI: variational online Gauss-Newton, with one :class:`VOGNOptimizer` for all parameters.

    Args:
        optim_args: options of :class:`VOGNOptimizer`, or a function from parameter names to options. Even with the
            defaults, ``{}``, choose the temperature in ``NaturalGradientELBO(temperature=...)``; for networks, 0.01 to
            0.1 is suitable.
        clip_args: as in :class:`~pyro_dvi.optim.JointOptim`.

    Raises:
        ArgumentError: an option is unknown or out of range, or the function is used in place of the torch class, for
            example in a Pyro scheduler.

    Example:
        >>> VOGN({}).pt_optim_constructor.__name__
        'VOGNOptimizer'
    """
    return NaturalGradientOptim(VOGNOptimizer, optim_args, clip_args)


@for_svi(OGNOptimizer)
def OGN(optim_args: Options, clip_args: Any = None) -> NaturalGradientOptim:  # noqa: N802
    """OGN for SVI: online Gauss-Newton, with an :class:`OGNOptimizer`; arguments as in ``VOGN``."""
    return NaturalGradientOptim(OGNOptimizer, optim_args, clip_args)


@for_svi(IVONOptimizer)
def IVON(optim_args: Options, clip_args: Any = None) -> NaturalGradientOptim:  # noqa: N802
    """IVON for SVI: improved variational online Newton, with an :class:`IVONOptimizer`; arguments as in ``VOGN``."""
    return NaturalGradientOptim(IVONOptimizer, optim_args, clip_args)
