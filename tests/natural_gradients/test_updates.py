# SPDX-License-Identifier: Apache-2.0
"""VOGN and OGN against their equations in NumPy, step by step; options that cannot be."""

import math
from dataclasses import dataclass

import numpy as np
import pyro
import pytest
import torch
from pyro.infer import SVI

from pyro_dvi.errors import ArgumentError
from pyro_dvi.natural_gradients import AsPrinted
from pyro_dvi.natural_gradients.drawn_run import Measurement
from pyro_dvi.natural_gradients.estimates import Estimate
from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import OGN, VOGN, Consistent, VOGNOptimizer
from tests.natural_gradients.reference import OPTIONS, PRIORS, SETTINGS, N, data, model, run, state

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.every(3)
@pytest.mark.parametrize("tau", [1.0, 0.1])
@pytest.mark.parametrize("particles", [1, 3])
def test_vogn_is_its_equations(tau, particles):
    def step(reference, x, y, noises, t):
        reference.vogn(x, y, noises, tau=tau, **SETTINGS)

    run(VOGN(OPTIONS), step, tau=tau, particles=particles)


@pytest.mark.every(3)
@pytest.mark.parametrize("tau", [1.0, 0.1])
@pytest.mark.parametrize(
    "particles, start, batches", [(1, AsPrinted(), 1), (3, AsPrinted(initial_batches=4), 4)]
)
def test_as_printed_is_algorithm_1_with_its_first_draws(tau, particles, start, batches):
    """Without a further option but those that the algorithm has itself; it starts by one minibatch."""

    def step(reference, x, y, noises, t):
        reference.vogn(x, y, noises, tau=tau, printed=batches, **SETTINGS)

    options = {k: v for k, v in OPTIONS.items() if k not in ("warmup_steps", "max_step")}
    optimizer = VOGN({**options, "formulation": start})
    optimizer.set_total_steps(25)  # as fit does: the rate stays
    run(optimizer, step, tau=tau, particles=particles)


@pytest.mark.parametrize("forgetting", [0.0, 0.7])
def test_how_fast_curvature_is_forgotten_early(forgetting):
    def step(reference, x, y, noises, t):
        reference.vogn(x, y, noises, tau=0.5, forgetting=forgetting, **SETTINGS)

    run(VOGN({**OPTIONS, "formulation": Consistent(forgetting)}), step, tau=0.5, steps=15)


def test_a_given_curvature_is_forgotten_at_the_final_rate_only():
    def step(reference, x, y, noises, t):
        if t == 0:
            reference.s = np.full(3, 0.2)
        reference.vogn(x, y, noises, tau=0.5, forgetting=None, **SETTINGS)

    run(VOGN({**OPTIONS, "initial_curvature": 0.2}), step, tau=0.5, steps=10)


def test_learning_rate_and_temperature_rise_over_the_first_steps():
    def step(reference, x, y, noises, t):
        rise = min(1, (t + 1) / 8)
        reference.vogn(x, y, noises, tau=0.5 * rise, **{**SETTINGS, "lr": rise * SETTINGS["lr"]})

    run(VOGN({**OPTIONS, "warmup_steps": 8}), step, tau=0.5, steps=20)


@pytest.mark.parametrize("radius", [1.0, 3.0])
def test_a_step_is_bounded_in_units_of_the_first_means(radius):
    bounded = []

    def step(reference, x, y, noises, t):
        before = reference.loc
        reference.vogn(x, y, noises, tau=0.5, radius=radius, **SETTINGS)
        length = np.abs(reference.loc - before) / reference.unit / (radius * SETTINGS["lr"])
        bounded.append(length > 1 - 1e-6)

    run(VOGN({**OPTIONS, "max_step": radius * SETTINGS["lr"]}), step, tau=0.5, steps=20)
    assert 0 < np.mean(bounded) < 1  # of some weights in some steps


def test_ogn_measures_at_the_mean():
    def step(reference, x, y, noises, t):
        reference.vogn(x, y, [np.zeros(3)], tau=0.5, **SETTINGS)

    run(OGN(OPTIONS), step, tau=0.5)


def test_both_formulations_agree_at_temperature_one_but_for_the_length_of_the_step():
    x, y = data()
    results = []
    for formulation in (AsPrinted(), Consistent()):
        pyro.clear_param_store()
        torch.manual_seed(1)
        guide, elbo = NaturalGradientGuide(model), NaturalGradientELBO()
        # With a curvature to start from both forget at the same rate.
        options = {"lr": 0.1, "betas": (0.0, 0.9), "initial_curvature": 0.2, "formulation": formulation}
        optimizer = VOGN({**options, "warmup_steps": 0, "max_step": None})
        elbo.prepare(guide, optimizer)
        svi = SVI(model, guide, optimizer, loss=elbo)
        if isinstance(formulation, AsPrinted):
            svi.step(x, y)  # sets the precision of the first draws
            start = [guide.precision_parameter(name).detach().clone() for name in "wb"]
        else:
            guide.initialize(x, y)
            for name, precision in zip("wb", start, strict=True):
                guide.precision_parameter(name).data.copy_(precision)
        torch.manual_seed(0)
        for _ in range(30):
            svi.step(x, y)
        results.append(np.concatenate(state(guide)))
    np.testing.assert_allclose(*results, rtol=1e-8)


@dataclass(frozen=True)
class OfMinibatch(Estimate):
    """The squared gradient of the minibatch, as a user would write it."""

    at_mean: bool = True

    def curvature(self, measurement: Measurement, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.square() / N


def test_an_estimate_of_a_user_gives_the_curvature():
    x, y = data()
    guide, elbo = NaturalGradientGuide(model), NaturalGradientELBO(num_data=N)
    optimizer = VOGN({"warmup_steps": 0, "estimate": OfMinibatch()})
    elbo.prepare(guide, optimizer)
    elbo.loss_and_grads(model, guide, x, y)
    expected = guide.locs.w_unconstrained.grad.square() / N
    torch.testing.assert_close(guide.precision_parameter("w").grad, expected)
    optimizer([*guide.parameters()])
    prior = PRIORS["w"][1] ** -2
    torch.testing.assert_close(guide.precision_parameter("w").detach(), expected + prior)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": 0.0},
        {"betas": (1.0, 0.9)},
        {"damping": -1.0},
        {"data_augmentation": 0},
        {"initial_curvature": -1.0},
        {"total_steps": 0},
        {"deterministic_lr": float("nan")},
    ],
    ids=str,
)
def test_options_out_of_range(options):
    with pytest.raises(ArgumentError, match=next(iter(options))):
        VOGNOptimizer([torch.zeros(1, requires_grad=True)], **options)


@pytest.mark.parametrize("forgetting", [-0.5, math.inf, math.nan])
def test_forgetting_out_of_range(forgetting):
    with pytest.raises(ArgumentError, match="forgetting"):
        Consistent(forgetting)


def test_options_of_the_wrong_type():
    with pytest.raises(ArgumentError, match="Consistent"):
        VOGNOptimizer([torch.zeros(1, requires_grad=True)], formulation="printed")
    with pytest.raises(ArgumentError, match="VOGN"):
        VOGN(0.1)
