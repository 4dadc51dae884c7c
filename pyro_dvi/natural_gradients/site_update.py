# SPDX-License-Identifier: Apache-2.0
"""One step of some parameters, in functions of torch that update all of them at once.

Numbers that change from step to step are floats in an ordinary step, and tensors on the device in a captured one. The
functions below accept both.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pyro_dvi.errors import CheckpointError
from pyro_dvi.natural_gradients.estimates import NaturalSite, NaturalStep

Tensors = list[Tensor] | tuple[Tensor, ...]


class Numbers(NamedTuple):
    r"""Numbers that change from step to step.

    Attributes:
        keep: factor of the old curvature in the new one.
        rate: factor of the measured curvature.
        correction: the momentum, divided by this number, is an average of gradients.
        prior: :math:`\beta / \rho`.
        inverse_temperature: :math:`\rho / (\beta T)`.
        damping: :math:`\gamma N`.
        inverse_bound: one divided by the maximum of a preconditioned direction, in units of the site.
        length: the factor of bounded directions in the step.
    """

    keep: Any = 1.0
    rate: Any = 1.0
    correction: Any = 1.0
    prior: Any = 1.0
    inverse_temperature: Any = 1.0
    damping: Any = 1.0
    inverse_bound: Any = 1.0
    length: Any = 1.0


@dataclass
class SiteUpdate:
    r"""One step of the means of several sites that have the same options; lists have one entry for each site.

    Gradients and curvature are sums over the data, not means over examples. The number of examples N, which may vary
    with padding and with the scales of examples, then cancels.

    Attributes:
        sites: the sites, with their parameters and priors.
        memories: "step" (number of steps), "momentum" and "curvature" (:math:`Ns`), to be updated.
        group: the options.
        step: the measurements.
        count: number of this step, from 1.
        measurements: number of measurements of the curvature, including this one.
        is_new: whether to include the curvature of this minibatch.
        kl_weight: current :math:`\beta`, which rises during warm-up.
        numbers: the numbers of this step.
        is_layer: whether the sites are the tensors of a layer, which share Kronecker factors.
        gradients: gradients of minus the log-likelihood with respect to the means; may be overwritten.
        measured: the curvature of this minibatch; may be overwritten.
        priors: :math:`\rho N\tilde\delta / \rho = \beta\delta / \rho`.
    """

    sites: list[NaturalSite]
    memories: list[dict[str, Any]]
    group: dict[str, Any]
    step: NaturalStep
    count: int
    kl_weight: float = 1.0
    numbers: Numbers = Numbers()

    def __post_init__(self) -> None:
        self.parameters = [site.loc for site in self.sites]
        # The tensors of a layer share one memory.
        self.precisions = list({id(site.precision): site.precision for site in self.sites}.values())
        self.is_layer = self.sites[0].is_of_layer
        self.has_start = self.group.get("initial_curvature") is not None
        self.set_count(self.count)

    def set_count(self, count: int) -> None:
        """Set the number of this step."""
        self.count = self.measurements = count
        # A curvature that is initialised with this minibatch must not include it again.
        self.is_new = count > 1 or self.has_start

    @property
    def tensors(self) -> list[Any]:
        """All tensors that an update reads or writes."""
        gradients = [tensor.grad for site in self.sites for tensor in site[:2]]
        memory = [memory[name] for memory in self.memories for name in ("momentum", "curvature")]
        return [*(tensor for site in self.sites for tensor in site), *gradients, *memory]

    @property
    def has_memory(self) -> bool:
        """Whether later updates use the same memory."""
        return not self.is_layer and all(
            site.precision.grad is not None and _is_beside(memory.get("curvature"), site.loc)
            for site, memory in zip(self.sites, self.memories, strict=True)
        )

    def set_numbers(self, rates: tuple[float, float, float], factor: float) -> None:
        """Compute the numbers of this step from the first three and the factor of the learning rate."""
        group, prior = self.group, self.kl_weight / self.group["data_augmentation"]
        bound, length = 1.0, factor * group["lr"] / rates[2]
        if group["max_step"] is not None:
            bound = group["max_step"] / group["full_lr"] * rates[2]
        damping = group["damping"] * self.step.num_data
        own = prior, 1 / (prior * self.step.temperature), damping, 1 / bound, length * bound
        self.numbers = Numbers(*rates, *own)

    def begin(self) -> None:
        """Prepare the tensors of the update, and the memories in the first step."""
        self.gradients: Any = [loc.grad for loc in self.parameters]
        self.measured: Any = [precision.grad for precision in self.precisions]
        self.priors = torch._foreach_mul([site.prior_precision for site in self.sites], self.numbers.prior)
        for site, memory in zip(self.sites, self.memories, strict=True):
            if "momentum" not in memory:
                memory["momentum"], memory["unit"] = torch.zeros_like(site.loc), _unit(site)
            elif "unit" not in memory:
                raise CheckpointError(
                    "the optimizer's state was saved by another version of pyro-dvi: start with a new optimizer"
                )
        holders = self.memories[: len(self.measured)]
        for memory, measured in zip(holders, self.measured, strict=True):
            if "curvature" not in memory:
                memory["curvature"] = measured.clone()
                if self.has_start:
                    memory["curvature"].fill_(self.group["initial_curvature"] * self.step.num_data)
        self.momenta = [memory["momentum"] for memory in self.memories]
        self.curvatures = [memory["curvature"] for memory in holders]

    def add_measured(self) -> None:
        """Update the curvatures with the measured curvatures."""
        torch._foreach_mul_(self.curvatures, self.numbers.keep)
        torch._foreach_mul_(self.measured, self.numbers.rate)
        torch._foreach_add_(self.curvatures, self.measured)

    def add_priors(self, gradients: Tensors, factor: Any = None) -> None:
        """Add the gradient of the prior, times a factor, in place."""
        priors = self.priors if factor is None else torch._foreach_mul(self.priors, factor)
        torch._foreach_addcmul_(gradients, self.parameters, priors)
        torch._foreach_sub_(gradients, torch._foreach_mul(priors, [site.prior_loc for site in self.sites]))

    def sum_into_precisions(self) -> None:
        r"""Write :math:`\rho N(s + \tilde\delta) / \rho` to the precisions."""
        torch._foreach_copy_(self.precisions, self.curvatures)
        torch._foreach_add_(self.precisions, self.priors)

    def damped(self) -> Tensors:
        """Return the precisions that :meth:`sum_into_precisions` wrote, with damping added."""
        if not self.group["damping"]:
            return self.precisions
        # torch._foreach_add would read a number that is a tensor.
        return [precision + self.numbers.damping for precision in self.precisions]

    def move_along(self, directions: Tensors) -> None:
        """Subtract preconditioned directions from the means, with steps of at most ``max_step`` units."""
        if self.group["max_step"] is not None:
            units = [memory["unit"] for memory in self.memories]
            torch._foreach_mul_(directions, self.numbers.inverse_bound)
            torch._foreach_clamp_max_(directions, units)
            torch._foreach_clamp_min_(directions, [-unit for unit in units])
        torch._foreach_mul_(directions, self.numbers.length)
        torch._foreach_sub_(self.parameters, directions)


def _unit(site: NaturalSite) -> float:
    """Return the unit of a site's steps: the initial standard deviation of its means, or a minimum if that is larger.

    The minimum is a tenth of the prior standard deviation, divided by the square root of a layer's number of inputs. It
    applies, for example, to means that are all equal, which do not show the size of the final means.
    """
    loc = site.loc.detach()
    fan_in = loc.numel() / loc.shape[0] if loc.dim() > 1 else 1.0
    least = 0.1 * float(site.prior_precision.pow(-0.5).mean()) / math.sqrt(fan_in)
    return max(float(loc.std(correction=0)), least)


def _is_beside(memory: Tensor | None, parameter: Tensor) -> bool:
    return memory is not None and (memory.device, memory.dtype) == (parameter.device, parameter.dtype)


class AdamNumbers(NamedTuple):
    """Numbers of a step of Adam: the correction of squares, and the learning rate with the correction of gradients."""

    correction: Any = 1.0
    rate: Any = 1.0


@dataclass
class AdamUpdate:
    """One step of Adam (Kingma & Ba, 2015) with the usual constants, for parameters that are no means."""

    parameters: list[Tensor]
    memories: list[dict[str, Any]]
    group: dict[str, Any]
    count: int
    numbers: AdamNumbers = AdamNumbers()

    @property
    def tensors(self) -> list[Any]:
        """All tensors that an update reads or writes."""
        memory = [memory[name] for memory in self.memories for name in ("mean", "square")]
        return [*self.parameters, *(p.grad for p in self.parameters), *memory]

    @property
    def has_memory(self) -> bool:
        """Whether later updates use the same memory."""
        pairs = zip(self.memories, self.parameters, strict=True)
        return all(_is_beside(memory.get("mean"), parameter) for memory, parameter in pairs)

    def set_count(self, count: int) -> None:
        """Set the number of this step."""
        self.count = count

    def set_numbers(self, lr: float) -> None:
        """Compute the numbers of this step."""
        self.numbers = AdamNumbers(1 - 0.999**self.count, lr / (1 - 0.9**self.count))

    def take(self) -> None:
        """Update the parameters."""
        for memory, parameter in zip(self.memories, self.parameters, strict=True):
            if "mean" not in memory:
                memory["mean"], memory["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        gradients: Any = [parameter.grad for parameter in self.parameters]
        means, squares = ([memory[name] for memory in self.memories] for name in ("mean", "square"))
        torch._foreach_lerp_(means, gradients, 0.1)
        torch._foreach_mul_(squares, 0.999)
        torch._foreach_addcmul_(squares, gradients, gradients, value=0.001)
        scales = torch._foreach_div(squares, self.numbers.correction)
        torch._foreach_sqrt_(scales)
        torch._foreach_add_(scales, 1e-8)
        directions = torch._foreach_div(means, scales)
        torch._foreach_mul_(directions, self.numbers.rate)
        torch._foreach_sub_(self.parameters, directions)
