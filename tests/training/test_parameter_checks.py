# SPDX-License-Identifier: Apache-2.0
"""A guide and a model that share names of the store with another training are found out, also when they predict."""

import pyro
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.optim import Adam
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.bayesian import LearnedScale
from pyro_dvi.errors import GuideError
from pyro_dvi.training import fit
from pyro_dvi.training.random_state import preserve_random_state
from tests.training.problems import (
    sequence,
    svi_of,
)

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
    with pytest.raises(GuideError, match="'noise_scale', which this model uses, because another"):
        use(*first)


def test_scopes_keep_them_apart():
    with pyro.get_param_store().scope() as kept:
        first = trained(1.0)
        before = dvi.predict(*first, X).variance
    with pyro.get_param_store().scope():
        trained(-1.0)
    with pyro.get_param_store().scope(kept):
        assert torch.equal(dvi.predict(*first, X).variance, before)


@pytest.mark.every(2)
@pytest.mark.parametrize("ensemble_first", [False, True])
def test_an_ensemble_beside_one_network_of_the_same_names(ensemble_first):
    """The script of a comparison: each is used with its own parameters, whichever was trained last."""

    def ensemble():
        return dvi.train_ensemble(lambda: trained(-1.0), num_members=2, progress=False)

    def single():
        with preserve_random_state():
            torch.manual_seed(3)
            return trained(1.0)

    def used(model, guide):  # what depends on weights in modules, and on the noise scale in the store
        draws = dvi.to_arviz(model, guide, X, 4, seed=0)["posterior"]["net.weight"]
        serve = dvi.predictor(model, guide, X)
        return dvi.predict(model, guide, X).variance, serve(X).variance, torch.as_tensor(draws.values)

    alone = []
    for train in (single, ensemble):
        with pyro.get_param_store().scope():
            alone.append(used(*train()))
    assert not torch.allclose(alone[0][0], alone[1][0])
    if ensemble_first:
        many, one = ensemble(), single()
    else:
        one, many = single(), ensemble()
    for posterior, expected in zip((one, many), alone, strict=True):
        assert all(map(torch.equal, used(*posterior), expected))


def test_another_guide_of_the_same_model_takes_nothing_away():
    model, guide = trained(1.0)
    other = dvi.NaturalGradientGuide(model)
    svi = SVI(model, other, dvi.VOGN({}), loss=dvi.NaturalGradientELBO())
    dvi.fit(svi, [(X, X)], 2, progress=False)
    dvi.predict(model, guide, X)
    dvi.predict(model, other, X)


def test_a_second_guide_of_the_same_name_is_refused():
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 1, progress=False)
    with pytest.raises(GuideError, match="store already contains 'AutoNormal.locs.*clear_param_store"):
        fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 1, progress=False)


def test_a_second_guide_that_adopted_parameters_is_refused():
    first = svi_of("AutoNormal + Trace_ELBO")
    fit(first, sequence(), 1, progress=False)
    second = svi_of("AutoNormal + Trace_ELBO")
    second.guide(*sequence()[0])
    with pytest.raises(GuideError, match="belongs to another AutoNormal|another parameter under the name"):
        fit(second, sequence(), 1, progress=False)


def test_a_second_model_of_the_same_names_is_refused():
    first = svi_of("AutoNormal + Trace_ELBO")
    fit(first, sequence(), 1, progress=False)
    with pytest.raises(GuideError, match=r"name 'first\.weight', which this model uses"):
        fit(svi_of("MeanFieldGuide + TaylorELBO"), sequence(), 1, progress=False)


def test_two_guides_of_one_model_may_share_it():
    first = svi_of("AutoNormal + Trace_ELBO")
    fit(first, sequence(), 1, progress=False)
    guide = pyro.infer.autoguide.AutoDelta(first.model)
    fit(SVI(first.model, guide, Adam({"lr": 0.01}), Trace_ELBO()), sequence(), 1, progress=False)
    fit(first, sequence(), 1, progress=False)


def test_a_new_start_after_clearing():
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 1, progress=False)
    pyro.clear_param_store()
    fit(svi_of("AutoNormal + Trace_ELBO"), sequence(), 1, progress=False)


def test_a_copy_in_the_store_is_found():
    svi = svi_of("AutoNormal + Trace_ELBO")
    svi.model.first.weight = nn.Parameter(torch.randn(2, 4).t())
    with pytest.raises(Exception, match="not contiguous"):
        fit(svi, sequence(), 2, progress=False)
