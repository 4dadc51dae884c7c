# SPDX-License-Identifier: Apache-2.0
r"""Estimates of the curvature, and the record through which objective and optimizer share a step.

The backward pass writes :math:`\partial\,\mathrm{loss}/\partial\mu` to the ``grad`` of the means, and the measured
curvature, such as

.. math:: \sum_i g_i^2 \quad\text{or}\quad g\,\frac{\epsilon}{\sigma},

to the ``grad`` of the precisions, summed over the data set. ``zero_grad`` and sums over processes therefore treat the
curvature like any gradient. If the ``grad`` of a precision is not None, no optimizer has used the measurement yet. All
other information is in a :class:`NaturalStep`, which belongs to the guide.

To add an estimate, pass an instance of a subclass of :class:`Estimate` to an optimizer, as in ``VOGN({"estimate":
Mine()})``. The subclass overrides ``curvature`` if the gradient of the loss is enough, and ``measure`` otherwise.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from pyro_dvi.curvature.linearisation import ObservedSite
from pyro_dvi.errors import GuideError

if TYPE_CHECKING:
    from pyro_dvi.natural_gradients.drawn_run import DrawnRun, Measurement, SquareMeasurement


class Estimate:
    """Choice of the curvature that the backward pass writes to the precisions.

    The curvature, summed over the data set and averaged over the K draws of a step, is stored as the ``grad`` of the
    precisions. Values that ``measure`` adds must be divided by ``squares.num_particles``. The gradient that
    ``curvature`` receives contains a factor of 1/K: do not rescale terms that are linear in the gradient, and multiply
    the square of the gradient by K. Estimates that compare equal must measure the same curvature.

    Attributes:
        at_mean: whether gradients are taken at the mean instead of at draws.
        keeps_noise: whether ``curvature`` needs the noise of the draws.
        factored: whether the estimate measures Kronecker factors of the layers of a
            :class:`~pyro_dvi.natural_gradients.KroneckerGuide`.
    """

    at_mean: bool = False
    keeps_noise: ClassVar[bool] = False
    factored: ClassVar[bool] = False

    def measure(self, run: "DrawnRun", sites: Sequence[ObservedSite], squares: "SquareMeasurement") -> None:
        """Measure the curvature, now or in the backward pass of the loss; by default, do nothing.

        Args:
            run: the run of guide and model; add the result to ``run.guide.gaussians[name].measurement``.
            sites: observed sites and factors of the run.
            squares: measures sums of squared per-example gradients of these sites. It does not accept copies of the
                sites with other values.
        """

    def curvature(self, measurement: "Measurement", gradient: Tensor) -> Tensor | None:
        """Return the curvature of a site; called in the backward pass of the loss.

        Args:
            measurement: the measurement of the site; it includes noise and precisions if ``keeps_noise`` is true.
            gradient: gradient of the loss with respect to the draw.

        Returns:
            By default, the sum that ``measure`` has added.
        """
        added, measurement.added = measurement.added, None
        return added


@dataclass(frozen=True)
class Squares(Estimate):
    r"""Sums of squared per-example gradients, :math:`\sum_s \mathrm{scale}_s \sum_i g_{si}^2`.

    Args:
        at_mean: take gradients at the mean instead of at draws.

    Source: Osawa et al. (2019), "Practical deep learning with Bayesian principles", Algorithm 1.
    """

    at_mean: bool = False

    def measure(self, run: "DrawnRun", sites: Sequence[ObservedSite], squares: "SquareMeasurement") -> None:
        squares.measure(run, sites)


@dataclass(frozen=True)
class NoiseProducts(Estimate):
    r"""Gradients times noise, :math:`g\,\epsilon/\sigma`, whose expectation is the diagonal of the Hessian.

    Source: Shen et al. (2024), "Variational learning is effective for large deep networks", Algorithm 1.
    """

    keeps_noise: ClassVar[bool] = True

    def curvature(self, measurement: "Measurement", gradient: Tensor) -> Tensor:
        return (measurement.shift * measurement.precision).mul_(gradient)


# Between objective and optimizer ------------------------------------------------------------------


class NaturalSite(NamedTuple):
    r"""The parameters of a site and its Normal prior.

    Attributes:
        loc: parameter of the means.
        precision: parameter of the precisions, which the optimizer sets.
        prior_loc: mean of the prior, broadcastable to the means.
        prior_precision: precision :math:`\delta` of the prior, broadcastable to the means.
    """

    loc: Tensor
    precision: Tensor
    prior_loc: Tensor
    prior_precision: Tensor

    @property
    def is_of_layer(self) -> bool:
        """Whether this is a tensor of a layer; such tensors have common Kronecker factors instead of precisions."""
        return self.precision.shape != self.loc.shape


@dataclass(eq=False)
class NaturalStep:
    r"""The record of a guide's last step; every parameter of the loss refers to it as ``parameter.natural_step``.

    Attributes:
        wanted: the curvature to measure in the next step; set by the optimizer.
        measured: the curvature that is stored in the gradients of the precisions.
        num_data: N, including masked examples.
        kl_weight: :math:`\beta`.
        temperature: T.
        sites: the sites with their priors; empty before the first step.
    """

    wanted: Estimate
    measured: Any = None
    num_data: float = 1.0
    kl_weight: float = 1.0
    temperature: float = 1.0
    sites: list[NaturalSite] = field(default_factory=list)

    def __reduce__(self) -> tuple:
        """Drop the measurements in copies and files."""
        return type(self), (self.wanted,)

    def begin(self) -> None:
        """Start a new step.

        Raises:
            GuideError: no optimizer has used the measurements of the last step.
        """
        if any(site.precision.grad is not None for site in self.sites):
            raise GuideError(
                "no natural-gradient optimizer has used the gradients of the last step. Train with VOGN, OGN, IVON or "
                "NoisyKFAC, and take an optimizer step after each backward pass. To drop the gradients, call "
                "elbo.prepare(guide, optimizer)"
            )
        self.measured = self.wanted

    def drop(self) -> None:
        """Drop the measurements."""
        for site in self.sites:
            site.precision.grad = None


def steps_of(parameters: Iterable[Tensor]) -> list[NaturalStep]:
    """Return the last steps that gave a gradient to any of the parameters."""
    steps = {id(step): step for p in parameters if (step := getattr(p, "natural_step", None)) is not None}
    return list(steps.values())
