# SPDX-License-Identifier: Apache-2.0
"""Tutorials with little training, as a reader runs them; the documentation runs them in full."""

import re
import sys

import matplotlib.pyplot as plt
import pytest
import torch

from tests.examples.scripts import EXAMPLES

pytestmark = pytest.mark.slow  # imports of ArviZ and many figures


def run(name: str, monkeypatch: pytest.MonkeyPatch, epochs: int | None = None) -> dict:
    """Run a tutorial; return its variables and the number of its figures."""
    path = EXAMPLES / "tutorials" / f"{name}.py"
    text = path.read_text()
    if epochs is not None:
        text, count = re.subn(r"epochs=\d+", f"epochs={epochs}", text)
        assert count
    shown = {"__name__": "__main__"}
    monkeypatch.setattr(sys, "argv", [str(path)])
    with plt.rc_context({"backend": "Agg"}):
        try:
            exec(compile(text, str(path), "exec"), shown)
            for number in plt.get_fignums():
                plt.figure(number).canvas.draw()
            return shown | {"num_figures": len(plt.get_fignums())}
        finally:
            plt.close("all")


@pytest.mark.filterwarnings("ignore:the mode is where")  # of so short a training
def test_out_of_distribution(monkeypatch):
    shown = run("out_of_distribution", monkeypatch, epochs=2)
    digits, scrambled = shown["held_out"][0], shown["others"]["scrambled"]
    torch.testing.assert_close(scrambled.sort(-1).values, digits.sort(-1).values)  # the same ink
    assert set(shown["held_out"][1].tolist()) == set(range(8))
    assert shown["auroc"].shape == (5, 3) and shown["auroc"].stack().between(0, 1).all()
    assert shown["num_figures"] == 3


def test_hierarchical_model(monkeypatch):
    shown = run("hierarchical_model", monkeypatch, epochs=3)
    new, guide = shown["new_labs"], shown["guide"]
    varies, at_mean = (
        shown["predict_lab"](new),
        shown["dvi"].predict(shown["model"], guide, new),
    )
    torch.testing.assert_close(varies.mean, at_mean.mean)  # the offset enters linearly
    added = (guide.quantiles([0.5 + 0.34134])["offset"][0, -1] - guide.median()["offset"][-1]).detach()
    torch.testing.assert_close(
        varies.variance - at_mean.variance,
        added.square().expand(200),
        rtol=1e-3,
        atol=1e-5,
    )
    assert shown["num_figures"] == 1


def test_saving_and_serving(monkeypatch, capsys):
    shown = run("saving_and_serving", monkeypatch)
    printed = capsys.readouterr().out
    assert "from the run that was never stopped: 0.0e+00" in printed
    assert "Pyro or this library loaded: False" in printed
    assert shown["mean"].shape == shown["epistemic"].shape == (797, 10)
    assert shown["num_figures"] == 1


# ArviZ 0.x calls matplotlib and numpy in ways of their past.
@pytest.mark.filterwarnings("ignore:Passing a dict or None as alias_mapping")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:arviz")
@pytest.mark.filterwarnings("ignore::UserWarning:arviz")
def test_posterior_analysis(monkeypatch, capsys):
    shown = run("posterior_analysis", monkeypatch, epochs=5)
    assert set(shown["ranking"].index) == {*shown["METHODS"], "Variational Laplace, sampled"}
    # The score of a rule is that of its own predictions.
    for name, prediction in shown["predictions"].items():
        total = prediction.log_likelihood().sum().item()
        assert shown["ranking"].loc[name, "elpd"] == pytest.approx(total, rel=1e-5)
    assert (shown["train"][0].abs() >= 0.5).all() and len(shown["train"][0]) == 60
    assert shown["posterior"]["posterior"]["net.2.weight"].dims == ("chain", "draw", "output", "hidden")
    assert shown["num_figures"] == 3
