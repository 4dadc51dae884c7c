# SPDX-License-Identifier: Apache-2.0
"""The main job, with a budget of two epochs."""

import json
import warnings
from pathlib import Path

import pytest
import torch

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
    scores = quickstart.main(["--epochs", "2", "--output-dir", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert list(scores) == list(quickstart.METHODS)
    for name, row in scores.items():
        (line,) = (line for line in shown.splitlines() if line.startswith(f"{name:19} |"))
        assert f"{row['digits nll'].value:.3f} ±" in line and line.endswith(f"{row['curve sd gap']:.3f}")
    assert (tmp_path / "new" / "quickstart.png").stat().st_size > 50_000
    assert f"az.from_netcdf({str(tmp_path / 'new' / 'posterior.nc')!r})" in shown
    posterior = az.from_netcdf(tmp_path / "new" / "posterior.nc")
    assert posterior["posterior"]["net.2.bias"].shape[-1] == 10


def test_the_kl_weights_are_those_that_were_chosen(quickstart):
    rows = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    chosen = {(r["task"], r["method"]): r["kl_weight"] for r in rows if r["stage"] == "tune"}
    assert chosen == {(t, m): w for t, row in quickstart.KL_WEIGHTS.items() for m, w in row.items()}


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
    scores = quickstart.main(["--epochs", "2", "--device", str(device), "--output-dir", str(tmp_path)])
    assert all(row["digits accuracy"] > 0.05 for row in scores.values())
