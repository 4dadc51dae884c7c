# SPDX-License-Identifier: Apache-2.0
"""The comparison of propagated and sampled moments."""

import numpy as np
import pytest

from pyro_dvi import plots
from pyro_dvi.analysis.diagnostics.moment_comparison import Comparison
from pyro_dvi.errors import DataError


def test_the_comparison_shows_every_layer_with_its_two_numbers():
    names = ("layer", "class", "sd_ratio", "mean_error")
    cells = (
        ("net.0", "Linear", 1.0, 0.01),
        ("ReLU (call 2)", "ReLU", 0.3, 0.2),
        ("obs.logits", "Categorical", 1.5, 0.1),
    )
    rows = [dict(zip(names, own, strict=True)) for own in cells]
    ax = plots.moment_comparison(Comparison("", rows, {}, "", 100, "obs"))
    np.testing.assert_allclose(ax.lines[0].get_xdata(), [1.0, 0.3, 1.5])
    np.testing.assert_allclose(ax.figure.axes[-1].lines[0].get_xdata(), [0.01, 0.2, 0.1])
    labels = [label.get_text() for label in ax.get_yticklabels()]
    assert labels == ["net.0  Linear", "ReLU (call 2)  ReLU", "obs.logits  Categorical"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first layer at the top
    with pytest.raises(DataError, match="no layers"):
        plots.moment_comparison(Comparison("", (), {}, "", 100, "obs"))
