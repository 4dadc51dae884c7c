# SPDX-License-Identifier: Apache-2.0
"""Losses that are multiplied before the backward pass, by GradScaler, by 1/N, by accumulation of gradients."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor, nn
from torch.amp import GradScaler

import pyro_dvi as dvi
from pyro_dvi.errors import GuideError
from pyro_dvi.natural_gradients.updates import IVONOptimizer, OGNOptimizer, VOGNOptimizer

N, M = 20, 5
OPTIMIZERS = [VOGNOptimizer, OGNOptimizer, IVONOptimizer]


@pytest.fixture(autouse=True)
def _local():
    torch.set_default_dtype(torch.float64)
    with pyro.settings.context(module_local_params=True):
        yield


def data() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(0))
    return x, x.sum(1).sin()


class Net(pyro.nn.PyroModule):
    """A layer with a rule, one weight without, a second observed site where asked for, and a learned noise."""

    def __init__(self, second: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = dvi.to_bayesian_(
            nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)), prior_scale=1.0
        )
        self.noise = pyro.nn.PyroParam(torch.tensor(0.5), dist.constraints.positive)
        self.power = pyro.nn.PyroSample(dist.Normal(0.0, 1.0))
        self.second = second

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        f = self.net(x)[:, 0] + x[:, 0] * self.power.exp()
        with pyro.plate("data", N, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(f, self.noise), obs=y)
            if self.second:
                pyro.sample("z", dist.Normal(f.exp(), 1.0), obs=y)


def trained(
    constructor: type, step: Callable[[torch.optim.Optimizer, Tensor], None], second: bool = False
) -> dict[str, Tensor]:
    """Parameters after a few steps."""
    model = Net(second)
    guide = dvi.NaturalGradientGuide(model)
    x, y = data()
    guide.initialize(x, y)
    module = dvi.NaturalGradientELBO(kl_weight=0.5, num_particles=2)(model, guide)
    optimizer = constructor(module.parameters(), lr=0.05, deterministic_lr=0.01)
    torch.manual_seed(2)
    for t in range(6):
        rows = (torch.arange(M) + M * t) % N
        optimizer.zero_grad()
        step(optimizer, module(x[rows], y[rows]))
    return {name: value.detach().clone() for name, value in module.named_parameters()}


def plain(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("constructor", OPTIMIZERS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("second", [False, True], ids=["one site", "two sites"])
@pytest.mark.parametrize("factor", [1024.0, 1 / N])
def test_a_multiplied_loss_takes_the_same_steps(constructor, second, factor):
    def step(optimizer, loss):
        (loss * factor).backward()
        optimizer.step()

    expected = trained(constructor, plain, second)
    torch.testing.assert_close(trained(constructor, step, second), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("constructor", OPTIMIZERS, ids=lambda c: c.__name__)
@pytest.mark.parametrize("unscales", [False, True], ids=["step", "unscale_ and step"])
def test_gradient_scalers_take_the_same_steps(constructor, unscales):
    scaler = GradScaler("cpu", init_scale=512.0, growth_interval=2)

    def step(optimizer, loss):
        scaler.scale(loss).backward()
        if unscales:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1e9)
        scaler.step(optimizer)
        scaler.update()

    expected = trained(constructor, plain)
    torch.testing.assert_close(trained(constructor, step), expected, rtol=1e-9, atol=1e-10)
    assert scaler.get_scale() > 512


def test_steps_that_overflow_are_skipped():
    """In a step with an infinite gradient nothing moves, and the next one goes on."""
    scaler = GradScaler("cpu", init_scale=2.0**10)
    count = 0

    def step(optimizer, loss):
        nonlocal count
        count += 1
        before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
        scaler.scale(loss * (float("inf") if count == 3 else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        moved = any(
            not torch.equal(a, b) for a, b in zip(before, optimizer.param_groups[0]["params"], strict=True)
        )
        assert moved == (count != 3)

    assert all(torch.isfinite(value).all() for value in trained(VOGNOptimizer, step).values())
    assert scaler.get_scale() == 2.0**9


def test_a_divided_loss_is_refused_where_the_scaler_has_unscaled():
    scaler = GradScaler("cpu", init_scale=512.0)

    def step(optimizer, loss):
        scaler.scale(loss / N).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)

    with pytest.raises(GuideError, match=r"multiplied with 25\.6 .*do not divide the loss"):
        trained(VOGNOptimizer, step)


def test_several_backward_passes_for_a_step_are_refused():
    model = Net()
    guide = dvi.NaturalGradientGuide(model)
    guide.initialize(*data())
    module = dvi.NaturalGradientELBO()(model, guide)
    (module(*data()) / 2).backward()
    with pytest.raises(GuideError, match="take a step after each backward pass"):
        module(*data())
    VOGNOptimizer(module.parameters()).zero_grad()
    module(*data()).backward()
