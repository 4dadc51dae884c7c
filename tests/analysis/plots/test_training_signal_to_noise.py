# SPDX-License-Identifier: Apache-2.0
"""Curves are the distribution functions of the ratios."""

import numpy as np
import pytest

from pyro_dvi import plots
from pyro_dvi.analysis.diagnostics.scale_report import SignalToNoise
from pyro_dvi.errors import GuideError


def ratios(sites=3):
    rng = np.random.default_rng(0)
    return SignalToNoise("", (), {}, ratios={f"layer{k}": rng.gamma(2.0, size=(10, 5)) for k in range(sites)})


def test_curves_are_distribution_functions():
    found = ratios()
    ax = plots.signal_to_noise(found)
    *sites, everything = (line for line in ax.lines if len(line.get_xdata()) > 2)
    for line, values in zip(sites, found.ratios.values(), strict=True):
        expected = [(values < x).mean() for x in line.get_xdata()]
        np.testing.assert_allclose(line.get_ydata(), expected, atol=1e-12)
    assert everything.get_ydata()[-1] == 1
    assert ax.get_title("right") == f"{found.prunable(1.0):.1%} below 1"


def test_many_sites_share_one_entry_of_the_legend():
    ax = plots.signal_to_noise(ratios(60))
    labels = [label for label in ax.get_legend_handles_labels()[1] if not label.startswith("_")]
    assert labels == ["each of 60 sites", "all weights (3,000)"]


def test_ratios_of_zero():
    ax = plots.signal_to_noise(SignalToNoise("", (), {}, ratios={"w": np.zeros(3)}))
    assert ax.lines[0].get_ydata()[0] == 1 and ax.get_title("right") == "100.0% below 1"


def test_mistakes():
    with pytest.raises(GuideError, match="automatic guides"):
        plots.signal_to_noise(lambda: None)
