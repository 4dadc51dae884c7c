# SPDX-License-Identifier: Apache-2.0
"""Stopping and going on, clipping, types and devices: what a user of Pyro's optimizers expects of them."""

import copy
from collections.abc import Iterator

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.optim import IVON, OGN, VOGN, IVONOptimizer, OGNOptimizer, VOGNOptimizer

N, M = 20, 8
OPTIMIZERS = [VOGN, OGN, IVON]
TORCH_OPTIMIZERS = [VOGNOptimizer, OGNOptimizer, IVONOptimizer]


class Net(pyro.nn.PyroModule):
    """A network with batch normalisation, which gets Adam steps."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)
        self.net = dvi.to_bayesian_(net, prior_scale=1.0)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        f = self.net(x)[:, 0]
        with pyro.plate("data", N, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def batches(
    count: int, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Iterator[tuple[Tensor, Tensor]]:
    """Full minibatches and ragged ones."""
    generator = torch.Generator().manual_seed(0)
    for t in range(count):
        x = torch.randn(M - 3 * (t % 3 == 2), 3, generator=generator).to(device, dtype)
        yield x, x.sum(1).sin()


def elbo(particles: int = 1) -> dvi.NaturalGradientELBO:
    schedule = dvi.schedules.CosineWarmup(6, start=0.1)
    return dvi.NaturalGradientELBO(kl_weight=schedule, num_particles=particles, num_data=N)


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
        dvi.training.routes.SVIRoute(svi).load_optimizer_state(saved[2])  # as dvi.load does
    else:
        svi.optim.set_state(saved[2])
        svi.loss.__self__.serve(
            svi.optim
        )  # the guide has not run yet, so its parameters are not in Pyro's store
    svi.model.load_state_dict(saved[0])
    svi.guide.load_state_dict(saved[1])
    svi.loss.__self__.load_state_dict(saved[3])
    torch.manual_seed(1)
    assert [svi.step(x, y) for x, y in data[4:]] == losses
    torch.testing.assert_close(dict(svi.guide.state_dict()), expected, rtol=0, atol=0)


def module_run(
    constructor: type, dtype: torch.dtype, device: torch.device | str = "cpu", stop: bool = False
) -> dict[str, Tensor]:
    """Parameters after eight steps of an ELBOModule, perhaps with a save and a load in the middle."""

    def started():
        model = Net(dtype).to(device)
        guide = dvi.NaturalGradientGuide(model)
        guide.initialize(*next(batches(1, dtype, device)))
        module = elbo(particles=2)(model, guide)
        return module, constructor(module.parameters(), lr=0.05)

    with pyro.settings.context(module_local_params=True):
        module, optimizer = started()
        torch.manual_seed(0)
        for t, (x, y) in enumerate(batches(8, dtype, device)):
            if stop and t == 4:
                saved = copy.deepcopy((module.state_dict(), optimizer.state_dict(), module.elbo.state_dict()))
                random = torch.get_rng_state()
                module, optimizer = started()
                for part, state in zip((module, optimizer, module.elbo), saved, strict=True):
                    part.load_state_dict(state)
                torch.set_rng_state(random)
            optimizer.zero_grad()
            module(x, y).backward()
            optimizer.step()
        return {name: value.detach() for name, value in module.named_parameters()}


@pytest.mark.parametrize("constructor", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_states_of_torch_optimizers_go_on_bit_by_bit(constructor, dtype):
    expected = module_run(constructor, dtype)
    assert {value.dtype for value in expected.values()} == {dtype}
    torch.testing.assert_close(module_run(constructor, dtype, stop=True), expected, rtol=0, atol=0)


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
        svi.loss.__self__.serve(svi.optim)
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
        svi.loss.__self__.serve(svi.optim)
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
    again.loss.__self__.load_state_dict(saved[3])
    torch.testing.assert_close(go_on(again), expected, rtol=1e-12, atol=1e-12)
