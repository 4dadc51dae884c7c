# SPDX-License-Identifier: Apache-2.0
"""Whether the mean posterior scale still moved when training ended."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pyro_dvi.errors import DataError

__all__ = ["MOVING", "ScaleCourse", "scale_course"]

MOVING = 0.01  # relative change above which scales are said to move


@dataclass(frozen=True)
class ScaleCourse:
    r"""Change of the mean posterior scale over the last tenth of training.

    Attributes:
        epochs: number of epochs that the change is over.
        change: relative change :math:`\bar\sigma_T / \bar\sigma_{T-k} - 1` over these k epochs.
    """

    epochs: int
    change: float

    @property
    def moves(self) -> bool:
        """Whether the scale changed by more than one per cent."""
        return abs(self.change) > MOVING

    def __str__(self) -> str:
        last = "the last epoch" if self.epochs == 1 else f"the last {self.epochs} epochs"
        what = f"still {'falls' if self.change < 0 else 'rises'}" if self.moves else "settled"
        return f"{what}: {self.change:+.1%} in {last}"


def scale_course(scales: Sequence[float]) -> ScaleCourse | None:
    r"""Judge by the mean posterior scale of each epoch whether scales still move.

    Status: a rule of thumb. Scales of single sites may move while their mean stands still;
    :func:`~pyro_dvi.diagnostics.scale_report` with an earlier snapshot looks at each.

    Args:
        scales: mean posterior scale after each epoch, ``history["posterior_scale"]``; what is not finite is left out.

    Returns:
        The change over the last tenth of the epochs, at least one of them; None for fewer than three epochs.

    Raises:
        DataError: a scale that is not positive.

    Example:
        >>> print(scale_course([0.10, 0.05, 0.04, 0.03]))
        still falls: -25.0% in the last epoch
    """
    finite = [float(scale) for scale in scales if math.isfinite(scale)]
    if any(scale <= 0 for scale in finite):
        raise DataError(f"posterior scales are positive, but the history holds {min(finite)!r}")
    if len(finite) < 3:
        return None
    epochs = max(1, len(finite) // 10)
    return ScaleCourse(epochs, finite[-1] / finite[-1 - epochs] - 1)
