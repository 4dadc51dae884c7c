# SPDX-License-Identifier: Apache-2.0
"""The course of training, and how the posterior scales changed at its end."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from pyro_dvi import plots
from pyro_dvi.errors import ArgumentError, DataError
from pyro_dvi.training import History


def record(epochs=4, **columns):
    history = History()
    for epoch in range(epochs):
        history.epochs.append(epoch=epoch + 1, loss=10.0 - epoch, **columns)
    return history


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


def test_the_panel_of_scales_shows_their_last_change():
    scales = np.exp(-0.02 * np.arange(40))  # over the last four of forty epochs by exp(-0.08)
    (ax,) = plots.training_history({"posterior_scale": scales})
    assert ax.get_title("left") == "last tenth: -7.7%"
    (shade,) = ax.patches
    np.testing.assert_allclose([shade.get_x(), shade.get_x() + shade.get_width()], [36, 40])
    (ax,) = plots.training_history({"posterior_scale": [0.5, 0.1, np.nan, 0.1002]})
    assert ax.get_title("left") == "last tenth: +0.2%" and not ax.patches
    (ax,) = plots.training_history({"posterior_scale": [0.5, 0.1]})
    assert ax.get_title("left") == ""  # too few to judge


def test_a_metric_of_some_epochs_is_joined():
    (ax,) = plots.training_history({"validation_nll": [np.nan, 2.0, np.nan, 1.0]})
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [[2, 2.0], [4, 1.0]])


MISTAKES = {
    "nothing recorded": (lambda: plots.training_history(History()), DataError, "nothing to plot"),
    "a list": (lambda: plots.training_history([1, 2, 3]), DataError, "what fit returned.*not list"),
    "foreign columns": (
        lambda: plots.training_history({"accuracy": [1.0]}),
        DataError,
        r"columns \['accuracy'\]",
    ),
    "too few axes": (
        lambda: plots.training_history(record(kl=1.0), axes=[plt.figure().add_subplot()]),
        ArgumentError,
        "2 panels .* 1 axes",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_its_remedy(mistake):
    run, error, message = MISTAKES[mistake]
    with pytest.raises(error, match=message):
        run()
