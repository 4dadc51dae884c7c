# SPDX-License-Identifier: Apache-2.0
"""Histograms are shares of their own set, and the scores are those of the metrics."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pyro_dvi import metrics, plots
from pyro_dvi.errors import DataError


def test_shares_and_scores():
    inside, outside = torch.rand(200), 0.4 + torch.rand(50)
    ax = plots.entropy_histogram(inside, outside, title="T")
    familiar, foreign = (patch.get_data() for patch in ax.patches)
    np.testing.assert_allclose(familiar.values, np.histogram(inside, familiar.edges)[0] / 200)
    np.testing.assert_allclose(foreign.values.sum(), 1)
    assert len(familiar.edges) == 41 and familiar.edges[0] == 0
    score = f"AUROC {metrics.auroc(inside, outside):.1%}, FPR95 {metrics.fpr_at_tpr(inside, outside):.1%}"
    assert ax.get_title("right") == score and ax.get_title("left") == "T"


def test_several_foreign_sets_have_their_scores_in_the_legend():
    ax = plots.entropy_histogram([0.1, 0.2], {"far": [2.0], "near": [0.15]})
    labels = ax.get_legend_handles_labels()[1]
    assert labels[0] == "familiar (2)"
    assert labels[1].startswith("far (1): AUROC 100.0%") and labels[2].startswith("near (1): AUROC 50.0%")
    assert ax.get_title("right") == ""


@pytest.mark.parametrize(("shape", "classes"), [((4, 5), 5), ((4,), 2)])
def test_predictions_know_the_largest_entropy(shape, classes):
    prediction = SimpleNamespace(probabilities=torch.full(shape, 1 / 5), entropy=torch.rand(4) / 2)
    ax = plots.entropy_histogram(prediction, prediction)
    assert ax.patches[0].get_data().edges[-1] == pytest.approx(math.log(classes))
    assert ax.lines[0].get_xdata()[0] == pytest.approx(math.log(classes))


def test_entropies_that_are_all_zero():
    ax = plots.entropy_histogram([0.0], [0.0])
    assert ax.patches[0].get_data().values.sum() == 1


def test_mistakes():
    with pytest.raises(DataError, match="outside 'foreign' is empty"):
        plots.entropy_histogram([0.1], [])
    with pytest.raises(DataError, match="inside holds 1 values"):
        plots.entropy_histogram([math.nan], [0.1])
    with pytest.raises(DataError, match="mapping is empty"):
        plots.entropy_histogram([0.1], {})
