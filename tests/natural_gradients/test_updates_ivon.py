# SPDX-License-Identifier: Apache-2.0
"""IVON against its equations in NumPy, step by step, and training that changes from VOGN to IVON and back."""

import math

import numpy as np
import pytest
from pyro.infer import SVI

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
