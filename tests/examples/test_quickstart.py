# SPDX-License-Identifier: Apache-2.0
"""The main job, with a budget of two epochs, and its parts."""

import json
import warnings
from functools import partial
from pathlib import Path

import pyro
import pytest
import torch

import pyro_dvi as dvi
from tests.examples.scripts import imported

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces version 1
    import arviz as az

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "quickstart.jsonl"


@pytest.fixture(scope="module")
def quickstart():
    with imported("quickstart") as module:
        yield module


@pytest.mark.slow
def test_it_prints_a_table_and_writes_files_that_open(quickstart, tmp_path, capsys):
    scores = quickstart.main(["--epochs", "2", "--draws", "2", "--output-dir", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert list(scores["curve"]) == [
        "trained network",
        "the same with LaplaceGuide",
        "Hamiltonian Monte Carlo",
    ]
    assert set(scores["digits"]) == {*quickstart.METHODS, "MAP, scaled"}
    for name, row in scores["curve"].items():
        assert line_of(name, shown).endswith(f"{row['sd gap']:.3f}")
    for name, row in scores["digits"].items():
        line = line_of(name, shown)
        assert f"{row['nll'].value:.3f} ±" in line and line.endswith(f"{row['auroc']:.3f}")
    first, scaled = scores["digits"]["MAP"], scores["digits"]["MAP, scaled"]
    assert first["accuracy"] == scaled["accuracy"] and first["nll"] != scaled["nll"]
    assert (tmp_path / "new" / "quickstart.png").stat().st_size > 50_000
    assert f"az.from_netcdf({str(tmp_path / 'new' / 'posterior.nc')!r})" in shown
    posterior = az.from_netcdf(tmp_path / "new" / "posterior.nc")
    assert posterior["posterior"]["net.2.bias"].shape[-1] == 10


def line_of(name, shown):
    (line,) = (line for line in shown.splitlines() if line.startswith(f"{name:27} |"))
    return line


def test_the_settings_are_those_that_were_chosen(quickstart):
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    assert quickstart.SETTINGS == {r["method"]: r["chosen"] for r in rows if r["stage"] == "tune"}


@pytest.mark.slow
def test_laplace_is_uncertain_in_the_gap_and_keeps_the_fit(quickstart):
    data, prior = quickstart.curve(0), quickstart.SETTINGS["curve"]["prior"]
    pyro.set_rng_seed(0)
    net = quickstart.train_network(data, **quickstart.SETTINGS["curve"])
    model, guide = quickstart.with_error_bars(net, data, prior)
    gap = dvi.predict(model, guide, data.others["gap"]).epistemic.mean().sqrt()
    found = dvi.predict(model, guide, data.test)
    assert gap > 10 * found.epistemic.mean().sqrt()
    assert found.metrics()["nll"] < -0.8  # the noise alone has -0.88


def test_monte_carlo_has_the_density_of_the_model(quickstart):
    data, prior = quickstart.curve(0), 0.7
    model, _ = quickstart.with_error_bars(quickstart.train_network(data, 0.1, prior, 10), data, prior)
    shapes = {"0.weight": (30, 1), "0.bias": (30,), "2.weight": (1, 30), "2.bias": (1,)}
    pyro.set_rng_seed(0)
    found, expected = [], []
    for _ in range(2):
        units = {name: torch.randn(shape) for name, shape in shapes.items()}
        weights = {f"net.{name}": prior * quickstart.LAYERS[name[0]] * u for name, u in units.items()}
        trace = pyro.poutine.trace(pyro.condition(model, weights)).get_trace(*data.train)
        expected.append(-trace.log_prob_sum())
        u = torch.cat([u.flatten() for u in units.values()])
        found.append(quickstart.energy(u, data, prior))
    torch.testing.assert_close(found[1] - found[0], expected[1] - expected[0], rtol=1e-4, atol=0.1)


@pytest.mark.slow
def test_monte_carlo_draws_networks_that_fit(quickstart):
    data = quickstart.curve(0)
    pyro.set_rng_seed(0)
    energy = partial(quickstart.energy, data=data, prior=1.0)
    draws = quickstart.monte_carlo(energy, torch.randn(2, 91), draws=30)
    assert draws.shape == (30, 2, 91)
    errors = quickstart.functions(draws, data.test[0], 1.0) - data.test[1]
    assert errors.square().mean().sqrt() < 0.13  # the noise is 0.1
    assert draws.std(0).min() > 0  # all of them move


def test_temperature_divides_logits(quickstart):
    p, labels = torch.tensor([[0.2, 0.8], [0.5, 0.5]]), torch.tensor([1, 0])
    expected = -torch.tensor([0.8**2 / (0.8**2 + 0.2**2), 0.5]).log()
    torch.testing.assert_close(quickstart.nll(p, labels, 0.5), expected)


def test_no_image_is_trained_validated_and_tested(quickstart):
    """Noise is another one for each seed, so pixels are compared by the digits that are nearest to them."""
    one, two = quickstart.noisy_digits(0), quickstart.noisy_digits(100)
    assert [len(part[0]) for part in (one.train, one.test, one.validation)] == [600, 897, 300]
    torch.testing.assert_close(one.validation[1], two.validation[1])  # the same images for all seeds
    parts = torch.cat([one.train[0], one.test[0], one.validation[0]])
    assert len(parts.unique(dim=0)) == 1797


def test_a_device_that_is_not_there_is_named(quickstart, capsys):
    with pytest.raises(SystemExit) as stopped:
        quickstart.main(["--device", "abacus"])
    assert stopped.value.code == 2
    assert "--device abacus is not available here" in capsys.readouterr().err


@pytest.mark.cuda
def test_it_runs_on_a_device(quickstart, tmp_path, device):
    options = ["--epochs", "2", "--draws", "2", "--device", str(device), "--output-dir", str(tmp_path)]
    scores = quickstart.main(options)
    assert all(row["accuracy"] > 0.05 for row in scores["digits"].values())
