# SPDX-License-Identifier: Apache-2.0
"""Curves are the distribution functions of the ratios."""

import numpy as np
import pytest

from pyro_dvi import plots
from pyro_dvi.analysis.diagnostics.scale_report import SignalToNoise
from pyro_dvi.errors import ArgumentError, GuideError


def ratios(sites=3):
    rng = np.random.default_rng(0)
    return SignalToNoise({f"layer{k}": rng.gamma(2.0, size=(10, 5)) for k in range(sites)}, "guide")


def test_curves_are_distribution_functions():
    found = ratios()
    ax = plots.signal_to_noise(found, threshold=2.0)
    *sites, everything = (line for line in ax.lines if len(line.get_xdata()) > 2)
    for line, values in zip(sites, found.ratios.values(), strict=True):
        expected = [(values < x).mean() for x in line.get_xdata()]
        np.testing.assert_allclose(line.get_ydata(), expected, atol=1e-12)
    assert everything.get_ydata()[-1] == 1
    assert ax.get_title("right") == f"{found.prunable(2.0):.1%} below 2"


def test_many_sites_name_the_first_and_the_last():
    ax = plots.signal_to_noise(ratios(60))
    labels = [label for label in ax.get_legend_handles_labels()[1] if not label.startswith("_")]
    assert labels == ["layer0 (50)", "layer59 (50)", "all (3,000 weights)"]


def test_ratios_of_zero_and_no_threshold():
    ax = plots.signal_to_noise(SignalToNoise({"w": np.zeros(3)}, "guide"), threshold=None)
    assert ax.lines[0].get_ydata()[0] == 1 and ax.get_title("right") == ""


def test_mistakes():
    with pytest.raises(ArgumentError, match="threshold"):
        plots.signal_to_noise(ratios(), threshold=0)
    with pytest.raises(GuideError, match="automatic guides"):
        plots.signal_to_noise(lambda: None)
