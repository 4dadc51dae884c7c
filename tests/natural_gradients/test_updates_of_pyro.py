# SPDX-License-Identifier: Apache-2.0
"""What users expect of Pyro's optimizers: states that go on, clipping, and parameters that change their type."""

import copy

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor

import pyro_dvi as dvi
from tests.natural_gradients.network import OPTIMIZERS, Net, batches, elbo


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("stepped", [False, True], ids=["into a new one", "into one that was used"])
def test_states_of_pyro_optimizers_go_on_bit_by_bit(optimizer, stepped):
    def started() -> SVI:
        pyro.clear_param_store()
        model = Net()
        return SVI(model, dvi.NaturalGradientGuide(model), optimizer({"lr": 0.05}), loss=elbo())

    data = list(batches(8))
    svi = started()
    for x, y in data[:4]:
        svi.step(x, y)
    saved = copy.deepcopy(
        (
            svi.model.state_dict(),
            svi.guide.state_dict(),
            svi.optim.get_state(),
            svi.loss.__self__.state_dict(),
        )
    )
    torch.manual_seed(1)
    losses = [svi.step(x, y) for x, y in data[4:]]
    expected = {k: v.clone() for k, v in svi.guide.state_dict().items()}

    svi = started()
    svi.guide.initialize(*data[0])
    if stepped:
        svi.step(*data[0])
        dvi.training.targets.SVIRoute(svi).load_optimizer_state(saved[2])  # as dvi.load does
    else:
        svi.optim.set_state(saved[2])
        svi.loss.__self__.prepare(
            svi.guide, svi.optim
        )  # the guide has not run yet, so its parameters are not in Pyro's store
    svi.model.load_state_dict(saved[0])
    svi.guide.load_state_dict(saved[1])
    svi.loss.__self__.load_state_dict(saved[3])
    torch.manual_seed(1)
    assert [svi.step(x, y) for x, y in data[4:]] == losses
    torch.testing.assert_close(dict(svi.guide.state_dict()), expected, rtol=0, atol=0)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_clipping_is_that_of_pyro(optimizer):
    """The gradient of the likelihood is clipped; a limit of almost nothing leaves the pull of the prior."""

    def moved(clip_args: dict[str, float] | None) -> float:
        pyro.clear_param_store()
        torch.manual_seed(0)
        model = Net()
        guide = dvi.NaturalGradientGuide(model)
        x, y = next(batches(1))
        guide.initialize(x, y)
        before = {name: value.clone() for name, value in guide.median().items()}
        svi = SVI(model, guide, optimizer({"lr": 0.05}, clip_args), loss=elbo())
        svi.loss.__self__.prepare(svi.guide, svi.optim)
        svi.step(x, y)
        return sum(float((value - before[name]).abs().sum()) for name, value in guide.median().items())

    plain = moved(None)
    assert moved({"clip_norm": 1e9}) == pytest.approx(plain)
    assert moved({"clip_norm": 1e-6}) < 0.5 * plain
    assert moved({"clip_value": 1e-6}) < 0.5 * plain


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_model_that_is_converted_in_training_takes_its_optimizer_along(optimizer):
    """As if its state had been loaded into an optimizer of the other type."""

    def started(dtype: torch.dtype) -> SVI:
        pyro.clear_param_store()
        model = Net(dtype)
        svi = SVI(model, dvi.NaturalGradientGuide(model), optimizer({"lr": 0.05}), loss=elbo())
        svi.loss.__self__.prepare(svi.guide, svi.optim)
        return svi

    def go_on(svi: SVI) -> dict[str, Tensor]:
        torch.manual_seed(1)
        for x, y in batches(3, torch.float64):
            svi.step(x, y)
        return {name: value.clone() for name, value in svi.guide.state_dict().items()}

    svi = started(torch.float32)
    for x, y in batches(4):
        svi.step(x, y)
    saved = copy.deepcopy(
        (
            svi.model.state_dict(),
            svi.guide.state_dict(),
            svi.optim.get_state(),
            svi.loss.__self__.state_dict(),
        )
    )
    svi.model.double()
    svi.guide.double()
    expected = go_on(svi)

    again = started(torch.float64)
    again.guide(*next(batches(1, torch.float64)))
    again.model.load_state_dict(saved[0])
    again.guide.load_state_dict(saved[1])
    again.optim.set_state(saved[2])
    again.loss.__self__.prepare(again.guide, again.optim)
    again.loss.__self__.load_state_dict(saved[3])
    torch.testing.assert_close(go_on(again), expected, rtol=1e-12, atol=1e-12)
