# SPDX-License-Identifier: Apache-2.0
"""Arguments of models, also below handlers."""

from functools import partial

from pyro import poutine
from torch import nn

from pyro_dvi.signatures import keyword_only, parameter_names, with_missing


class Model(nn.Module):
    def forward(self, x, y, *, weight=1.0):
        return x


def test_handlers_of_pyro_have_the_signature_of_their_model():
    model = poutine.mask(poutine.scale(Model(), scale=2.0), mask=True)
    assert parameter_names(model, 2) == ["x", "y"]
    assert keyword_only(model) == ["weight"]
    assert with_missing(model, (1,)) == (1, None)
    assert with_missing(partial(Model().forward, 1), ()) == (None,)
