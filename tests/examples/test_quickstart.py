# SPDX-License-Identifier: Apache-2.0
"""The main job, with a budget of two epochs, and its parts."""

import warnings

import pyro
import pytest
import torch

from tests.examples.scripts import imported

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces version 1
    import arviz as az


@pytest.fixture(scope="module")
def quickstart():
    with imported("quickstart") as module:
        yield module


@pytest.mark.slow
def test_it_prints_a_table_and_writes_files_that_open(quickstart, tmp_path, capsys):
    scores = quickstart.main(["--epochs", "2", "--draws", "2", "--output-dir", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert list(scores) == ["trained network", "with dvi.Laplace", "Hamiltonian Monte Carlo"]
    for name, row in scores.items():
        (line,) = (line for line in shown.splitlines() if line.startswith(f"{name:23} |"))
        assert line.split("|")[1].split() == [f"{row[key]:.3f}" for key in ("nll", "sd data", "sd gap")]
    assert (tmp_path / "new" / "quickstart.png").stat().st_size > 50_000
    assert f"az.from_netcdf({str(tmp_path / 'new' / 'posterior.nc')!r})" in shown
    exported = az.from_netcdf(tmp_path / "new" / "posterior.nc")
    assert exported["posterior"]["net.0.weight"].shape[-2:] == (30, 1)


@pytest.mark.slow
def test_laplace_is_uncertain_in_the_gap_and_keeps_the_fit(quickstart):
    train, test = quickstart.curve(0)
    pyro.set_rng_seed(0)
    posterior = quickstart.with_error_bars(quickstart.train_network(train), train)
    found = quickstart.scores(posterior.predict, test)
    assert found["sd gap"] > 10 * found["sd data"]
    assert found["nll"] < -0.8  # the noise alone has -0.88


def test_monte_carlo_has_the_density_of_the_model(quickstart):
    train, _ = quickstart.curve(0)
    model = quickstart.with_error_bars(quickstart.train_network(train, 10), train, polish=False).model
    shapes = {"0.weight": (30, 1), "0.bias": (30,), "2.weight": (1, 30), "2.bias": (1,)}
    pyro.set_rng_seed(0)
    found, expected = [], []
    for _ in range(2):
        units = {name: torch.randn(shape) for name, shape in shapes.items()}
        weights = {f"net.{name}": quickstart.PRIOR_SCALES[f"{name[0]}.*"] * u for name, u in units.items()}
        trace = pyro.poutine.trace(pyro.condition(model, weights)).get_trace(*train)
        expected.append(-trace.log_prob_sum())
        found.append(quickstart.energy(torch.cat([u.flatten() for u in units.values()]), train))
    torch.testing.assert_close(found[1] - found[0], expected[1] - expected[0], rtol=1e-4, atol=0.1)


@pytest.mark.slow
def test_monte_carlo_draws_networks_that_fit(quickstart):
    train, test = quickstart.curve(0)
    pyro.set_rng_seed(0)
    draws = quickstart.monte_carlo(lambda u: quickstart.energy(u, train), torch.randn(2, 91), draws=30)
    assert draws.shape == (30, 2, 91)
    errors = quickstart.functions(draws, test.x) - test.y
    assert errors.square().mean().sqrt() < 0.13  # the noise is 0.1
    assert draws.std(0).min() > 0  # all of them move
