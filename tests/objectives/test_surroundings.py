# SPDX-License-Identifier: Apache-2.0
"""What a look notices about modules that a step uses."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.objectives.surroundings import Surroundings, UsedParts

CHANGES = {
    "a hook": lambda net: net.register_forward_hook(lambda *_: None),
    "other hooks": lambda net: setattr(net, "_forward_hooks", OrderedDict()),
    "a resized buffer": lambda net: net.index.resize_(2),
    "an attribute": lambda net: setattr(net, "slope", 2.0),
    "a new attribute": lambda net: setattr(net, "other", 2.0),
    "a module": lambda net: setattr(net, "inner", nn.Tanh()),
    "the mode": lambda net: net.inner.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change):
    net: Any = nn.Linear(2, 2)
    net.inner, net.slope = nn.ReLU(), 1.0
    net.register_buffer("index", torch.arange(4.0))
    used = UsedParts()
    used.modules[net] = None
    surroundings = Surroundings(used, (net, net), dvi.TaylorELBO())
    assert surroundings.look()
    net.slope = 1.0 + 0.0  # an equal value is no change
    assert surroundings.look()
    CHANGES[change](net)
    assert not surroundings.look()
