# SPDX-License-Identifier: Apache-2.0
"""Squared gradients that the objective of natural gradients measures, and a loop over examples that gives the same."""

from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import torch
from torch import Tensor

from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import OGN

M, N = 6, 24


def squares_at_mean(model: Callable, *args: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Squares measured by the objective at the mean, and by a loop over examples."""
    torch.manual_seed(0)
    guide = NaturalGradientGuide(model)
    guide.initialize(*args)
    elbo = NaturalGradientELBO(kl_weight=0.3)
    elbo.prepare(guide, OGN({}))
    means = {name: value.detach().clone() for name, value in guide.median(*args).items()}
    torch.manual_seed(1)
    elbo.loss_and_grads(model, guide, *args)
    found = {name: guide.precision_parameter(name).grad for name in means}
    torch.manual_seed(1)
    return found, looped(model, means, *args)


def looped(model: Callable, values: dict[str, Tensor], *args: Any) -> dict[str, Tensor]:
    r""":math:`\sum_s \mathrm{scale}_s \sum_i g_{si}^2` at ``values``."""
    values = {name: value.clone().requires_grad_() for name, value in values.items()}
    trace = poutine.trace(poutine.condition(model, data=values)).get_trace(*args)
    trace.compute_log_prob()
    totals = {name: torch.zeros_like(value) for name, value in values.items()}
    for name, site in trace.nodes.items():
        if site["type"] != "sample" or not site["is_observed"] or name in values:
            continue
        scale = torch.as_tensor(site["scale"]).expand_as(site["log_prob"]).reshape(-1)
        unscaled = (site["log_prob"] / site["scale"]).reshape(-1)
        for log_prob, factor in zip(unscaled, scale, strict=True):
            if not log_prob.requires_grad:
                continue
            grads = torch.autograd.grad(log_prob, values.values(), retain_graph=True, allow_unused=True)
            for key, grad in zip(values, grads, strict=True):
                if grad is not None:
                    totals[key] += factor * grad.square()
    return totals


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, squares in found.items():
        torch.testing.assert_close(
            squares, expected[name], rtol=1e-9, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


def x_and_y() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(M, 3, generator=generator), torch.randn(M, generator=generator)


def weights(shape: tuple[int, ...], name: str = "w") -> Tensor:
    return pyro.sample(name, dist.Normal(0.0, 1.0).expand(shape).to_event(len(shape)))


def minibatch(name: str = "data", size: int = N, rows: int = M) -> Any:
    return pyro.plate(name, size, subsample=torch.arange(rows))
