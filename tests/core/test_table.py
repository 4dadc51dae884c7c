# SPDX-License-Identifier: Apache-2.0
"""What a notebook shows of reports: the text of print, escaped."""

import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.core.table import Table


def test_a_report_is_the_same_as_text_and_in_a_notebook():
    rows = [{"site": "<lambda>", "n": 10}, {"site": "bias", "n": 2}]
    table = Table("a < b", rows, {"site": "", "n": ","}, "the end")
    assert str(table).splitlines() == [
        "a < b", "", "site       n", "------------", "<lambda>  10", "bias       2", "", "the end"
    ]  # fmt: skip
    assert str(table).replace("<", "&lt;").replace(">", "&gt;") in table._repr_html_()


@pytest.fixture(scope="module")
def trained():
    x = torch.linspace(-1, 1, 12)[:, None]
    torch.manual_seed(0)
    net = dvi.to_bayesian_(nn.Linear(1, 1))
    model = dvi.regressor(net, num_data=12)
    guide = dvi.MeanFieldGuide(model)
    svi = SVI(model, guide, dvi.optim.Adam(dvi.optim.learning_rates(1e-2)), loss=dvi.TaylorELBO())
    return model, guide, (x, x[:, 0]), dvi.fit(svi, [(x, x[:, 0])], 3, progress=False)


def test_histories_as_frames(trained):
    *_, history = trained
    frame = history.to_dataframe()
    assert list(frame.index) == [1, 2, 3] and frame["loss"].tolist() == history["loss"]
    assert len(history.steps.to_dataframe()) == 3
    assert dvi.training.History().to_dataframe().empty  # before the first epoch


def test_reports_of_laplace_are_shown_as_they_are_printed(trained):
    model, _, data, _ = trained
    guide = dvi.LaplaceGuide(model)
    guide.initialize(*data)
    polished = guide.polish([data], progress=False)
    assert str(polished).splitlines()[1].split()[0] == "U"
    assert str(polished).replace(">", "&gt;") in polished._repr_html_()
