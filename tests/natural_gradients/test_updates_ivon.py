# SPDX-License-Identifier: Apache-2.0
"""IVON against its equations in NumPy, step by step, and training that changes from VOGN to IVON and back."""

import math

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.natural_gradients import AsPrinted
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.natural_elbo import NaturalGradientELBO
from pyro_dvi.natural_gradients.precision_guide import NaturalGradientGuide
from pyro_dvi.natural_gradients.updates import OGN, VOGN, Consistent
from tests.natural_gradients.reference import OPTIONS, SETTINGS, data, model, run, state

pytestmark = pytest.mark.usefixtures("double")


def test_a_step_of_ivon_is_bounded_in_units_of_the_first_means():
    settings = {k: v for k, v in SETTINGS.items() if k != "damping"}

    def step(reference, x, y, noises, t):
        reference.ivon(x, y, noises[0], tau=0.5, radius=0.05, **settings)

    run(
        IVON({k: v for k, v in OPTIONS.items() if k != "damping"} | {"max_step": 0.05 * SETTINGS["lr"]}),
        step,
        tau=0.5,
    )


def test_ivon_is_its_equations():
    settings = {k: v for k, v in SETTINGS.items() if k != "damping"}

    def step(reference, x, y, noises, t):
        reference.ivon(x, y, noises[0], tau=0.5, **settings)

    run(IVON({k: v for k, v in OPTIONS.items() if k != "damping"}), step, tau=0.5)


def test_the_default_memory_grows_with_training():
    settings = {k: v for k, v in SETTINGS.items() if k not in ("damping", "betas")}

    def step(reference, x, y, noises, t):
        betas = (0.9, 1 - 1 / (10 + (reference.t + 1) / 10))
        reference.ivon(x, y, noises[0], tau=0.5, betas=betas, **settings)

    run(IVON({k: v for k, v in OPTIONS.items() if k not in ("damping", "betas")}), step, tau=0.5)


def spreads(steps, seed, by=dvi.IVON):
    r"""Standard deviations in units of the optimal ones, whose precision is :math:`\sum_i x_{ij}^2 / 0.25 + 1`.

    40 posteriors are trained as rows of one weight.
    """
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(100, 3, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.5 * torch.randn(100, generator=generator)

    def regression(x, y):
        w = pyro.sample("w", dist.Normal(0.0, 1.0).expand([40, 3]).to_event(2))
        with pyro.plate("data", 100, subsample_size=len(x)):
            pyro.sample("y", dist.Normal(F.linear(x, w), 0.5).to_event(1), obs=y[:, None].expand(-1, 40))

    loader, method = DataLoader(TensorDataset(x, y), 20, shuffle=True), dvi.NaturalGradients(by=by)
    posterior = method.fit(regression, loader, epochs=steps // 5, seed=seed, progress=False)
    return (posterior.guide.precisions.w.detach() / (x.square().sum(0) / 0.25 + 1)).rsqrt().flatten()


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 5))])
@pytest.mark.parametrize(
    "steps, most", [(400, 0.3), *(pytest.param(n, 0.2, marks=pytest.mark.soak) for n in (1600, 6400))]
)
def test_short_trainings_find_the_spread_of_a_linear_regression(steps, most, seed):
    ratio = spreads(steps, seed)
    assert abs(ratio.median() - 1) < 0.1
    low, high = ratio.quantile(torch.tensor([0.025, 0.975]).to(ratio))
    assert 1 - most < low and high < 1 + most


def test_a_memory_longer_than_training_makes_posteriors_too_narrow():
    assert spreads(400, 0, lambda options: dvi.IVON(options | {"betas": (0.9, 0.999)})).median() < 0.4


def test_training_may_change_to_ivon():
    x, y = data()
    guide, elbo = NaturalGradientGuide(model), NaturalGradientELBO()
    SVI(model, guide, VOGN({}), loss=elbo).step(x, y)
    svi = SVI(model, guide, IVON({}), loss=elbo)
    losses = [svi.step(x, y) for _ in range(3)]
    assert all(math.isfinite(loss) for loss in losses)
    assert (state(guide)[1] > 0).all()


@pytest.mark.parametrize("last", [VOGN, OGN])
@pytest.mark.parametrize("formulation", [Consistent(), AsPrinted()], ids=lambda f: type(f).__name__)
def test_training_may_change_from_ivon(last, formulation):
    """The first step only tells the objective what to measure; the curvature then begins anew."""
    x, y = data()
    guide, elbo = NaturalGradientGuide(model), NaturalGradientELBO(kl_weight=0.5)
    svi = SVI(model, guide, IVON({"lr": 0.05}), loss=elbo)
    for _ in range(20):
        svi.step(x, y)
    before = state(guide)[1]
    svi = SVI(model, guide, last({"lr": 0.05, "formulation": formulation}), loss=elbo)
    svi.step(x, y)
    if isinstance(formulation, Consistent):
        np.testing.assert_allclose(state(guide)[1], before, rtol=1e-10)
    losses = [svi.step(x, y) for _ in range(3)]
    assert all(math.isfinite(loss) for loss in losses)
    assert not np.allclose(state(guide)[1], before)
