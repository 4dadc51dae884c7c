# SPDX-License-Identifier: Apache-2.0
"""The comparison of propagated and sampled moments."""

import numpy as np
import pytest

from pyro_dvi import plots
from pyro_dvi.analysis.diagnostics.moment_comparison import Comparison, LayerComparison
from pyro_dvi.errors import DataError


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
