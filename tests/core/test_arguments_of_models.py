# SPDX-License-Identifier: Apache-2.0
"""Arguments of models, also below handlers."""

from functools import partial

import pytest
from pyro import poutine
from torch import nn

from pyro_dvi.core.arguments import (
    by_position,
    keyword_only,
    misfit,
    parameter_names,
    with_missing,
)
from pyro_dvi.errors import UnsupportedError


class Model(nn.Module):
    def forward(self, x, y, *, weight=1.0):
        return x


def test_handlers_of_pyro_have_the_signature_of_their_model():
    model = poutine.mask(poutine.scale(Model(), scale=2.0), mask=True)
    assert parameter_names(model, 2) == ["x", "y"]
    assert keyword_only(model) == ["weight"]
    assert with_missing(model, (1,)) == (1, None)
    assert with_missing(partial(Model().forward, 1), ()) == (None,)


def test_arguments_that_a_model_does_not_take_are_told_with_those_that_it_takes():
    model = poutine.scale(Model(), scale=2.0)
    assert misfit(model, (1, 2), {"weight": 3.0}) is None
    assert misfit(model, (1,), {"y": 2}) is None
    assert misfit(model, (1, 2, 3), {}) == "too many positional arguments; it takes (x, y, weight)"
    assert misfit(model, (1,), {}) == "missing a required argument: 'y'; it takes (x, y, weight)"
    assert "unexpected keyword argument 'label'" in misfit(model, (1, 2), {"label": 2})
    assert misfit(lambda *args, **kwargs: None, (1, 2, 3), {"label": 2}) is None
    assert misfit(getattr, (), {}) is None  # signatures of builtins are not always known


def test_named_arguments_come_in_the_order_of_positions():
    def model(x, scale, y=None, *, offset=0):
        return x, scale, y, offset

    assert by_position(model, (1,), {"y": 3, "scale": 2}) == (1, 2, 3)
    assert by_position(model, (1, 2), {}) == (1, 2)
    with pytest.raises(UnsupportedError, match=r"arguments \['offset'\].* are keyword-only"):
        by_position(model, (1, 2), {"offset": 4})
