# SPDX-License-Identifier: Apache-2.0
"""A weight decay that acts on posterior scales is noticed."""

import warnings

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import DviWarning

X = torch.linspace(-1, 1, 100)[:, None]
LOADER = [(X[::2], 3 * X[::2, 0]), (X[1::2], 3 * X[1::2, 0])]


def said(optimizer, *, as_module=False, epochs=1):
    """The warnings of an epoch."""
    pyro.clear_param_store()
    torch.manual_seed(0)
    model = dvi.regressor(dvi.to_bayesian_(nn.Linear(1, 1)), num_data=100)
    guide = dvi.MeanFieldGuide(model)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        if as_module:
            guide(*LOADER[0])
            elbo = dvi.TaylorELBO()(model, guide)
            dvi.fit(elbo, LOADER, epochs, progress=False, optimizer=optimizer(elbo.parameters()))
        else:
            svi = SVI(model, guide, optimizer, loss=dvi.TaylorELBO())
            dvi.fit(svi, LOADER, epochs, progress=False)
    return [str(warning.message) for warning in found if issubclass(warning.category, DviWarning)]


def test_nothing_is_said_without_decay():
    assert said(dvi.optim.Adam(dvi.optim.learning_rates(0.01))) == []


@pytest.mark.parametrize(
    "optimizer, as_module",
    [
        (pyro.optim.AdamW({"lr": 0.01}), False),
        (dvi.optim.Adam({"lr": 0.01, "weight_decay": 0.1}), False),
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.01), True),
    ],
    ids=["Pyro's AdamW", "Adam", "torch's AdamW"],
)
def test_weight_decay_of_posterior_scales_is_named(optimizer, as_module):
    [warning] = said(optimizer, as_module=as_module, epochs=2)
    assert "weight decay" in warning and "scales" in warning and "Train without weight decay" in warning
