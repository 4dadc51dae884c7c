# SPDX-License-Identifier: Apache-2.0
"""A clamp that changes many gradients and a weight decay that acts on posterior scales are noticed."""

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


@pytest.mark.parametrize(
    "optimizer",
    [
        pyro.optim.ClippedAdam({"lr": 0.01, "clip_norm": 10.0}),
        pyro.optim.Adam({"lr": 0.01}, {"clip_value": 10.0}),
        dvi.optim.Adam({"lr": 0.01}, {"clip_value": 10.0}),
    ],
    ids=["ClippedAdam", "Pyro's Adam", "Adam"],
)
def test_a_clamp_that_acts_on_many_elements_is_named_once(optimizer):
    [warning] = said(optimizer, epochs=3)
    assert "±10" in warning and "Adam clamps" in warning


@pytest.mark.parametrize(
    "optimizer",
    [
        pyro.optim.ClippedAdam({"lr": 0.01, "clip_norm": 1000.0}),
        pyro.optim.Adam({"lr": 0.01}, {"clip_norm": 10.0}),  # of the whole gradient: its direction stays
        dvi.optim.Adam(dvi.optim.learning_rates(0.01)),
    ],
    ids=["wide clamp", "norm", "no decay"],
)
def test_nothing_is_said_of_what_does_no_harm(optimizer):
    assert said(optimizer) == []


def test_a_clamp_of_a_few_elements_is_not_named():
    """One input of 50 is large: the gradient of its weight is clamped, which are 1 % of the elements or 2 %."""
    x = torch.cat([1e4 * X, 1e-3 * torch.ones(100, 49)], 1)
    pyro.clear_param_store()
    torch.manual_seed(0)
    model = dvi.regressor(dvi.to_bayesian_(nn.Linear(50, 1)), num_data=100)
    svi = SVI(
        model,
        dvi.MeanFieldGuide(model),
        pyro.optim.ClippedAdam({"lr": 1e-6, "clip_norm": 1e4}),
        dvi.TaylorELBO(),
    )
    dvi.fit(svi, [(x, X[:, 0])], 1, progress=False)  # a warning would be an error


def test_the_share_is_that_of_the_gradients():
    """Of one weight and one bias at zero: the clamp of 10 acts on the weight's mean only."""
    [warning] = said(pyro.optim.ClippedAdam({"lr": 1e-6}))
    pyro.clear_param_store()
    torch.manual_seed(0)
    model = dvi.regressor(dvi.to_bayesian_(nn.Linear(1, 1)), num_data=100)
    guide = dvi.MeanFieldGuide(model)
    guide(*LOADER[0])
    acted = elements = 0
    for batch in LOADER:
        guide.zero_grad()
        dvi.TaylorELBO()(model, guide)(*batch).backward()
        gradients = torch.cat([p.grad.flatten() for p in guide.parameters()])
        acted, elements = acted + int((gradients.abs() >= 10).sum()), elements + len(gradients)
    assert f"changed {acted / elements:.0%} of them" in warning


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
    assert "weight decay" in warning and "scales" in warning and "leave it out" in warning
