# SPDX-License-Identifier: Apache-2.0
"""Torch optimizers stop and go on, in every type and on every device."""

import copy

import pyro
import pytest
import torch
from torch import Tensor

import pyro_dvi as dvi
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


@pytest.mark.parametrize("constructor", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("stop", [True, "copied"])
def test_states_of_torch_optimizers_go_on_bit_by_bit(constructor, dtype, stop):
    expected = module_run(constructor, dtype)
    assert {value.dtype for value in expected.values()} == {dtype}
    torch.testing.assert_close(module_run(constructor, dtype, stop=stop), expected, rtol=0, atol=0)


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
