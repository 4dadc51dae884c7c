# SPDX-License-Identifier: Apache-2.0
"""Go down a smooth function by gradients alone."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pyro_dvi.linalg.metric import SmoothFunction

_DECREASE, _SLOPE = 1e-4, 0.9  # Wolfe's conditions
_TRIALS = 12  # of one line search


@dataclass(frozen=True)
class Descent:
    """Where :func:`descend` ended.

    Attributes:
        x: the point, ``[D]``.
        value: U there.
        gradient: its gradient, ``[D]``.
        fallen: how far U fell, with the slopes' word where rounding hides it.
        steps: taken.
        stuck: no step along the last direction made U smaller.
    """

    x: Tensor
    value: float
    gradient: Tensor
    fallen: float
    steps: int
    stuck: bool


def descend(
    problem: SmoothFunction,
    start: Tensor,
    *,
    target: float,
    max_steps: int = 30,
    callback: Callable[[float, float], None] | None = None,
) -> Descent:
    r"""Take steps of the BFGS method, in coordinates where the Hessian of U is about the identity.

    .. math:: x \leftarrow x - t\,B\,g, \qquad B_{+} = (1 - \rho s y^\top) B (1 - \rho y s^\top) + \rho s s^\top

    with :math:`B = 1` at first, the step s, the change y of the gradient along it, :math:`\rho = 1/s^\top y`, and t by
    Wolfe's conditions. Where rounding hides the change of U, it is the trapezoid rule of the two slopes that decides.

    Status: a lower value at every step, to rounding; superlinear near a minimum. Saddle points are passed, not proved.

    Args:
        problem: see :class:`~pyro_dvi.linalg.metric.SmoothFunction`; products are not asked for.
        start: ``[D]``; U is finite there.
        target: on :math:`|g|^2`.
        max_steps: at most; ``2 * max_steps * D`` numbers are held.
        callback: called after each step with U and :math:`|g|^2`.

    Source: Nocedal & Wright (2006), Alg. 7.4 and Section 3.1.

    Example:
        >>> class Quartic:
        ...     def value_and_gradient(self, x):
        ...         return ((x - 1) ** 4).sum() / 4 + ((x - 1) ** 2).sum() / 2, (x - 1) ** 3 + x - 1
        >>> descend(Quartic(), torch.zeros(2), target=1e-8).x
        tensor([1., 1.])
    """
    value, gradient = _evaluated(problem, start)
    x, fallen, steps = start, 0.0, 0
    pairs: list[tuple[Tensor, Tensor]] = []
    while float(gradient @ gradient) > target and steps < max_steps:
        direction = _direction(pairs, gradient)
        found = _line_search(problem, x, value, gradient, direction)
        if found is None and not pairs:
            return Descent(x, value, gradient, fallen, steps, True)
        if found is None:
            pairs.clear()
            continue
        length, decrease, value, after = found
        step, change = length * direction, after - gradient
        if float(step @ change) > torch.finfo(x.dtype).eps * float(step.norm() * change.norm()):
            pairs.append((step, change))
        x, gradient, fallen, steps = x + step, after, fallen + decrease, steps + 1
        if callback is not None:
            callback(value, float(gradient @ gradient))
    return Descent(x, value, gradient, fallen, steps, False)


def _evaluated(problem: SmoothFunction, x: Tensor) -> tuple[float, Tensor]:
    value, gradient = problem.value_and_gradient(x)
    return float(value.detach()), gradient.detach().to(x)


def _direction(pairs: list[tuple[Tensor, Tensor]], gradient: Tensor) -> Tensor:
    """Return -B g by the recursion of two loops."""
    direction, weights = -gradient, []
    for step, change in reversed(pairs):
        weights.append((step @ direction) / (step @ change))
        direction = direction - weights[-1] * change
    for (step, change), weight in zip(pairs, reversed(weights), strict=True):
        direction = direction + (weight - (change @ direction) / (step @ change)) * step
    return direction


def _line_search(
    problem: SmoothFunction, x: Tensor, value: float, gradient: Tensor, direction: Tensor
) -> tuple[float, float, float, Tensor] | None:
    """Return a length that meets Wolfe's conditions, how far U falls, U and its gradient there; None: there is none."""
    slope = float(gradient @ direction)
    resolution = 10 * torch.finfo(x.dtype).eps * abs(value)
    low, high, length = 0.0, math.inf, 1.0
    for _ in range(_TRIALS):
        new_value, new_gradient = _evaluated(problem, x + length * direction)
        new_slope = float(new_gradient @ direction)
        decrease = value - new_value
        if abs(decrease) <= resolution:
            decrease = -0.5 * length * (slope + new_slope)
        if not decrease >= -_DECREASE * length * slope or not math.isfinite(new_slope):
            high = length
        elif new_slope < _SLOPE * slope:
            low = length
        else:
            return length, decrease, new_value, new_gradient
        if high == math.inf:
            length = 2 * length
        elif low == 0 and math.isfinite(decrease):  # the minimum of the parabola through what is known
            length *= min(0.5, max(0.1, -0.5 * slope * length / -(decrease + slope * length)))
        else:
            length = 0.5 * (low + high)
    return None
