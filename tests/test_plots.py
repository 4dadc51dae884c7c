# SPDX-License-Identifier: Apache-2.0
"""Plots say what the numbers say; looking at them is left to people."""

import subprocess
import sys

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from pyro_dvi import metrics, plots
from pyro_dvi.diagnostics import Comparison, LayerComparison
from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.training import History


def predictions(n=300):
    p = torch.softmax(3 * torch.randn(n, 5), -1)
    return p, torch.distributions.Categorical(p).sample()


def record(epochs=4, **columns):
    history = History()
    for epoch in range(epochs):
        history.epochs.append(epoch=epoch + 1, loss=10.0 - epoch, **columns)
    return history


def test_the_diagram_shows_the_table_and_the_error():
    p, y = predictions()
    table = metrics.reliability_table(p, y, 10)
    ax = plots.reliability_diagram(p, y, num_bins=10, title="A")
    filled = table.count > 0
    many, few = (container.lines[0].get_data() for container in ax.containers[-2:])
    for drawn, chosen in ((many, table.count >= 5), (few, filled & (table.count < 5))):
        np.testing.assert_allclose(drawn[0], table.confidence[chosen])
        np.testing.assert_allclose(drawn[1], table.accuracy[chosen])
    counts = ax.figure.axes[-1]
    np.testing.assert_allclose([bar.get_height() for bar in counts.patches], table.count / 300)
    assert ax.get_title("left") == "A"
    assert ax.get_title("right") == f"ECE {metrics.expected_calibration_error(p, y, 10):.1%}"
    assert "300 examples" in counts.get_xlabel()


def test_the_diagram_fits_into_a_grid_of_axes():
    figure, axes = plt.subplots(1, 2, layout="constrained")
    p, y = predictions()
    for ax in axes:
        assert plots.reliability_diagram(p, y, ax=ax) is ax
    assert len(figure.axes) == 4
    figure.draw_without_rendering()
    boxes = [ax.get_tightbbox() for ax in figure.axes]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(figure.bbox.x0 <= box.x0 and box.x1 <= figure.bbox.x1 + 1 for box in boxes)


def test_the_history_has_a_panel_for_every_column():
    history = record(penalty=2.0, kl=5.0, posterior_scale=0.1, validation_loss=3.0, seconds=1.0)
    axes = plots.training_history(history)
    assert [ax.get_ylabel() for ax in axes] == [
        "loss (objective)",
        "penalty",
        "KL (unweighted)",
        "mean posterior σ",
        "loss (validation)",
    ]
    np.testing.assert_allclose(axes[0].lines[0].get_ydata(), history["loss"])
    np.testing.assert_allclose(axes[0].lines[0].get_xdata(), [1, 2, 3, 4])
    assert len(axes[0].figure.axes) == 5


def test_the_history_of_a_sampled_elbo_has_no_terms_and_needs_none():
    assert len(plots.training_history(record())) == 1


def test_the_history_draws_into_given_axes():
    _, axes = plt.subplots(1, 2)
    assert list(plots.training_history(record(kl=1.0), axes=axes)) == list(axes)
    _, ax = plt.subplots()
    assert plots.training_history({"loss": [1.0, 2.0]}, axes=[ax])[0] is ax


def test_the_comparison_shows_every_layer_with_its_two_numbers():
    rows = (
        LayerComparison("net.0", "Linear", 0, 4, 0.01, 1.0, 1.0, 0.9),
        LayerComparison("net.1", "ReLU", 1, 4, 0.2, 0.3, 0.3, 0.9),
        LayerComparison("obs.logits", "Categorical", 0, 4, 0.1, 1.5, 1.5, 0.9),
    )
    ax = plots.moment_comparison(Comparison(rows, 100, 7, "obs"))
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [1.0, 0.3, 1.5])
    np.testing.assert_allclose(ax.figure.axes[-1].lines[0].get_xdata(), [0.01, 0.2, 0.1])
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["net.0  Linear", "net.1 (2)  ReLU", "obs.logits  Categorical"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first layer at the top
    with pytest.raises(DataError, match="no layers"):
        plots.moment_comparison(Comparison((), 100, 7, "obs"))


MISTAKES = {
    "nothing recorded": (lambda: plots.training_history(History()), DataError, "nothing to plot"),
    "foreign columns": (
        lambda: plots.training_history({"accuracy": [1.0]}),
        DataError,
        r"columns \['accuracy'\]",
    ),
    "unequal columns": (
        lambda: plots.training_history({"loss": [1.0], "kl": [1.0, 2.0]}),
        DataError,
        "differ in length",
    ),
    "too few axes": (
        lambda: plots.training_history(record(kl=1.0), axes=[plt.figure().add_subplot()]),
        ArgumentError,
        "2 panels .* 1 axes",
    ),
    "axes outside a grid": (
        lambda: plots.reliability_diagram([0.5], [1], ax=plt.figure().add_axes((0, 0, 1, 1))),
        ArgumentError,
        "part of a grid",
    ),
    "labels out of range": (lambda: plots.reliability_diagram([[0.5, 0.5]], [2]), DataError, "from 0 to 1"),
    "no bins": (lambda: plots.reliability_diagram([[0.5, 0.5]], [1], num_bins=0), ArgumentError, "num_bins"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()


def test_the_package_loads_matplotlib_only_when_asked():
    shown = "print('matplotlib' in sys.modules)"
    code = f"import sys, pyro_dvi; {shown}; pyro_dvi.plots; {shown}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
