# SPDX-License-Identifier: Apache-2.0
"""A model whose names another one was trained under since does not predict with the other's values."""

import pyro
import pytest
import torch
from pyro.infer import SVI
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.bayesian import LearnedScale
from pyro_dvi.errors import GuideError

X = torch.linspace(-1, 1, 20)[:, None]


def trained(slope: float):
    model = dvi.regressor(dvi.to_bayesian_(nn.Linear(1, 1)), 20, noise_scale=LearnedScale(0.3))
    guide = dvi.MeanFieldGuide(model)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), loss=dvi.TaylorELBO())
    dvi.fit(svi, [(X, slope * X)], 3, progress=False)
    return model, guide


@pytest.mark.parametrize(
    "use",
    [lambda m, g: dvi.predict(m, g, X), lambda m, g: dvi.to_arviz(m, g, X, 5)],
    ids=["predict", "export"],
)
def test_a_later_training_of_the_same_names_is_found_out(use):
    first = trained(1.0)
    pyro.clear_param_store()
    second = trained(-1.0)
    use(*second)
    with pytest.raises(GuideError, match="'noise_scale' of this model: another"):
        use(*first)


def test_scopes_keep_them_apart():
    with pyro.get_param_store().scope() as kept:
        first = trained(1.0)
        before = dvi.predict(*first, X).variance
    with pyro.get_param_store().scope():
        trained(-1.0)
    with pyro.get_param_store().scope(kept):
        assert torch.equal(dvi.predict(*first, X).variance, before)


def test_another_guide_of_the_same_model_takes_nothing_away():
    model, guide = trained(1.0)
    other = dvi.NaturalGradientGuide(model)
    svi = SVI(model, other, dvi.optim.VOGN({}), loss=dvi.NaturalGradientELBO())
    dvi.fit(svi, [(X, X)], 2, progress=False)
    dvi.predict(model, guide, X)
    dvi.predict(model, other, X)
