# SPDX-License-Identifier: Apache-2.0
"""The scripts of the gallery, with few epochs, as a reader runs them."""

import runpy
from pathlib import Path

import arviz as az
import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from tests.examples.scripts import EXAMPLES

REGRESSION, CLASSES = "posterior_analysis", "posterior_analysis_classes"
METHODS = {"Variational Laplace", "MNVI", "VOGN", "Laplace"}

pytestmark = [
    pytest.mark.slow,  # imports of ArviZ and many figures
    # ArviZ 0.x calls matplotlib and numpy in ways of their past.
    pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:arviz"),
    # Of predictive checks in ArviZ 0.x, whose densities of few draws are rough.
    pytest.mark.filterwarnings("ignore::UserWarning:arviz"),
    # The few epochs of a test leave the best prior at an end of the values that are tried.
    pytest.mark.filterwarnings("ignore:the best of PriorPrecision"),
]


def run(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> dict:
    monkeypatch.delenv("PYRO_DVI_DATA", raising=False)
    monkeypatch.setattr("sys.argv", [script, "--output-dir", str(folder), *arguments])
    with plt.rc_context({"backend": "Agg"}):
        try:
            return runpy.run_path(str(EXAMPLES / "tutorials" / f"{script}.py"), run_name="__main__")
        finally:
            plt.close("all")


def test_regression(tmp_path, monkeypatch, capsys):
    shown = run(REGRESSION, tmp_path, monkeypatch, "--epochs", "10")
    assert set(shown["fitted"]) == METHODS
    answers = shown["answers"]
    assert set(answers.index) == METHODS
    # The score of a rule is that of its own predictions, and Laplace's drawn weights are no good predictor.
    for name, prediction in shown["own"].items():
        expected = prediction.log_likelihood().mean().item()
        np.testing.assert_allclose(answers.loc[name, "held out, own rule"], expected, rtol=1e-5)
    assert answers.loc["Laplace", "held out, drawn"] < answers.loc["Laplace", "held out, own rule"] - 1
    assert len(list(tmp_path.glob("*.png"))) == 7
    assert all(figure.stat().st_size > 5_000 for figure in tmp_path.glob("*.png"))
    posterior = az.from_netcdf(tmp_path / "variational_laplace.nc")
    assert posterior["posterior"]["net.2.weight"].dims == ("chain", "draw", "output", "hidden")
    assert "Scales have not converged" in capsys.readouterr().out


def test_classes(tmp_path, monkeypatch):
    letters = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    (tmp_path / "small").mkdir()
    np.savez(tmp_path / "small" / "notmnist_small.npz", x_test=letters)
    out = tmp_path / "new"
    shown = run(CLASSES, out, monkeypatch, "--epochs", "4", "--data-dir", str(tmp_path))
    assert set(shown["predictions"]) == METHODS
    assert all(p.metrics()["accuracy"] > 0.15 for p in shown["predictions"].values())  # chance is 0.1
    assert set(shown["foreign"]) == {"shuffled pixels", "noise", "letters"}
    digits = shown["held_out"][0]
    torch.testing.assert_close(
        shown["foreign"]["shuffled pixels"].sort(-1).values, digits.sort(-1).values
    )  # the same ink
    for row in shown["rows"].values():
        assert len(row) == 6 and all(0 <= value <= 1 for value in row.values())
    assert len(list(out.glob("classes_*.png"))) == 9 and len(list(out.glob("classes_*.nc"))) == 4


@pytest.mark.parametrize("script", [REGRESSION, CLASSES])
def test_a_mistake_on_the_command_line_is_named(script, tmp_path, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stopped:
        run(script, tmp_path, monkeypatch, "--epochs", "0")
    assert stopped.value.code == 2
    assert "--epochs must be positive" in capsys.readouterr().err
