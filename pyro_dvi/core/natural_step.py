# SPDX-License-Identifier: Apache-2.0
r"""What an objective of natural gradients passes to its optimizer.

What is a gradient travels as one. The backward pass leaves :math:`\partial\,\mathrm{loss}/\partial\mu` with the means,
and with the precisions, as their ``grad``, the curvature that was measured,

.. math:: \sum_i g_i^2 \quad\text{or}\quad g\,\frac{\epsilon}{\sigma},

summed over the data set and multiplied with whatever the loss was multiplied with. So ``zero_grad``, gradient scalers
and sums over processes treat it as they treat all gradients, and measurements that nobody has used are precisions with
a gradient. Everything else is one :class:`NaturalStep` for each guide, in :data:`STEPS`.
"""

from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor


class Statistic(Enum):
    """What is measured as the curvature: sums of squared gradients of examples, or gradients times noise."""

    SQUARES = "squares"
    SQUARES_AT_MEAN = "squares at the mean"
    NOISE_PRODUCTS = "noise products"

    @property
    def at_mean(self) -> bool:
        """Whether gradients are taken at the mean, and not at draws."""
        return self is Statistic.SQUARES_AT_MEAN


@dataclass(frozen=True, eq=False)
class NaturalSite:
    r"""The parameters of a site, and its Normal prior.

    Attributes:
        loc: parameter of the means.
        precision: parameter of the precisions, which the optimizer writes.
        prior_loc: mean of the prior, of the shape of the means or expandable to it.
        prior_precision: its precision :math:`\delta`, likewise.
    """

    loc: Tensor
    precision: Tensor
    prior_loc: Tensor
    prior_precision: Tensor


@dataclass(eq=False)
class NaturalStep:
    r"""The last step of a guide.

    Attributes:
        measured: which statistic the gradients of the precisions are.
        wanted: which one the optimizer wants in the next step; it says so in its own step.
        num_data: N.
        temperature: :math:`\beta`, the weight of the KL divergence.
        loss_factor: what the loss was multiplied with before the backward pass, as all gradients are.
        sites: the sites by name.
        trained: parameters that the loss depends on, by identity.
    """

    measured: Statistic
    wanted: Statistic = field(init=False)
    num_data: float = 1.0
    temperature: float = 1.0
    loss_factor: Tensor | float = 1.0
    sites: dict[str, NaturalSite] = field(default_factory=dict)
    trained: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.wanted = self.measured

    @property
    def is_unused(self) -> bool:
        """Whether there are measurements that no optimizer has used."""
        return any(site.precision.grad is not None for site in self.sites.values())

    def drop(self) -> None:
        """Forget the measurements."""
        for site in self.sites.values():
            site.precision.grad = None

    def note_factor(self, gradient: Tensor) -> None:
        """Keep what the loss is multiplied with: a hook of the loss, which runs before all others."""
        self.loss_factor = gradient.detach()


STEPS: MutableMapping[Any, NaturalStep] = WeakKeyDictionary()
"""The last step of each living guide."""


def steps_of(parameters: Iterable[Tensor]) -> list[NaturalStep]:
    """Return the last steps that have given any of the parameters a gradient."""
    wanted = set(map(id, parameters))
    return [step for step in STEPS.values() if not wanted.isdisjoint(step.trained)]
