# SPDX-License-Identifier: Apache-2.0
"""Smooth models that polish brings to a minimum within its default budget, and what the budget counts."""

import re
from collections.abc import Callable
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.mcmc.util import initialize_model
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.errors import UnconvergedError
from pyro_dvi.laplace import LaplaceGuide

Model = Callable[..., Any]
QUIET = {"progress": False}
NUM_DATA = 60


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = 2 * torch.rand(NUM_DATA, 1, generator=generator, dtype=torch.float64) - 1
    noise = torch.randn(NUM_DATA, 1, generator=generator, dtype=torch.float64)
    return x, (3 * x).cos() + (0.05 + 0.2 * (x > 0)) * noise


def network(*layers: nn.Module, prior_scale: float = 1.0) -> nn.Module:
    return dvi.to_bayesian_(nn.Sequential(*layers).double(), prior_scale=prior_scale)


def heteroscedastic() -> Model:
    net = network(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 2))

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        mean, log_variance = net(x).split(1, -1)
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, (0.5 * log_variance).exp()).to_event(1), obs=y)

    return model


def latent_noise() -> Model:
    net = network(nn.Linear(1, 10), nn.Tanh(), nn.Linear(10, 1))

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        scale, mean = pyro.sample("scale", dist.HalfNormal(x.new_ones(()))), net(x)
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            return pyro.sample("y", dist.Normal(mean, scale).to_event(1), obs=y)

    return model


def wide_prior() -> Model:
    net = network(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1), prior_scale=10.0)
    return dvi.regressor(net, num_data=NUM_DATA, noise_scale=0.2)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + super().forward(x)
        return result


def residual() -> Model:
    block = Residual(nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh())
    net = network(nn.Linear(1, 6), nn.Tanh(), block, nn.Linear(6, 1))
    return dvi.regressor(net, num_data=NUM_DATA, noise_scale=0.2)


def normalised() -> Model:
    net = network(nn.Linear(1, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 1))
    return dvi.regressor(net, num_data=NUM_DATA, noise_scale=0.2)


def trained(
    build: Callable[[], Model], steps: int = 300
) -> tuple[Model, LaplaceGuide, list[tuple[Tensor, Tensor]]]:
    torch.manual_seed(0)
    pyro.clear_param_store()
    model = build()
    guide, batch = LaplaceGuide(model), data()
    svi = pyro.infer.SVI(model, guide, dvi.optim.Adam({"lr": 0.02}), pyro.infer.Trace_ELBO())
    for _ in range(steps):
        svi.step(*batch)
    return model, guide, [batch]


@pytest.mark.every(4)
@pytest.mark.parametrize("build", [heteroscedastic, latent_noise, wide_prior, residual])
def test_smooth_models_reach_a_minimum_of_the_potential_energy(build):
    model, guide, batches = trained(build)
    report = guide.polish(batches, **QUIET)
    assert report.converged and report.newton_decrement <= 1e-2 and report.gradients < 10_000
    # Pyro's own potential energy, in the unconstrained space of its HMC.
    potential, mode = initialize_model(model, batches[0])[1], guide.unconstrained_mode()
    names = list(mode)
    sizes = [mode[name].numel() for name in names]

    def energy(flat: Tensor) -> Tensor:
        parts = zip(names, flat.split(sizes), strict=True)
        value: Tensor = potential({name: part.reshape(mode[name].shape) for name, part in parts})
        return value

    flat = torch.cat([mode[name].flatten() for name in names])
    gradient = torch.autograd.functional.jacobian(energy, flat).detach()
    exact = torch.autograd.functional.hessian(energy, flat).detach()
    assert float(torch.linalg.eigvalsh(exact)[0]) > 0
    assert float(gradient @ torch.linalg.solve(exact, gradient)) <= 1e-6
    assert report.value == pytest.approx(float(energy(flat).detach()), rel=1e-9)


def test_a_search_without_a_minimum_advises_networks_with_normalisation():
    _, guide, batches = trained(normalised, 30)
    with pytest.raises(UnconvergedError) as caught:
        guide.polish(batches, max_gradients=5, **QUIET)
    assert re.search(r"more max_gradients.*normalisation layers, GGN\(\)", str(caught.value).splitlines()[-1])


@pytest.mark.slow
def test_scales_before_a_normalisation_do_not_prevent_a_minimum():
    """The constant that a normalisation adds to the variance gives U a minimum where the weights are small."""
    net = nn.Sequential(nn.Linear(1, 3), nn.LayerNorm(3, eps=0.1), nn.Tanh(), nn.Linear(3, 1))
    _, guide, batches = trained(lambda: dvi.regressor(network(*net), num_data=NUM_DATA, noise_scale=0.5))
    assert guide.polish(batches, **QUIET).converged


class Quartic(dist.TorchDistribution):
    """A density that cannot be drawn from."""

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012 (as in torch)
    support = dist.constraints.real

    def __init__(self, loc: Tensor) -> None:
        self.loc = loc
        super().__init__(loc.shape, validate_args=False)

    def log_prob(self, value: Tensor) -> Tensor:
        return -(value - self.loc).square() - 0.1 * (value - self.loc) ** 4

    def expand(self, batch_shape: Any, _instance: Any = None) -> "Quartic":
        return Quartic(self.loc.expand(batch_shape))


@pytest.mark.filterwarnings("ignore:the Fisher information:pyro_dvi.errors.DviWarning")
def test_a_spent_budget_is_reported_where_labels_cannot_be_drawn():
    def model(x: Tensor, y: Tensor | None = None) -> None:
        hidden = pyro.sample("hidden", dist.Normal(torch.zeros(10, 3), 1.0).to_event(2))
        last = pyro.sample("last", dist.Normal(torch.zeros(10), 1.0).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", Quartic(torch.tanh(x @ hidden.mT) @ last), obs=y)

    torch.manual_seed(0)
    batches = [(torch.randn(30, 3), torch.randn(30))]
    guide = LaplaceGuide(model)
    guide.initialize(*batches[0])
    with pytest.raises(UnconvergedError, match="5 gradients were not enough"):
        guide.polish(batches, max_gradients=5, progress=False)
