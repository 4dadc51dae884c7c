# SPDX-License-Identifier: Apache-2.0
"""The updates of VOGN, OGN and IVON as operators on fixed memory, which CUDA runs with a single launch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from pyro_dvi.core.triton_kernels import triton_kernel
from pyro_dvi.core.undisturbed import widest
from pyro_dvi.natural_gradients.estimates import NaturalSite, NaturalStep, steps_of
from pyro_dvi.optim.launched_updates import FixedUpdate

if TYPE_CHECKING:
    from pyro_dvi.natural_gradients.optimizer import NaturalGradientOptimizer

OfStep = Callable[[dict[str, Any], int], tuple[float, float, float]]
LEAST_PRECISION = 0.1  # least precision of IVON before an update, as a fraction of the prior precision
_PER_SITES, _PER_OTHERS = 9, 2


class NaturalUpdate(FixedUpdate):
    """The next update of a natural-gradient optimizer.

    Args:
        optimizer: the optimizer.
        step: the measurements.
        sites: the sites, by option group and number of steps taken.
        others: the deterministic parameters, likewise.
        of_step: returns the rate of the curvature, the bias correction of the momentum, and the factor of the step by
            which it is divided, given options and number of a step.
        ivon: whether the update is that of IVON.
    """

    def __init__(
        self,
        optimizer: NaturalGradientOptimizer,
        step: NaturalStep,
        sites: dict[tuple[int, int], list[NaturalSite]],
        others: dict[tuple[int, int], list[Tensor]],
        of_step: OfStep,
        ivon: bool,
    ) -> None:
        self._optimizer, self._step, self._of_step, self._ivon = optimizer, step, of_step, ivon
        self._sites, self._others = sites, others
        self.size = _PER_SITES * len(sites) + _PER_OTHERS * len(others)
        self.tensors = [
            *(tensor for part in sites.values() for site in part for tensor in self._of_site(site)),
            *(tensor for part in others.values() for p in part for tensor in self._of_other(p)),
        ]
        options = [
            [v for k, v in group.items() if k not in ("params", "lr")] for group in optimizer.param_groups
        ]
        layout = [[(index, len(part)) for (index, _), part in parts.items()] for parts in (sites, others)]
        self.key = str((type(optimizer).__name__, options, layout))

    @classmethod
    def of(cls, optimizer: NaturalGradientOptimizer, of_step: OfStep, ivon: bool) -> NaturalUpdate | None:
        """Return the next update; None if it must be an ordinary one."""
        indexed = [
            (k, p) for k, g in enumerate(optimizer.param_groups) for p in g["params"] if p.grad is not None
        ]
        steps = steps_of(p for _, p in indexed)
        if len(steps) != 1 or steps[0].measured != optimizer.wanted:
            return None
        site_of = {id(site.loc): site for site in steps[0].sites}
        precisions = {id(site.precision) for site in steps[0].sites}
        sites, others = defaultdict[Any, list[NaturalSite]](list), defaultdict[Any, list[Tensor]](list)
        for index, p in indexed:
            memory, site = optimizer.state.get(p, {}), site_of.get(id(p))
            if id(p) in precisions:
                continue
            if site is not None and "curvature" in memory and _is_plain(site, memory):
                sites[index, memory["step"]].append(site)
            elif site is None and "mean" in memory and p.dtype is torch.float32:
                others[index, memory["step"]].append(p)
            else:
                return None
        return cls(optimizer, steps[0], dict(sites), dict(others), of_step, ivon)

    def _of_site(self, site: NaturalSite) -> list[Any]:
        memory, (loc, precision, prior_loc, prior_precision) = self._optimizer.state[site.loc], site
        own = memory["momentum"], memory["curvature"]
        return [loc, precision, loc.grad, precision.grad, *own, prior_loc, prior_precision]

    def _of_other(self, parameter: Tensor) -> list[Any]:
        memory = self._optimizer.state[parameter]
        return [parameter, parameter.grad, memory["mean"], memory["square"]]

    def numbers(self) -> list[float]:
        optimizer, step, found = self._optimizer, self._step, []
        for (index, before), part in self._sites.items():
            group, count = optimizer.param_groups[index], before + 1
            self._count([site.loc for site in part], count)
            optimizer.rate_factor, tempering = optimizer.factors(count, group)
            kl_weight = step.kl_weight * tempering
            rate, correction, divisor = self._of_step(group, count)
            bound = float("inf")
            if group["max_step"] is not None:
                bound = group["max_step"] / group["full_lr"] * divisor
            found += [
                1 - group["betas"][0],
                rate,
                group["data_augmentation"] / (kl_weight * step.temperature),
                kl_weight / group["data_augmentation"],
                group["damping"] * step.num_data,
                correction,
                bound,
                optimizer.rate_factor * group["lr"] / divisor,
                1 - LEAST_PRECISION,
            ]
        for (index, before), rest in self._others.items():
            self._count(rest, before + 1)
            rate = optimizer.deterministic_rate(before + 1, optimizer.param_groups[index])
            found += [float(before + 1), rate]
        return found

    def _count(self, parameters: list[Tensor], count: int) -> None:
        for parameter in parameters:
            self._optimizer.state[parameter]["step"] = count

    def run(self, numbers: Tensor) -> None:
        kernel = _kernel_on(numbers.device)
        parts = iter(numbers.split([_PER_SITES] * len(self._sites) + [_PER_OTHERS] * len(self._others)))
        for part in self._sites.values():
            own = next(parts)
            for site in part:
                kernel(self._of_site(site), own, self._optimizer.state[site.loc]["unit"], self._ivon)
        for rest in self._others.values():
            count, rate = next(parts).to(torch.float32).unbind()
            options: Any = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "lr": rate}
            options |= {"amsgrad": False, "maximize": False}
            tensors: Any = map(list, zip(*map(self._of_other, rest), strict=True))
            torch._fused_adam_(*tensors, [], [count] * len(rest), **options)

    def finish(self) -> None:
        for part in self._sites.values():
            for site in part:
                site.precision.grad = None
        self._step.wanted = self._optimizer.wanted


def _is_plain(site: NaturalSite, memory: dict[str, Any]) -> bool:
    """Return True if the kernel can update a site."""
    if site.is_of_layer or site.precision.grad is None:
        return False
    loc, prior = site.loc, (site.prior_loc, site.prior_precision)
    own = (loc, loc.grad, site.precision, site.precision.grad, memory["momentum"], memory["curvature"])
    for tensor in (*own, *prior):
        if tensor.dtype is not torch.float32 or tensor.device != loc.device or not tensor.is_contiguous():  # type: ignore[union-attr]
            return False
    return all(tensor.numel() in (1, loc.numel()) for tensor in prior)


def updated(tensors: list[Any], numbers: Tensor, unit: float, ivon: bool) -> None:
    """Update the tensors of a site in place with torch functions, as ``update_kernel.update`` does with one kernel."""
    loc, precision, gradient, measured, momentum, curvature, prior_loc, prior_precision = tensors
    given = numbers.to(loc.dtype).unbind()
    forget, rate, temper, prior, damping, correction, bound, step, kept = given
    delta = prior * prior_precision
    pull = delta * (loc - prior_loc)
    if ivon:
        momentum += forget * (gradient - momentum)
        curvature.copy_(torch.maximum(curvature, -kept * delta))
        change = measured - curvature
        curvature += rate * change + 0.5 * rate * rate * change * change / (curvature + delta)
        direction = momentum + correction * pull
    else:
        curvature += rate * (measured - curvature)
        momentum += forget * (gradient + pull - momentum)
        direction = momentum
    total, limit = curvature + delta, bound * unit
    loc -= step * torch.minimum(torch.maximum(direction / (total + damping), -limit), limit)
    precision.copy_(total * temper)


def _kernel_on(device: torch.device) -> Callable[[list[Any], Tensor, float, bool], None]:
    """Return the kernel of updates on a GPU, or its equivalent in torch functions."""
    if device.type != "cuda":
        return updated
    path = "pyro_dvi.natural_gradients.update_kernel:update"
    kernel = triton_kernel(path, device, lambda found: _checked(found, device))
    return updated if kernel is None else kernel  # type: ignore[no-any-return]


def _checked(kernel: Any, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return tensors that a kernel has updated, and those that torch functions have updated."""
    numbers = torch.tensor([0.1, 0.3, 2.0, 0.7, 0.2, 0.9, 0.4, 0.5, 0.9], dtype=widest(device), device=device)
    results = []
    for update in (kernel, updated):
        tensors = list(torch.linspace(0.1, 3, 14 * 1100, device=device).sin().abs().view(14, 1100).clone())
        for ivon, some in ((False, tensors[:8]), (True, [*tensors[8:], *tensors[6:8]])):
            update(some, numbers, 0.8, ivon)
        results.append(torch.stack(tensors))
    return results[0], results[1]
