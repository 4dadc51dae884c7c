# SPDX-License-Identifier: Apache-2.0
"""Warnings and errors that say where they come from."""

import linecache
import warnings
from pathlib import Path

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning, ModelError, ParameterError, warn

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
    with pytest.warns(DviWarning, match="relu") as stepped:
        svi.step(X, Y)
    svi = relu_svi()
    with pytest.warns(DviWarning, match="relu") as fitted:
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


def test_errors_of_ours_come_out_of_pyros_traces_without_the_shapes_of_sites():
    """Pyro's Trace_ELBO traces the guide, whose first look at the model traces that: two tables."""

    def model(x):
        pyro.sample("w", dist.Normal(0.0, 1.0))
        raise ModelError("this is what is wrong")

    svi = SVI(model, dvi.MeanFieldGuide(model), dvi.optim.Adam({"lr": 0.01}), loss=Trace_ELBO())
    for call in (lambda: svi.step(X), lambda: dvi.fit(svi, [(X,)], epochs=1, progress=False)):
        with pytest.raises(ModelError) as caught:
            call()
        assert str(caught.value) == "this is what is wrong"


@pytest.mark.parametrize(
    "objective", [dvi.TaylorELBO, dvi.MomentPropagationELBO, dvi.SampledELBO, Trace_ELBO]
)
def test_a_noise_that_is_negative_is_named_by_every_objective(objective):
    def model(x, y=None):
        w = pyro.sample("w", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(w * x, noise * torch.ones(len(x))), obs=y)

    for first in (-1.0, 0.1):  # from the first look on, and in a later step
        noise = first
        pyro.clear_param_store()
        svi = SVI(model, dvi.MeanFieldGuide(model), dvi.optim.Adam({"lr": 0.01}), loss=objective())
        if first > 0 and objective is not Trace_ELBO:
            svi.step(X[:, 0], Y[:, 0])
            noise = -1.0
        if noise < 0:
            with pytest.raises(
                ParameterError, match=r"(?s)parameter scale .*Normal.*GreaterThan.*softplus"
            ) as caught:
                svi.step(X[:, 0], Y[:, 0])
            assert "Trace Shapes" not in str(caught.value) and len(str(caught.value)) < 500
