# SPDX-License-Identifier: Apache-2.0
"""Warnings and errors that say where they come from."""

import linecache
import warnings
from pathlib import Path

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning, warn

X, Y = torch.linspace(-1, 1, 8)[:, None], torch.zeros(8, 1)


def line_of(caught):
    return linecache.getline(caught.filename, caught.lineno)


def relu_svi():
    pyro.clear_param_store()
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(1, 3), nn.ReLU(), nn.Linear(3, 1)))
    model = dvi.regressor(net, num_data=8, noise_scale=0.1)
    return SVI(model, dvi.MeanFieldGuide(model), dvi.optim.Adam({"lr": 0.01}), loss=dvi.TaylorELBO())


def test_warnings_from_below_pyro_and_torch_point_to_the_line_that_called_them():
    svi = relu_svi()
    with pytest.warns(DviWarning, match="ReLU") as stepped:
        svi.step(X, Y)
    svi = relu_svi()
    with pytest.warns(DviWarning, match="ReLU") as fitted:
        dvi.fit(svi, [(X, Y)], epochs=1, progress=False)
    assert [line_of(one[0]).strip().partition("(")[0] for one in (stepped, fitted)] == ["svi.step", "dvi.fit"]
    assert {one[0].filename for one in (stepped, fitted)} == {__file__}


def test_a_warning_in_a_run_of_a_model_points_into_the_model():
    def model():
        warn("here")

    with pytest.warns(DviWarning, match="here") as caught:
        pyro.poutine.trace(model).get_trace()
    assert line_of(caught[0]).strip() == 'warn("here")'


def test_a_warning_where_only_libraries_call_each_other_has_some_place():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exec("warn('alone')", {"__name__": "pyro_dvi.made_up", "warn": warn})
    assert str(caught[0].message) == "alone" and issubclass(caught[0].category, DviWarning)


def test_the_library_warns_in_one_way():
    """All but the function itself, whose line the others would point to."""
    root = Path(dvi.__file__).parent
    assert [str(p.relative_to(root)) for p in root.rglob("*.py") if "warnings.warn(" in p.read_text()] == [
        "errors.py"
    ]
