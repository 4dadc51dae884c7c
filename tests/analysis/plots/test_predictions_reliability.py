# SPDX-License-Identifier: Apache-2.0
"""The diagram shows what the table of the metrics holds; looking at it is left to people."""

import matplotlib.pyplot as plt
import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_dvi import metrics, plots, predict
from pyro_dvi.errors import ArgumentError, DataError


def predictions(n=300):
    p = torch.softmax(3 * torch.randn(n, 5), -1)
    return p, torch.distributions.Categorical(p).sample()


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


@pytest.mark.parametrize("one_hot", [False, True])
def test_a_prediction_brings_its_labels_without_those_that_are_masked(one_hot):
    p, y = predictions(40)
    kept = torch.arange(40) % 4 > 0

    def model(x, y=None):
        fn = dist.OneHotCategorical(probs=x) if one_hot else dist.Categorical(probs=x)
        with pyro.plate("data", len(x)), poutine.mask(mask=kept):
            return pyro.sample("label", fn, obs=y)

    prediction = predict(model, lambda x: None, (p, torch.eye(5)[y] if one_hot else y))
    ours, theirs = (plots.reliability_diagram(*given) for given in ((prediction,), (p[kept], y[kept])))
    assert ours.get_title("right") == theirs.get_title("right")
    assert "30 examples" in ours.figure.axes[-1].get_xlabel()
    given = plots.reliability_diagram(prediction, y)
    assert given.get_title("right") == ours.get_title("right")


def test_labels_of_several_questions_are_not_taken_for_classes():
    """A table of labels 0 and 1 has the shape of one-hot code."""
    p = torch.rand(30, 3)
    y = (torch.rand(30, 3) < p).float()

    def model(x, y=None):
        with pyro.plate("question", 3, dim=-1), pyro.plate("data", 30, dim=-2):
            return pyro.sample("label", dist.Bernoulli(probs=x), obs=y)

    prediction = predict(model, lambda x: None, (p, y))
    expected = metrics.rejection_curve(p, y).error[0]
    assert plots.rejection_curve(prediction).lines[0].get_ydata()[0] == pytest.approx(float(expected))


MISTAKES = {
    "no labels": (lambda: plots.reliability_diagram([0.5]), DataError, "pass labels"),
    "labels out of range": (lambda: plots.reliability_diagram([[0.5, 0.5]], [2]), DataError, "from 0 to 1"),
    "no bins": (lambda: plots.reliability_diagram([[0.5, 0.5]], [1], num_bins=0), ArgumentError, "num_bins"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()
