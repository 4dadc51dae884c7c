# SPDX-License-Identifier: Apache-2.0
"""Methods side by side: values, standard errors, and which is best."""

from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib import pyplot as plt

from pyro_dvi import plots
from pyro_dvi.errors import DataError
from pyro_dvi.predictive.metrics import Estimate

RESULTS = {
    "MAP": {"nll": 0.5, "nll_standard_error": 0.1, "accuracy": 0.9},
    "VL": {"nll": Estimate(0.3, 0.05), "accuracy": 0.8},
}


def drawn(ax):
    """Position and half-width of every bar, by row."""
    rows = {}
    for container in ax.containers:
        line, _, (bars,) = container.lines
        for x, y, segment in zip(*line.get_data(), bars.get_segments(), strict=True):
            rows[int(y)] = (x, (segment[1, 0] - segment[0, 0]) / 2)
    return rows


def best(ax):
    return [int(y) for y in ax.containers[1].lines[0].get_ydata()]


def test_values_errors_and_the_best():
    nll, accuracy = plots.compare(RESULTS)
    assert [label.get_text() for label in nll.get_yticklabels()] == ["MAP", "VL"]
    rows = drawn(nll)
    np.testing.assert_allclose(rows[0], (0.5, 0.1))
    np.testing.assert_allclose(rows[1], (0.3, 0.05))
    np.testing.assert_allclose(drawn(accuracy)[0], (0.9, 0.0))
    assert best(nll) == [1] and best(accuracy) == [0]
    assert nll.get_title("left") == "nll (lower is better)"
    assert accuracy.get_title("left") == "accuracy (higher is better)"


def test_predictions_are_scored():
    prediction = SimpleNamespace(metrics=lambda: {"nll": 1.0, "nll_standard_error": 0.2})
    (ax,) = plots.compare({"A": prediction})
    np.testing.assert_allclose(drawn(ax)[0], (1.0, 0.2))


def test_low_scores_are_good():
    (ax,) = plots.compare({"A": {"crps": 0.1}, "B": {"crps": 0.2}})
    assert ax.get_title("left") == "crps (lower is better)" and best(ax) == [0]


def test_of_a_metric_of_unknown_direction_none_is_best():
    (ax,) = plots.compare({"A": {"length": 1.0}, "B": {"length": 2.0}})
    assert ax.get_title("left") == "length" and best(ax) == []


def test_chosen_metrics_into_given_axes():
    _, axes = plt.subplots(1, 2)
    assert list(plots.compare(RESULTS, metrics=["accuracy", "nll"], axes=axes)) == list(axes)
    assert axes[1].get_title("left").startswith("nll")


def test_every_row_of_panels_names_the_methods():
    results = {name: dict.fromkeys(("nll", "brier", "ece", "rmse", "crps"), 1.0) for name in "AB"}
    axes = plots.compare(results)
    axes[0].figure.draw_without_rendering()
    for ax in axes:
        shown = any(label.get_visible() for label in ax.get_yticklabels())
        assert shown == ax.get_subplotspec().is_first_col()


MISTAKES = {
    "a number": (lambda: plots.compare({"A": 0.5}), AttributeError, "metrics"),
    "one missing": (
        lambda: plots.compare({"A": {"nll": 1.0}, "B": {"rmse": 1.0}}, metrics=["nll"]),
        KeyError,
        "nll",
    ),
    "NaN": (lambda: plots.compare({"A": {"nll": np.nan}}), DataError, "nll is empty, or contains"),
    "axes": (
        lambda: plots.compare(RESULTS, axes=[plt.figure().add_subplot()]),
        ValueError,
        "zip",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()
