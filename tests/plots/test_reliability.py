# SPDX-License-Identifier: Apache-2.0
"""The diagram shows what the table of the metrics holds; looking at it is left to people."""

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch

from pyro_dvi import metrics, plots
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


MISTAKES = {
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
