# SPDX-License-Identifier: Apache-2.0
"""A loss is differentiated as it is: not divided by N, not by GradScaler, and once for each step."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.amp import GradScaler

import pyro_dvi as dvi
from pyro_dvi.errors import GuideError, UnsupportedError
from pyro_dvi.natural_gradients.updates import VOGNOptimizer

X = torch.linspace(-1, 1, 8)


def model(x: Tensor) -> None:
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", 8):
        pyro.sample("y", dist.Normal(w * x, 1.0), obs=x)


@pytest.fixture
def module():
    with pyro.settings.context(module_local_params=True):
        guide = dvi.NaturalGradientGuide(model)
        guide.initialize(X)
        yield dvi.NaturalGradientELBO()(model, guide)


def test_a_divided_loss_is_refused(module):
    with pytest.raises(UnsupportedError, match=r"multiplied by 0\.125 .*divides by N"):
        (module(X) / 8).backward()


def test_gradient_scalers_are_refused(module):
    scaler = GradScaler("cpu", init_scale=512.0)
    with pytest.raises(UnsupportedError, match=r"multiplied by 512 .*GradScaler"):
        scaler.scale(module(X)).backward()


def test_several_backward_passes_for_a_step_are_refused(module):
    module(X).backward()
    with pytest.raises(GuideError, match="take an optimizer step after each backward pass"):
        module(X)
    VOGNOptimizer(module.parameters()).zero_grad()
    module(X).backward()
