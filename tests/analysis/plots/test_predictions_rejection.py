# SPDX-License-Identifier: Apache-2.0
"""The curve is that of the metrics, between its references."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_dvi import metrics, plots, predict
from pyro_dvi.errors import DataError


def predictions(n=200):
    p = torch.softmax(2 * torch.randn(n, 4), -1)
    return p, torch.distributions.Categorical(p).sample()


def predicted(likelihood, p, y=None):
    def model(x, y=None):
        with pyro.plate("data", len(x)):
            return pyro.sample("label", likelihood(probs=x), obs=y)

    return predict(model, lambda x: None, (p,) if y is None else (p, y))


def shade(ax, k=0):
    """Lower and upper edge of a filled area, by place."""
    vertices = ax.collections[k].get_paths()[0].vertices
    return {float(x): float(vertices[vertices[:, 0] == x, 1].max()) for x in np.unique(vertices[:, 0])}


def test_the_curve_and_its_areas():
    p, y = predictions()
    ax = plots.rejection_curve(p, y)
    curve = metrics.rejection_curve(p, y)
    np.testing.assert_allclose(ax.lines[0].get_xdata(), curve.rejected)
    np.testing.assert_allclose(ax.lines[0].get_ydata(), curve.error)
    (label,) = ax.get_legend_handles_labels()[1]
    assert label == f"AUMRC {metrics.aumrc(p, y):.3f}"


def test_the_references_are_the_oracle_and_chance():
    p, y = predictions()
    ax = plots.rejection_curve(p, y)
    wrong = (p.argmax(-1) != y).double()
    oracle = metrics.rejection_curve(p, y, uncertainty=wrong)
    drawn = shade(ax)
    for place, error in zip(oracle.rejected.tolist(), oracle.error.tolist(), strict=True):
        assert drawn[place] == pytest.approx(error, abs=1e-9)
    assert ax.lines[1].get_ydata()[0] == pytest.approx(float(wrong.mean()))
    assert all(
        error <= line + 1e-12 for error, line in zip(oracle.error, ax.lines[0].get_ydata(), strict=True)
    )


def test_several_methods_with_uncertainties_of_their_own():
    p, y = predictions()
    u = {"A": -p.max(-1).values, "B": torch.rand(len(p))}
    ax = plots.rejection_curve({"A": p, "B": p}, y, uncertainty=u, title="T")
    labels = ax.get_legend_handles_labels()[1]
    assert [label.split(":")[0] for label in labels] == ["A", "B"]
    assert f"{metrics.aumrc(p, y, u['B']):.3f}" in labels[1]
    assert ax.lines[0].get_linestyle() != ax.lines[2].get_linestyle()  # no meaning rests on colour alone
    assert ax.get_title("left") == "T"


def test_the_fourth_of_several_methods_is_told_from_chance():
    p, y = predictions()
    ax = plots.rejection_curve(dict.fromkeys("abcd", p), y)
    curve, chance = ax.lines[6:8]
    assert (
        curve.get_linestyle() != chance.get_linestyle() and curve.get_linewidth() > 2 * chance.get_linewidth()
    )


def test_a_prediction_brings_its_labels():
    p, y = predictions()
    ax = plots.rejection_curve(predicted(dist.Categorical, p, y))
    np.testing.assert_allclose(ax.lines[0].get_ydata(), metrics.rejection_curve(p, y).error)
    one_hot = torch.nn.functional.one_hot(y, 4).float()
    again = plots.rejection_curve(predicted(dist.OneHotCategorical, p, one_hot))
    np.testing.assert_allclose(again.lines[0].get_ydata(), ax.lines[0].get_ydata())


def test_nothing_wrong_and_everything_wrong():
    assert plots.rejection_curve([[0.9, 0.1]], [0]).get_ylim()[1] > 0
    np.testing.assert_allclose(plots.rejection_curve([[0.9, 0.1]], [1]).lines[0].get_ydata(), [1, 0])


MISTAKES = {
    "no labels": (lambda: plots.rejection_curve([[0.9, 0.1]]), "have no labels"),
    "a prediction without labels": (
        lambda: plots.rejection_curve({"A": predicted(dist.Categorical, torch.ones(1, 1))}),
        "of 'A' have no labels",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, message = MISTAKES[mistake]
    with pytest.raises(DataError, match=message):
        run()
