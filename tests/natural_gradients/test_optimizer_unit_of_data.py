# SPDX-License-Identifier: Apache-2.0
"""The number of data is a unit: padding, class weights and a falling temperature leave the posterior right."""

import copy

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
import torch.nn.functional as F
from pyro.infer import SVI
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.natural_gradients.estimates import Estimate, NoiseProducts, Squares
from pyro_dvi.natural_gradients.ivon import IVON
from pyro_dvi.natural_gradients.updates import OGN, VOGN

N, D, LENGTH = 20, 3, 4


pytestmark = pytest.mark.usefixtures("double")


def sequences() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, LENGTH, D, generator=generator)
    return x, (x @ torch.tensor([1.0, -1.0, 0.5]) > 0).long()


def padded_model(x: Tensor, y: Tensor) -> None:
    """Each position of a sequence is an observation; those beyond the end are masked."""
    w = pyro.sample("w", dist.Normal(torch.zeros(D, 2), 1.0).to_event(2))
    mask = torch.arange(x.shape[1]) < LENGTH
    with pyro.plate("position", x.shape[1], dim=-1), pyro.plate("data", N, dim=-2), poutine.mask(mask=mask):
        pyro.sample("y", dist.Categorical(logits=x @ w), obs=y)


def padded(length: int) -> tuple[Tensor, Tensor]:
    x, y = sequences()
    return F.pad(x, (0, 0, 0, length - LENGTH)), F.pad(y, (0, length - LENGTH))


@pytest.mark.every(2)
@pytest.mark.filterwarnings("ignore:observed site 'y' has the batch shape")  # positions cost passes
@pytest.mark.parametrize("optimizer", [VOGN, OGN, IVON])
def test_padding_changes_nothing(optimizer):
    def trained(lengths: list[int], stop: bool = False) -> Tensor:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)

        def started() -> SVI:
            guide = dvi.NaturalGradientGuide(padded_model)
            guide.initialize(*padded(LENGTH))
            step = optimizer({"betas": (0.9, 0.9), "warmup_steps": 4})
            elbo = dvi.NaturalGradientELBO()
            elbo.prepare(guide, step)
            return SVI(padded_model, guide, step, loss=elbo)

        svi = started()
        for t, length in enumerate(lengths):
            if stop and t == len(lengths) // 2 + 1:
                saved = copy.deepcopy((svi.guide.state_dict(), svi.optim.get_state()))
                random = torch.get_rng_state()
                pyro.clear_param_store()
                svi = started()
                svi.guide.load_state_dict(saved[0])
                svi.optim.set_state(saved[1])
                svi.loss.__self__.prepare(svi.guide, svi.optim)
                torch.set_rng_state(random)
            svi.step(*padded(length))
        return torch.stack([svi.guide.locs.w.detach(), svi.guide.precisions.w.detach()])

    steps = 10
    expected = trained([LENGTH] * steps)
    for lengths in ([3 * LENGTH, LENGTH] * (steps // 2), [LENGTH, 5 * LENGTH] * (steps // 2)):
        torch.testing.assert_close(trained(lengths), expected)
        torch.testing.assert_close(trained(lengths, stop=True), expected)


def regression(x: Tensor, y: Tensor, size: int | None = None) -> None:
    w = pyro.sample("w", dist.Normal(torch.zeros(D), 1.0).to_event(1))
    with pyro.plate("data", size or len(x), subsample_size=len(x)):
        pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)


def cosines(x: Tensor, y: Tensor) -> None:
    """The curvature of its likelihood is negative where the cosine is at its top."""
    w = pyro.sample("w", dist.Normal(torch.zeros(5), 1.0).to_event(1))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(torch.cos(2 * x @ w), 2.0), obs=y)


def lower_temperature(step: int) -> float:
    return 1.0 if step < 60 else 0.1


@pytest.mark.every(4)
@pytest.mark.parametrize("seed", range(4))
def test_precisions_of_ivon_stay_positive_where_the_temperature_falls(seed):
    x, y = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)), torch.arange(30.0) % 2
    pyro.set_rng_seed(seed)
    guide = dvi.NaturalGradientGuide(cosines)
    optimizer = IVON({"betas": (0.9, 0.9), "initial_curvature": 0.05, "lr": 0.003})
    svi = SVI(cosines, guide, optimizer, loss=dvi.NaturalGradientELBO(kl_weight=lower_temperature))
    for _ in range(75):
        svi.step(x, y)
        assert guide.precisions.w.min() > 0.05


# What is measured ----------------------------------------------------------------------------------------------


def measured(optimizer, told: bool) -> Estimate:
    """What the first step measures."""
    pyro.clear_param_store()
    guide = dvi.NaturalGradientGuide(regression)
    x = torch.randn(8, D)
    guide.initialize(x, x.sum(1))
    elbo = dvi.NaturalGradientELBO()
    if told:
        elbo.prepare(guide, optimizer)
    elbo.loss_and_grads(regression, guide, x, x.sum(1))
    assert guide.precisions.w.grad is not None
    return guide.natural_step.measured


def test_the_first_step_measures_what_the_optimizer_needs():
    assert measured(VOGN({}), told=True) == Squares()
    assert measured(OGN({}), told=True) == Squares(at_mean=True)
    assert measured(IVON({}), told=True) == Squares()
    assert measured(IVON({"initial_curvature": 0.1}), told=True) == NoiseProducts()
    schedule = pyro.optim.ExponentialLR(
        {"optimizer": dvi.natural_gradients.OGNOptimizer, "optim_args": {}, "gamma": 0.9}
    )
    assert measured(schedule, told=True) == Squares(at_mean=True)
    assert measured(IVON({"initial_curvature": 0.1}), told=False) == Squares()


@pytest.mark.parametrize("told", [False, True])
def test_ogn_is_deterministic_from_the_first_step(told):
    x = torch.randn(20, D)
    results = []
    for seed in range(2):
        pyro.clear_param_store()
        guide = dvi.NaturalGradientGuide(regression, init_loc_fn=pyro.infer.autoguide.init_to_mean)
        optimizer, elbo = OGN({}), dvi.NaturalGradientELBO()
        if told:
            elbo.prepare(guide, optimizer)
        svi = SVI(regression, guide, optimizer, loss=elbo)
        pyro.set_rng_seed(seed)
        for _ in range(3):
            svi.step(x, x.sum(1))
        results.append(torch.stack([guide.locs.w.detach(), guide.precisions.w.detach()]))
        moves = optimizer.get_state()[next(iter(optimizer.get_state()))]
        assert moves["state"][0]["step"] == (3 if told else 2)
    torch.testing.assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("before", [IVON, OGN])
def test_an_objective_that_was_used_measures_for_the_next_guide_as_a_new_one(before):
    x = torch.randn(20, D)

    def trained(optimizer, elbo) -> Tensor:
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = dvi.NaturalGradientGuide(regression)
        svi = SVI(regression, guide, optimizer({}), loss=elbo)
        for _ in range(3):
            svi.step(x, x.sum(1))
        return guide.precisions.w.detach().clone()

    expected = trained(VOGN, dvi.NaturalGradientELBO())
    elbo = dvi.NaturalGradientELBO()
    trained(before, elbo)
    torch.testing.assert_close(trained(VOGN, elbo), expected, rtol=0, atol=0)
