# SPDX-License-Identifier: Apache-2.0
r"""Schedules for the weight :math:`\beta` of the KL term, as functions of the training step.

Every ELBO of the library takes ``kl_weight`` as a number, or as a callable that maps the training step to a number.
Steps are counted from 0; the ELBO counts them, and checkpoints save their number.

Your own schedule can be any picklable callable that maps a step to a non-negative number.
"""

from dataclasses import dataclass

from pyro_dvi.core.arguments import check_count

__all__ = ["LinearWarmup"]


@dataclass(frozen=True)
class LinearWarmup:
    r"""A KL weight that increases linearly from ``start`` to ``end``, then stays constant.

    .. math::
        \beta_t = \beta_0 + (\beta_1 - \beta_0) \min(t / T, 1)

    Args:
        steps: :math:`T`, the number of training steps until ``end`` is reached. With a loader, this is the number of
            epochs times ``len(loader)``.
        start: :math:`\beta_0`, the weight at step 0.
        end: :math:`\beta_1`, the weight from step :math:`T` on.

    Raises:
        ArgumentError: if ``steps`` is not a positive integer; during training, also if a weight is negative or not
            finite.

    Source: Sønderby et al. (2016), "Ladder Variational Autoencoders".

    Example:
        >>> warmup = LinearWarmup(steps=100)
        >>> warmup(0), warmup(50), warmup(100), warmup(1000)
        (0.0, 0.5, 1.0, 1.0)
    """

    steps: int
    start: float = 0.0
    end: float = 1.0

    def __post_init__(self) -> None:
        check_count("LinearWarmup: steps", self.steps)

    def __call__(self, step: int) -> float:
        """Return the weight at ``step``."""
        if step >= self.steps:
            return float(self.end)
        return self.start + (self.end - self.start) * step / self.steps
