# SPDX-License-Identifier: Apache-2.0
"""How the step size of the natural-gradient optimizers rises and falls."""

import math

__all__ = ["cosine", "warm_up"]


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
