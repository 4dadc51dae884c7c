# SPDX-License-Identifier: Apache-2.0
r"""Schedules for the weight :math:`\beta` of the KL term: functions of the training step.

Every ELBO of the library takes ``kl_weight`` as a number or as a callable of the step, counted from 0. The
schedules here are the callables that training of Bayesian networks uses. They are frozen and compare by
value, so they can be pickled, printed and kept in a table of experiments; the step that they are asked for is
counted, and saved, by the ELBO.

Writing another schedule: any picklable callable that maps a step to a number that is not negative will do.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pyro_dvi.core.arguments import check_count, check_kl_weight
from pyro_dvi.errors import ArgumentError

__all__ = ["CosineWarmup", "LinearWarmup", "Staged"]


@dataclass(frozen=True)
class _Warmup(ABC):
    """A way from ``start`` to ``end`` within a number of steps, and then constant."""

    steps: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        check_count(f"{type(self).__name__}: steps", self.steps)
        for name in ("start", "end"):
            check_kl_weight(f"{type(self).__name__}: {name}", getattr(self, name))

    def __call__(self, step: int) -> float:
        """Return the weight at ``step``."""
        if step >= self.steps:
            return float(self.end)
        return self.start + (self.end - self.start) * self._share(step / self.steps)

    @abstractmethod
    def _share(self, time: float) -> float:
        """Return the share of the way that is done after a share of the time."""


@dataclass(frozen=True)
class LinearWarmup(_Warmup):
    r"""A straight line from ``start`` to ``end``, then constant.

    .. math::
        \beta_t = \beta_0 + (\beta_1 - \beta_0) \min(t / T, 1)

    Status: exact.

    Args:
        steps: :math:`T`, the number of training steps until ``end`` is reached. With a loader, epochs times
            ``len(loader)``.
        start: :math:`\beta_0`, the weight at step 0.
        end: :math:`\beta_1`, the weight from step :math:`T` on.

    Raises:
        ArgumentError: if ``steps`` is not a positive integer or a weight is negative or not finite.

    Source: Sønderby et al. (2016), "Ladder Variational Autoencoders".

    Example:
        >>> warmup = LinearWarmup(steps=100)
        >>> warmup(0), warmup(50), warmup(100), warmup(1000)
        (0.0, 0.5, 1.0, 1.0)
    """

    def _share(self, time: float) -> float:
        return time


@dataclass(frozen=True)
class CosineWarmup(_Warmup):
    r"""Half a cosine wave from ``start`` to ``end``, then constant: flat at both ends.

    .. math::
        \beta_t = \beta_0 + (\beta_1 - \beta_0) \tfrac12\bigl(1 - \cos(\pi \min(t / T, 1))\bigr)

    Status: exact.

    Args:
        steps: :math:`T`, the number of training steps until ``end`` is reached.
        start: :math:`\beta_0`, the weight at step 0.
        end: :math:`\beta_1`, the weight from step :math:`T` on.

    Raises:
        ArgumentError: if ``steps`` is not a positive integer or a weight is negative or not finite.

    Source: the curve of Loshchilov & Hutter (2017), "SGDR", Eq. 5, used for the weight of the KL.

    Example:
        >>> ramp = CosineWarmup(steps=100, start=0.1)
        >>> [round(ramp(step), 4) for step in (0, 50, 100, 1000)]
        [0.1, 0.55, 1.0, 1.0]
    """

    def _share(self, time: float) -> float:
        return 0.5 * (1.0 - math.cos(math.pi * time))


@dataclass(frozen=True)
class Staged:
    r"""Constant pieces: ``values[k]`` from step ``boundaries[k - 1]`` until before ``boundaries[k]``.

    Status: exact.

    Args:
        boundaries: increasing positive steps at which the weight changes, ``K`` of them.
        values: the ``K + 1`` weights before, between and after the boundaries.

    Raises:
        ArgumentError: if the boundaries do not increase, the counts do not fit, or a weight is negative or
            not finite.

    Example:
        >>> staged = Staged(boundaries=[100, 200], values=[0.0, 0.1, 1.0])
        >>> staged(99), staged(100), staged(199), staged(200)
        (0.0, 0.1, 0.1, 1.0)
    """

    boundaries: Sequence[int]
    values: Sequence[float]

    def __post_init__(self) -> None:
        # Tuples keep the schedule hashable and safe from later changes of the caller's lists.
        object.__setattr__(self, "boundaries", tuple(self.boundaries))
        object.__setattr__(self, "values", tuple(self.values))
        for before, boundary in pairwise((0, *self.boundaries)):
            check_count("Staged: each of the increasing boundaries", boundary, least=before + 1)
        if len(self.values) != len(self.boundaries) + 1:
            raise ArgumentError(
                f"Staged: {len(self.boundaries)} boundaries separate {len(self.boundaries) + 1} values, got "
                f"{len(self.values)} values."
            )
        for value in self.values:
            check_kl_weight("Staged: each of the values", value)

    def __call__(self, step: int) -> float:
        """Return the weight at ``step``."""
        return float(self.values[bisect_right(self.boundaries, step)])
