# SPDX-License-Identifier: Apache-2.0
"""How the cosine decay of natural-gradient optimizers goes with fit and with schedulers of Pyro and torch."""

import math
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

import pyro_dvi as dvi
from pyro_dvi.natural_gradients.ivon import IVON, IVONOptimizer
from pyro_dvi.natural_gradients.site_update import SiteUpdate
from pyro_dvi.natural_gradients.updates import OGN, VOGN, VOGNOptimizer
from pyro_dvi.training import EveryStep, fit

EPOCHS, BATCHES = 3, 2
STEPS = EPOCHS * BATCHES


class Model(pyro.nn.PyroModule):
    def __init__(self) -> None:
        super().__init__()
        self.w = pyro.nn.PyroSample(dist.Normal(0.0, 1.0))

    def forward(self, x: Tensor, y: Tensor) -> None:
        w = self.w
        with pyro.plate("data", 8, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(w * x, 1.0), obs=y)


X = torch.linspace(-1, 1, 8)
LOADER = [(X[::2], X[::2]), (X[1::2], X[1::2])]


@pytest.fixture
def rates(monkeypatch) -> list[float]:
    """What each step multiplied its direction with."""
    found: list[float] = []
    move_along = SiteUpdate.move_along

    def noted(step: SiteUpdate, *rest: Any) -> None:
        numbers = step.numbers
        found.append(numbers.length * numbers.inverse_bound * numbers.correction)
        move_along(step, *rest)

    monkeypatch.setattr(SiteUpdate, "move_along", noted)
    return found


def cosine(steps: int = STEPS) -> list[float]:
    return [0.5 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)]


def train_svi(optimizer: Any, epochs: int = EPOCHS, **options: Any) -> None:
    pyro.clear_param_store()
    model = Model()
    svi = SVI(model, dvi.NaturalGradientGuide(model), optimizer, loss=dvi.NaturalGradientELBO())
    options = {k: v(svi) for k, v in options.items()}
    fit(svi, LOADER, epochs, progress=False, **options)


def train_module(schedule: Any = None, **options: Any) -> None:
    with pyro.settings.context(module_local_params=True):
        model = Model()
        guide = dvi.NaturalGradientGuide(model)
        guide.initialize(*LOADER[0])
        module = dvi.NaturalGradientELBO()(model, guide)
        optimizer = VOGNOptimizer(module.parameters(), lr=0.1, warmup_steps=0, **options)
        scheduler = None if schedule is None else schedule(optimizer)
        fit(module, LOADER, EPOCHS, optimizer=optimizer, lr_schedule=scheduler, progress=False)


def test_alone_it_is_a_cosine_over_the_length_of_fit(rates):
    train_module()
    assert rates == pytest.approx([0.1 * c for c in cosine()])
    rates.clear()
    for optimizer in (VOGN, OGN, IVON):
        train_svi(optimizer({"lr": 0.1, "warmup_steps": 0}))
    assert rates == pytest.approx(3 * [0.1 * c for c in cosine()])


def test_it_rises_first_over_at_most_a_quarter_of_training(rates):
    train_svi(VOGN({"lr": 0.1, "total_steps": 12}))
    rise = [1 / 3, 2 / 3, 1, 1, 1, 1]
    assert rates == pytest.approx([0.1 * c * r for c, r in zip(cosine(12), rise, strict=False)])
    rates.clear()
    train_svi(pyro_scheduler(warmup_steps=2))  # whatever else steers it
    assert rates == pytest.approx([0.05, 0.1, 0.05, 0.05, 0.025, 0.025])


def test_the_temperature_rises_as_a_square_over_half_of_training(monkeypatch):
    found: list[float] = []
    move_along = SiteUpdate.move_along

    def noted(step: SiteUpdate, *rest: Any) -> None:
        found.append(step.kl_weight)
        move_along(step, *rest)

    monkeypatch.setattr(SiteUpdate, "move_along", noted)
    train_svi(VOGN({"total_steps": 8}))
    assert found == pytest.approx([1 / 16, 1 / 4, 9 / 16, 1, 1, 1])
    found.clear()
    train_svi(VOGN({"warmup_steps": 0}))
    assert found == [1] * STEPS


def test_an_own_length_comes_before_that_of_fit(rates):
    train_svi(VOGN({"lr": 0.1, "total_steps": 4, "warmup_steps": 0}))
    assert rates == pytest.approx([0.1 * c for c in cosine(4)] + [0.0] * 2)


def test_outside_of_fit_it_is_constant(rates):
    model = Model()
    svi = SVI(
        model,
        dvi.NaturalGradientGuide(model),
        VOGN({"lr": 0.1, "warmup_steps": 0}),
        loss=dvi.NaturalGradientELBO(),
    )
    for _ in range(3):
        svi.step(*LOADER[0])
    assert rates == [0.1] * 3


def pyro_scheduler(constructor: type = VOGNOptimizer, **options: Any) -> Any:
    options = {
        "optimizer": constructor,
        "optim_args": {"lr": 0.1, "warmup_steps": 0, **options},
        "gamma": 0.5,
    }
    return pyro.optim.ExponentialLR(options)


@pytest.mark.parametrize("constructor", [VOGNOptimizer, IVONOptimizer])
def test_a_scheduler_of_pyro_takes_its_place(rates, constructor):
    train_svi(pyro_scheduler(constructor))
    assert rates == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025, 0.025])
    rates.clear()
    train_svi(pyro_scheduler(constructor), lr_schedule=lambda svi: EveryStep(svi.optim))
    assert rates == pytest.approx([0.1 * 0.5**t for t in range(STEPS)])


def test_a_scheduler_and_an_own_length_multiply(rates):
    train_svi(pyro_scheduler(total_steps=STEPS))
    assert rates == pytest.approx([0.1 * c * 0.5 ** (t // BATCHES) for t, c in enumerate(cosine())])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (lambda o: ExponentialLR(o, 0.5), [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]),
        (lambda o: EveryStep(ExponentialLR(o, 0.5)), [0.1 * 0.5**t for t in range(STEPS)]),
        (lambda o: ReduceLROnPlateau(o), [0.1] * STEPS),
    ],
    ids=["epochs", "steps", "plateau"],
)
def test_a_scheduler_of_torch_takes_its_place(rates, schedule, expected):
    train_module(schedule)
    assert rates == pytest.approx(expected)


def test_options_by_the_name_of_the_parameter(rates):
    """As for any Pyro optimizer; clipping arguments as well."""

    def options(name: str) -> dict[str, Any]:
        return {"lr": {"NaturalGradientGuide.locs.w": 0.02}.get(name, 1.0)}

    train_svi(VOGN(options, {"clip_norm": 1.0}), epochs=1)
    assert rates == pytest.approx([0.02 * c for c in cosine(BATCHES)])
