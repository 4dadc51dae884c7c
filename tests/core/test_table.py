# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of reports: their tables as HTML, and the rest as text that is escaped."""

import re

import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.core.table import Columns, Report


class Found(Report):
    """A report with all that one may hold."""

    def _shown(self):
        return ["a < b", Columns(("site", "n"), [("<lambda>", "10"), ("bias", "2")]), "the end"]


def cells(html):
    return re.findall(r"<td>(.*?)</td>", html)


def test_a_report_is_the_same_as_text_and_in_a_notebook():
    assert str(Found()).splitlines() == [
        "a < b", "", "site       n", "------------", "<lambda>  10", "bias       2", "", "the end"
    ]  # fmt: skip
    html = Found()._repr_html_()
    assert cells(html) == ["&lt;lambda&gt;", "10", "bias", "2"]
    assert re.findall(r"<pre.*?>(.*?)</pre>", html) == ["a &lt; b", "the end"]


@pytest.fixture(scope="module")
def trained():
    x = torch.linspace(-1, 1, 12)[:, None]
    torch.manual_seed(0)
    net = dvi.to_bayesian_(nn.Linear(1, 1))
    model = dvi.regressor(net, num_data=12)
    guide = dvi.MeanFieldGuide(model)
    svi = SVI(model, guide, dvi.optim.Adam(dvi.optim.learning_rates(1e-2)), loss=dvi.TaylorELBO())
    return model, guide, (x, x[:, 0]), dvi.fit(svi, [(x, x[:, 0])], 3, progress=False)


def test_what_a_cell_shows_of_a_history_a_prediction_and_a_summary(trained):
    model, guide, data, history = trained
    frame = history.to_dataframe()
    assert list(frame.index) == [1, 2, 3] and frame["loss"].tolist() == history["loss"]
    assert "3 epochs" in history._repr_html_() and frame.to_html() in history._repr_html_()
    assert len(history.steps.to_dataframe()) == 3
    assert dvi.training.History().to_dataframe().empty  # before the first epoch
    prediction = dvi.predict(model, guide, data)
    assert prediction.to_dataframe()._repr_html_() in prediction._repr_html_()
    assert {"weight", "bias"} <= {
        cell.rpartition(".")[2] for cell in cells(dvi.summary(model, guide)._repr_html_())
    }


def test_a_cell_does_not_show_the_pixels_of_images():
    model = dvi.regressor(dvi.to_bayesian_(nn.Linear(1, 300)), num_data=12)
    guide = dvi.MeanFieldGuide(model)
    x = torch.zeros(12, 1)
    guide(x, torch.zeros(12, 300))
    prediction = dvi.predict(model, guide, x)
    assert "12 examples" in prediction._repr_html_() and "<table" not in prediction._repr_html_()
    assert prediction.to_dataframe().shape == (12, 1200)


def test_reports_of_laplace_are_shown_as_they_are_printed(trained):
    model, _, data, _ = trained
    guide = dvi.LaplaceGuide(model)
    guide.initialize(*data)
    polished = guide.polish([data], progress=False)
    assert str(polished).splitlines()[1].split()[0] == "U"
    assert str(polished).replace(">", "&gt;") in polished._repr_html_()
