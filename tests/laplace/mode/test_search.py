# SPDX-License-Identifier: Apache-2.0
"""Where polish ends: curved valleys, models without a Gauss-Newton matrix, large ones, kinks, spent budgets."""

import math
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning, UnconvergedError
from pyro_dvi.laplace import Dense, Hessian, LaplaceGuide
from pyro_dvi.laplace.methods.full_and_low_rank import DensePosterior
from pyro_dvi.laplace.methods.kronecker_factored import DiagonalPosterior, KroneckerFactored
from pyro_dvi.laplace.mode import search
from pyro_dvi.laplace.mode.diagnosis import kinks as kinks_of
from pyro_dvi.laplace.mode.search import metric_at
from tests.laplace.problems import SineRegression, guide_at

QUIET = {"progress": False}


def hessian(guide, batches):
    energy = guide.energy(batches)
    local = energy.at(energy.start)
    return local.hessian(torch.eye(energy.layout.size, dtype=energy.start.dtype)), local.gradient


def cosine_network(
    activation: nn.Module, dtype: torch.dtype = torch.float64, steps: int = 1000, hidden: int = 20
):
    """1-20-1 on 60 points of cos(3x), noise .1, prior sd sqrt 3: a curved valley with a condition of 1e6."""
    torch.manual_seed(0)
    pyro.clear_param_store()
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).unsqueeze(-1).to(dtype)
    noise = 0.1 * torch.randn(60, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(
        dtype
    )
    batches = [(x, (3 * x).cos() + noise)]
    net = nn.Sequential(nn.Linear(1, hidden), activation, nn.Linear(hidden, 1)).to(dtype)
    adam = torch.optim.Adam(net.parameters(), lr=0.01)
    for _ in range(steps):
        adam.zero_grad()
        decay = sum(p.square().sum() for p in net.parameters()) / 6
        ((net(x) - batches[0][1]).square().sum() / 0.02 + decay).backward()
        adam.step()
    model = dvi.regressor(dvi.to_bayesian_(net, prior_scale=3**0.5), num_data=60, noise_scale=0.1)
    return LaplaceGuide(model), batches


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "hidden"), [(torch.float64, 10), (torch.float32, 20)])
def test_curved_valley_is_followed_to_its_minimum(dtype, hidden):
    guide, batches = cosine_network(nn.Tanh(), dtype, hidden=hidden)
    report = guide.polish(batches, max_gradients=1200, **QUIET)  # measured: 514 and 691; Newton alone 2,367
    assert report.converged and report.curvature == "Hessian"
    assert "suffice" not in report.reason
    exact, gradient = hessian(guide, batches)
    exact = 0.5 * (exact + exact.mT).double()
    assert float(torch.linalg.eigvalsh(exact)[0]) > 0
    decrement = float(gradient.double() @ torch.linalg.solve(exact, gradient.double()))
    assert decrement < 1e-2 and decrement <= 2 * report.newton_decrement + 1e-6
    guide.fit(batches, Dense(Hessian()))  # no error


@pytest.mark.slow
def test_budget_that_is_spent_near_the_minimum_is_good_enough():
    problem = SineRegression()
    guide = problem.trained(300)
    guide.polish(problem.batches, tolerance=1e-4, **QUIET)
    mode = guide.unconstrained_mode()
    with torch.no_grad():
        guide.locs.b2.add_(1e-3)
    report = guide.polish(problem.batches, tolerance=1e-20, max_gradients=3, **QUIET)
    assert report.converged and "3 gradients were not enough" in report.reason
    assert report.newton_decrement <= 1e-2 and report.smallest_eigenvalue > 0
    torch.testing.assert_close(guide.unconstrained_mode(), mode, rtol=0, atol=0.1)


@pytest.mark.slow
def test_large_models_take_the_factors_of_layers_or_the_diagonal(monkeypatch):
    problem = SineRegression()
    guide = problem.trained(100)
    energy = guide.energy(problem.batches)
    local = energy.at(energy.start)
    eye = torch.eye(energy.layout.size, dtype=torch.float64)
    matrix = local.ggn(eye)
    found = metric_at(local)
    assert isinstance(found, DensePosterior)
    torch.testing.assert_close(
        found.coloured(found.whitened(eye)), torch.linalg.inv(matrix), rtol=1e-8, atol=1e-12
    )
    monkeypatch.setattr(search, "_DENSE", 3)
    found = metric_at(local)
    expected = KroneckerFactored().fit(local).solve(eye)
    torch.testing.assert_close(found.coloured(found.whitened(eye)), expected, rtol=1e-8, atol=1e-12)
    masks = {name: torch.arange(u.numel()).reshape(u.shape) % 3 > 0 for name, u in energy.locs.items()}
    energy = guide.energy(problem.batches, subset=masks)
    local = energy.at(energy.start)
    eye = torch.eye(energy.layout.size, dtype=torch.float64)
    found, matrix = metric_at(local), local.ggn(eye)
    assert isinstance(found, DiagonalPosterior)
    torch.testing.assert_close(
        found.coloured(found.whitened(eye)), (1 / matrix.diagonal()).diag(), rtol=1e-8, atol=0
    )
    assert guide.polish(problem.batches, **QUIET).converged


def test_models_without_gauss_newton_matrix_are_polished_in_the_metric_of_the_prior():
    def model(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 3.0).to_event(1))
        pyro.factor("quartic", -w.pow(4).sum())
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    x = torch.tensor([[1.0, 2.0], [0.5, -1.0], [2.0, 0.3]], dtype=torch.float64)
    batches = [(x, x.sum(-1))]
    guide = LaplaceGuide(model)
    guide.initialize(*batches[0])
    assert guide.polish(batches, **QUIET).converged
    assert float(hessian(guide, batches)[1].norm()) < 1e-6


@pytest.mark.slow
def test_kinks_are_named_where_they_end_the_search():
    guide, batches = cosine_network(nn.ReLU(), steps=100, hidden=8)
    with pytest.warns(DviWarning, match=r"relu(.|\n)*GGN\(\)(.|\n)*smooth_activations_"):
        report = guide.polish(batches, **QUIET)
    assert not report.converged and report.curvature == "GGN" and report.value < report.value_before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        last = guide.polish(batches, subset="net.2.*", **QUIET)  # linear: U is a parabola
    assert last.converged and last.curvature == "Hessian"
    assert last.gradients < 35


def test_kinks_may_leave_a_point_at_rest():
    torch.manual_seed(0)
    pyro.clear_param_store()
    x = torch.linspace(0.9, 1, 20, dtype=torch.float64).unsqueeze(-1)
    x = torch.cat([-x, x])  # no data near the kink
    batches = [(x, x.relu())]
    net = nn.Sequential(nn.Linear(1, 4), nn.ReLU(), nn.Linear(4, 1)).double()
    guide = LaplaceGuide(dvi.regressor(dvi.to_bayesian_(net), num_data=40, noise_scale=0.3))
    report = guide.polish(batches, **QUIET)
    assert report.converged and report.curvature == "GGN" and report.smallest_eigenvalue is None
    energy = guide.energy(batches)
    local = energy.at(energy.start)
    matrix = local.ggn(torch.eye(energy.layout.size, dtype=torch.float64))
    decrement = float(local.gradient @ torch.linalg.solve(matrix, local.gradient))
    assert report.newton_decrement == pytest.approx(decrement, rel=0.2) and decrement <= 1e-2


def test_a_spent_budget_says_that_there_is_no_decrement_where_u_bends_down():
    """Before the search, at a maximum of U in one direction: the Hessian is -3 there, so that P is not positive."""

    def model(x):
        w = pyro.sample("w", dist.Normal(x.new_zeros(2), 1.0).to_event(1))
        pyro.factor("saddle", 2 * w[0] ** 2 - w[0] ** 4)

    x = torch.zeros(1, dtype=torch.float64)
    guide = guide_at(model, (x,), {"w": torch.tensor([0.01, 0.0], dtype=torch.float64)})
    with pytest.raises(
        UnconvergedError, match="Newton decrement +none, because U has negative curvature"
    ) as caught:
        guide.polish([(x,)], max_gradients=1, **QUIET)
    assert math.isinf(caught.value.report.newton_decrement) and "inf" not in str(caught.value)


@pytest.mark.parametrize(
    ("activation", "kinks", "way"),
    [
        (
            nn.Tanh(),
            r"\(abs in the likelihood\)",
            "use a density that is smooth .*StudentT or Normal instead of",
        ),
        (
            nn.ReLU(),
            r"\(abs in the likelihood, relu\)",
            r"use smooth_activations_\(net\).* and a density .*StudentT",
        ),
    ],
)
def test_what_is_advised_against_kinks_removes_them(activation, kinks, way):
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(1, 3), activation, nn.Linear(3, 1)))

    def model(x, y=None):
        f = net(x)
        with pyro.plate("data", len(x)):
            return pyro.sample("y", likelihood(f).to_event(1), obs=y)

    x = torch.linspace(-1, 1, 9)[:, None]
    likelihood = lambda f: dist.Laplace(f, 0.3)  # noqa: E731
    guide = LaplaceGuide(model)
    with pytest.warns(DviWarning, match=f"{kinks}.*{way}") as caught:
        guide.polish([(x, x.sin())], max_gradients=2, **QUIET)
    assert isinstance(activation, nn.ReLU) or "smooth_activations_" not in str(caught[0].message)
    likelihood = lambda f: dist.StudentT(4.0, f, 0.3)  # noqa: E731
    dvi.bayesian.smooth_activations_(net)
    assert kinks_of(guide.energy([(x, x.sin())])) == ()


def test_a_step_to_where_a_distribution_refuses_its_parameters_is_taken_back():
    """The standard deviation is a latent without a transform, below zero where a whole step ends."""
    refused = []

    def model(y):
        scale = pyro.sample("scale", dist.Normal(y.new_ones(()), 1.0))
        refused.append(bool(scale.detach() <= 0))
        with pyro.plate("data", len(y)):
            pyro.sample("y", dist.Normal(0.0, scale), obs=y)

    y = torch.full((2,), 0.05, dtype=torch.float64)
    guide = guide_at(model, (y,), {"scale": torch.tensor(3.0, dtype=torch.float64)})
    assert guide.polish([(y,)], **QUIET).converged and any(refused)
    assert 0 < float(guide.median()["scale"]) < 0.1
