# SPDX-License-Identifier: Apache-2.0
"""The main job, with a budget of one epoch."""

import warnings

import pytest

from tests.examples.scripts import imported

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces version 1
    import arviz as az


@pytest.fixture(scope="module")
def quickstart():
    with imported("quickstart") as module:
        yield module


def test_it_prints_a_table_and_writes_files_that_open(quickstart, tmp_path, capsys):
    results = quickstart.main(["--epochs", "1", "--samples", "2", "--output-dir", str(tmp_path / "new")])
    shown = capsys.readouterr().out
    assert [result.name for result in results] == ["MAP", "sampled VI", "Variational Laplace"]
    for result in results:
        assert f"{result.scores['nll']:.3f}" in shown and f"{result.scores['accuracy']:.1%}" in shown
        assert result.scores["accuracy"] > 0.3  # chance is 0.1
        assert result.seconds > 0
        assert len(result.prediction) == 899
    assert (tmp_path / "new" / "reliability.png").stat().st_size > 10_000
    assert f"az.from_netcdf({str(tmp_path / 'new' / 'posterior.nc')!r})" in shown
    posterior = az.from_netcdf(tmp_path / "new" / "posterior.nc")
    assert posterior["posterior"]["net.7.bias"].shape == (1, 500, 10)
    assert "the same for every draw" in posterior.attrs["log_likelihood_left_out"]
    assert posterior.attrs["kl_weight"] == 0.01
    assert posterior.attrs["method"] == "AtMean()"


def test_seeds_make_it_repeatable(quickstart, tmp_path):
    arguments = ["--epochs", "1", "--samples", "2", "--output-dir", str(tmp_path), "--batch-size", "400"]
    first, second = (quickstart.main([*arguments, "--seed", "3"]) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert a.scores["nll"] == pytest.approx(b.scores["nll"], rel=1e-4)


def test_help_explains(quickstart, capsys):
    with pytest.raises(SystemExit) as stopped:
        quickstart.main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    for option in ("--epochs", "--device", "--seed", "--output-dir", "--kl-weight"):
        assert option in shown
    assert "Variational Laplace" in shown


MISTAKES = [
    (["--epochs", "0"], "--epochs: invalid positive int value: '0'"),
    (["--epochs", "many"], "--epochs: invalid positive int value: 'many'"),
    (["--kl-weight", "-1"], "--kl-weight: invalid positive float value: '-1'"),
    (["--kl-weight", "nan"], "--kl-weight: invalid positive float value: 'nan'"),
    (["--device", "abacus"], "--device abacus is not available here"),
    (["--device", "cuda:99"], "--device cuda:99 is not available here"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_on_the_command_line_is_named(quickstart, arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        quickstart.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.cuda
def test_it_runs_on_a_device(quickstart, tmp_path, device):
    results = quickstart.main(["--epochs", "2", "--device", str(device), "--output-dir", str(tmp_path)])
    assert all(result.prediction.probabilities.device == device for result in results)
