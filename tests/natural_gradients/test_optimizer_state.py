# SPDX-License-Identifier: Apache-2.0
"""Torch optimizers stop and go on, in every type and on every device."""

import copy

import pyro
import pytest
import torch
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.errors import CheckpointError
from pyro_dvi.natural_gradients.updates import OGNOptimizer
from tests.natural_gradients.network import TORCH_OPTIMIZERS, Net, batches, elbo


def module_run(
    constructor: type, dtype: torch.dtype, device: torch.device | str = "cpu", stop: bool | str = False
) -> dict[str, Tensor]:
    """Parameters after eight steps of an ELBOModule, perhaps with a save and a load, or a copy, in the middle."""

    def started():
        model = Net(dtype).to(device)
        guide = dvi.NaturalGradientGuide(model)
        guide.initialize(*next(batches(1, dtype, device)))
        module = elbo(particles=2)(model, guide)
        optimizer = constructor(module.parameters(), lr=0.05)
        optimizer.set_total_steps(10)
        return module, optimizer

    with pyro.settings.context(module_local_params=True):
        module, optimizer = started()
        torch.manual_seed(0)
        for t, (x, y) in enumerate(batches(8, dtype, device)):
            if stop == "copied" and t == 4:
                module, optimizer = copy.deepcopy((module, optimizer))
            elif stop and t == 4:
                saved = copy.deepcopy((module.state_dict(), optimizer.state_dict(), module.elbo.state_dict()))
                random = torch.get_rng_state()
                module, optimizer = started()
                for part, state in zip((module, optimizer, module.elbo), saved, strict=True):
                    part.load_state_dict(state)
                assert module.elbo.state_dict() == saved[2]
                module.elbo.prepare(module.guide, optimizer)
                torch.set_rng_state(random)
            optimizer.zero_grad()
            module(x, y).backward()
            optimizer.step()
        return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.every(5)
@pytest.mark.parametrize("constructor", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stop", [True, "copied"])
def test_states_of_torch_optimizers_go_on_bit_by_bit(constructor, dtype, stop):
    expected = module_run(constructor, dtype)
    assert {value.dtype for value in expected.values()} == {dtype}
    torch.testing.assert_close(module_run(constructor, dtype, stop=stop), expected, rtol=0, atol=0)


@pytest.mark.every(2)
@pytest.mark.parametrize("constructor", TORCH_OPTIMIZERS)
def test_states_go_on_bit_by_bit_on_a_device(constructor, device):
    def run(stop: bool) -> dict[str, Tensor]:
        torch.manual_seed(0)
        return module_run(constructor, torch.float64, device, stop)

    expected = run(False)
    assert {value.device for value in expected.values()} == {device}
    assert all(torch.isfinite(value).all() for value in expected.values())


@pytest.mark.parametrize("moved", [0, 2], ids=["from the start", "moved in training"])
def test_steps_at_the_mean_are_those_of_the_processor(device, moved):
    """OGN draws nothing."""

    def last(target: torch.device) -> dict[str, Tensor]:
        device = torch.device("cpu") if moved else target
        with pyro.settings.context(module_local_params=True):
            model = Net(torch.float64).to(device)
            guide = dvi.NaturalGradientGuide(model)
            guide.initialize(*next(batches(1, torch.float64, device)))
            objective = elbo()
            module = objective(model, guide)
            optimizer = OGNOptimizer(module.parameters(), lr=0.05)
            for t, (x, y) in enumerate(batches(5, torch.float64, target)):
                if t == moved:
                    module.to(target)
                device = target if t >= moved else device
                optimizer.zero_grad()
                module(x.to(device), y.to(device)).backward()
                optimizer.step()
            return {name: value.detach().cpu() for name, value in module.named_parameters()}

    torch.testing.assert_close(last(device), last(torch.device("cpu")), rtol=1e-9, atol=1e-10)


def test_a_state_of_another_version_is_refused():
    model = Net(torch.float64)
    guide = dvi.NaturalGradientGuide(model)
    x, y = next(batches(1, torch.float64))
    svi = pyro.infer.SVI(model, guide, dvi.VOGN({}), elbo())
    svi.step(x, y)
    for one in svi.optim.optim_objs.values():
        for memory in one.state.values():
            memory.pop("unit", None)
    with pytest.raises(CheckpointError, match="another version"):
        svi.step(x, y)


@pytest.mark.slow
@pytest.mark.parametrize("start", [0.0, 1e-8, 1e-2, 0.3])
def test_means_that_start_close_to_each_other_are_not_held_back(start):
    """A linear regression whose means start at ``start`` times (1, -1, 1), and end at the same place."""
    x = torch.randn(200, 3, generator=torch.Generator().manual_seed(0))
    truth = torch.tensor([1.0, -2.0, 0.5])

    def model(x, y=None):
        w = pyro.sample("w", pyro.distributions.Normal(torch.zeros(3), 1.0).to_event(1))
        with pyro.plate("data", 200):
            return pyro.sample("y", pyro.distributions.Normal(x @ w, 0.1), obs=y)

    pyro.set_rng_seed(0)
    values = {"w": start * torch.tensor([1.0, -1.0, 1.0])}
    guide = dvi.NaturalGradientGuide(model, init_loc_fn=pyro.infer.autoguide.init_to_value(values=values))
    svi = pyro.infer.SVI(model, guide, dvi.VOGN({}), dvi.NaturalGradientELBO())
    dvi.fit(svi, [(x, x @ truth)], 1000, progress=False)
    torch.testing.assert_close(guide.median()["w"], truth, rtol=0, atol=0.05)
