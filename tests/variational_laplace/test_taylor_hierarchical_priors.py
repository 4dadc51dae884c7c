# SPDX-License-Identifier: Apache-2.0
"""Latents that set the prior of others, against a long Monte-Carlo ELBO where the Taylor expansion is exact."""

from collections.abc import Callable

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal, AutoGuideList, AutoNormal
from torch import Tensor

import pyro_dvi as dvi
from pyro_dvi.bayesian import HierarchicalScale
from pyro_dvi.curvature import GGNDiagonal
from pyro_dvi.errors import GuideError
from pyro_dvi.guides import MeanFieldGuide
from pyro_dvi.variational_laplace.taylor import TaylorELBO

X = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
Y = X @ torch.tensor([1.0, -1, 0.5], dtype=torch.float64)


def zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


def observe(w: Tensor) -> None:
    with pyro.plate("data", len(X)):
        pyro.sample("y", dist.Normal(X @ w, 0.5), obs=Y)


def log_normal_scale() -> None:
    s = pyro.sample("s", dist.LogNormal(zero(), 0.5))
    observe(pyro.sample("w", dist.Normal(zero(), s).expand([3]).to_event(1)))


def half_cauchy_scale() -> None:
    s = pyro.sample("s", dist.HalfCauchy(zero() + 1))
    observe(pyro.sample("w", dist.Normal(zero(), s).expand([3]).to_event(1)))


def precision() -> None:
    tau = pyro.sample("tau", dist.Gamma(zero() + 2, zero() + 1))
    observe(pyro.sample("w", dist.Normal(zero(), tau.rsqrt()).expand([3]).to_event(1)))


def mean_and_scale_per_weight() -> None:
    m = pyro.sample("m", dist.Normal(zero(), 1.0))
    s = pyro.sample("s", dist.LogNormal(torch.zeros(3, dtype=torch.float64), 0.5).to_event(1))
    observe(pyro.sample("w", dist.Normal(m, s).to_event(1)))


def three_levels() -> None:
    t = pyro.sample("t", dist.LogNormal(zero(), 0.3))
    s = pyro.sample("s", dist.LogNormal(zero(), t))
    observe(pyro.sample("w", dist.Normal(zero(), s).expand([3]).to_event(1)))


def laplace_weights() -> None:
    s = pyro.sample("s", dist.LogNormal(zero(), 0.5))
    observe(pyro.sample("w", dist.StudentT(5.0, zero(), s).expand([3]).to_event(1)))


MODELS = [
    log_normal_scale,
    half_cauchy_scale,
    precision,
    mean_and_scale_per_weight,
    three_levels,
    laplace_weights,
]
GUIDES: list[Callable] = [MeanFieldGuide, AutoNormal, AutoDiagonalNormal]


def random_start(guide: Callable) -> None:
    guide()
    with torch.no_grad():
        for name, parameter in pyro.get_param_store().named_parameters():
            centre = -1.0 if "scale" in name else 0.0
            parameter.copy_(centre + 0.4 * torch.randn_like(parameter))


@pytest.mark.every(5)
@pytest.mark.parametrize("make", GUIDES, ids=lambda g: g.__name__)
@pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)
def test_expectation_is_that_of_the_monte_carlo_elbo(model, make):
    """Two-sample z-test at 4: false alarm about once in 16,000 seeds and row."""
    guide = make(model)
    random_start(guide)
    exact = Trace_ELBO()
    with torch.no_grad():
        long = torch.tensor([exact.loss(model, guide) for _ in range(120)], dtype=torch.float64)
    elbo = TaylorELBO(curvature=GGNDiagonal())
    ours = torch.tensor([elbo.loss(model, guide) for _ in range(30)], dtype=torch.float64)
    z = (ours.mean() - long.mean()) / (ours.var() / len(ours) + long.var() / len(long)).sqrt()
    assert abs(z) < 4
    assert ours.std() < long.std(), "only the parents should be sampled"


@pytest.mark.slow
def test_particles_average_the_sampled_parents():
    guide = MeanFieldGuide(log_normal_scale)
    random_start(guide)
    deviations = []
    for particles in (1, 9):
        elbo = TaylorELBO(num_particles=particles)
        values = []
        for _ in range(30):
            elbo.loss(log_normal_scale, guide)
            values.append(elbo.terms["kl"])
        deviations.append(torch.stack(values).std())
    assert deviations[1] < deviations[0] / 1.8


@pytest.mark.slow
def test_the_scale_of_a_thousand_weights_stays_tight():
    """Fixed at its mean, the scale's posterior would relax to its prior (variance 1); truly it is about 1/2000."""
    torch.manual_seed(0)
    size = 1000

    def model() -> None:
        log_s = pyro.sample("log_s", dist.Normal(zero(), 1.0))
        w = pyro.sample("w", dist.Normal(zero(), log_s.exp()).expand([size]).to_event(1))
        pyro.sample("y", dist.Normal(w, 0.1).to_event(1), obs=observed)

    observed = 0.5 * torch.randn(size, dtype=torch.float64)
    guide = MeanFieldGuide(model)
    optimizer = pyro.optim.ExponentialLR(
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.1}, "gamma": 0.98}
    )
    svi = SVI(model, guide, optimizer, loss=TaylorELBO())
    for _ in range(200):
        svi.step()
        optimizer.step()
    variance = guide.scales.log_s.item() ** 2
    assert 0.3 / (2 * size) < variance < 3 / (2 * size)
    assert guide.locs.log_s.item() == pytest.approx(torch.tensor(0.5).log().item(), abs=0.1)


@pytest.mark.parametrize("model", [log_normal_scale, half_cauchy_scale, precision, three_levels])
def test_map_of_a_centred_scale_is_refused(model):
    with pytest.raises(
        GuideError, match=r"point estimates of '.*' and '.*' is unbounded.*MeanFieldGuide.*non-centred"
    ):
        TaylorELBO().loss(model, AutoDelta(model))


def test_map_of_a_hierarchical_mean_or_a_non_centred_scale_is_fine():
    def mean() -> None:
        m = pyro.sample("m", dist.Normal(zero(), 1.0))
        observe(pyro.sample("w", dist.Normal(m, 0.5).expand([3]).to_event(1)))

    def non_centred() -> None:
        s = pyro.sample("s", dist.LogNormal(zero(), 0.5))
        observe(s * pyro.sample("w", dist.Normal(zero(), 1.0).expand([3]).to_event(1)))

    for model in (mean, non_centred):
        pyro.clear_param_store()
        guide = AutoDelta(model)
        assert TaylorELBO().loss(model, guide) == pytest.approx(Trace_ELBO().loss(model, guide))


def test_point_estimate_of_the_scale_with_gaussian_weights():
    """Empirical Bayes: nothing is sampled, so the loss is deterministic and equals the long Monte-Carlo ELBO."""
    guide = AutoGuideList(log_normal_scale)
    guide.append(AutoDelta(pyro.poutine.block(log_normal_scale, expose=["s"])))
    guide.append(AutoNormal(pyro.poutine.block(log_normal_scale, expose=["w"]), init_scale=0.3))
    elbo = TaylorELBO(curvature=GGNDiagonal())
    losses = [elbo.loss(log_normal_scale, guide) for _ in range(3)]
    assert losses[0] == losses[1] == losses[2]
    with torch.no_grad():
        long = torch.tensor(
            [Trace_ELBO().loss(log_normal_scale, guide) for _ in range(200)], dtype=torch.float64
        )
    assert abs((losses[0] - long.mean()) / (long.std() / len(long) ** 0.5)) < 4


@pytest.mark.slow
def test_network_with_a_hierarchical_scale():
    net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    dvi.to_bayesian_(net, prior_scale=HierarchicalScale())

    def model(x: Tensor, y: Tensor) -> None:
        f = net(x)[:, 0]
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = MeanFieldGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), loss=TaylorELBO())
    losses = [svi.step(X, Y) for _ in range(100)]
    assert sum(losses[-20:]) < 0.7 * sum(losses[:20])
