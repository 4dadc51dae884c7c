# SPDX-License-Identifier: Apache-2.0
"""A method in one object does what is written by hand, and leaves everything else alone."""

import warnings
from dataclasses import replace
from functools import partial

import pyro
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch.optim.lr_scheduler import CosineAnnealingLR

import pyro_dvi as dvi
from pyro_dvi.bayesian import init_to_module
from pyro_dvi.errors import CheckpointError
from pyro_dvi.laplace import ByTrainingLoss
from pyro_dvi.predictive import AtMean
from tests.methods.cases import EPOCHS, METHODS, fitted, loader, network, rows

# By hand --------------------------------------------------------------------------------------------------------------


def by_hand(make_guide, elbo, optimizer=None, prior_scale=0.5):
    pyro.clear_param_store()
    net = network()
    model = dvi.classifier(dvi.to_bayesian_(net, prior_scale), 60)
    if optimizer is None:
        schedule = partial(CosineAnnealingLR, T_max=EPOCHS)
        optimizer = dvi.optim.Adam(dvi.optim.learning_rates(0.01), scheduler=schedule)
    pyro.set_rng_seed(0)
    guide = make_guide(model)
    dvi.fit(SVI(model, guide, optimizer, loss=elbo), loader(), EPOCHS, progress=False)
    return model, guide


def laplace_by_hand():
    model, guide = by_hand(dvi.LaplaceGuide, dvi.TaylorELBO(), prior_scale=1.0)
    values = torch.logspace(0, 6, 25, dtype=torch.float64)
    options = {"subset": "net.2.*", "unconverged": "accept", "progress": False, "values": values}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about values at the end of the grid
        guide.tune(loader(), criterion=ByTrainingLoss(), **options)
    return model, guide


HANDS = {
    "vl": partial(by_hand, dvi.MeanFieldGuide, dvi.TaylorELBO(temperature=0.02)),
    "moments": partial(
        by_hand, dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO(temperature=0.02), prior_scale=1.0
    ),
    "mean-field moments": partial(
        by_hand, dvi.MeanFieldGuide, dvi.MomentPropagationELBO(temperature=0.02), prior_scale=1.0
    ),
    "vogn": lambda: by_hand(
        dvi.NaturalGradientGuide, dvi.NaturalGradientELBO(temperature=0.02), dvi.VOGN({})
    ),
    "ivon": lambda: by_hand(
        dvi.NaturalGradientGuide, dvi.NaturalGradientELBO(temperature=0.02), dvi.IVON({})
    ),
    "noisy k-fac": lambda: by_hand(
        dvi.KroneckerGuide, dvi.NaturalGradientELBO(temperature=0.02), dvi.NoisyKFAC({})
    ),
    "laplace": laplace_by_hand,
    "map": partial(by_hand, partial(AutoDelta, init_loc_fn=init_to_module), dvi.SampledELBO()),
}


@pytest.mark.every(3)
@pytest.mark.parametrize("name", METHODS)
def test_it_is_what_one_writes_by_hand(name):
    test = rows(20, 1)
    posterior = fitted(name)
    expected = dvi.predict(*HANDS[name](), test, seed=0)
    found = posterior.predict(test, seed=0)
    torch.testing.assert_close(found.probabilities, expected.probabilities, rtol=1e-6, atol=1e-7)
    assert found.method == expected.method
    assert posterior.history.epoch == EPOCHS
    assert posterior.svi.guide is posterior.guide and type(posterior.elbo).__module__.startswith("pyro_dvi")


@pytest.mark.every(3)
@pytest.mark.parametrize("name", METHODS)
def test_what_is_outside_stays_as_it_is(name):
    """The network, Pyro's store and random numbers; and two posteriors do not meet in the store."""
    pyro.get_param_store().clear()
    pyro.param("mine", torch.ones(()))
    net = network()
    before, random = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    one = fitted(name, net)
    test = rows(20, 1)
    first = one.predict(test, seed=0).probabilities
    other = replace(METHODS[name], kl_weight=0.5).fit(net, loader(), EPOCHS, seed=1, progress=False)
    assert not torch.equal(other.predict(test, seed=0).probabilities, first)
    assert torch.equal(one.predict(test, seed=0).probabilities, first)
    assert list(pyro.get_param_store()) == ["mine"]
    assert torch.equal(torch.get_rng_state(), random)
    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())


# Afterwards -----------------------------------------------------------------------------------------------------------


@pytest.mark.every(3)
@pytest.mark.parametrize("name", METHODS)
def test_saved_and_read_again(name, tmp_path):
    test, path = rows(20, 1), tmp_path / "posterior.pt"
    posterior = fitted(name)
    posterior.save(path)
    read = METHODS[name].load(path, network(), loader())
    expected = posterior.predict(test, seed=0).probabilities
    assert torch.equal(read.predict(test, seed=0).probabilities, expected)
    assert read.history["loss"] == posterior.history["loss"]
    # The default temperature depends on the length of the training, which load cannot know.
    replace(METHODS[name], temperature=0.5).fit(network(), loader(), 1, progress=False).save(path)
    again = METHODS[name].load(path, network(), loader())
    assert again.method.temperature == (METHODS[name].temperature or 0.5)
    with pytest.raises(CheckpointError):
        METHODS["moments" if name == "vl" else "vl"].load(path, network(), loader())


@pytest.mark.filterwarnings("ignore:.* scores .*point estimate")
def test_exported_and_handed_to_arviz():
    posterior, x = fitted("vl"), rows(20, 1)[0]
    module = posterior.export(x[:2])
    torch.testing.assert_close(module(x).mean, posterior.predict(x).probabilities)
    assert posterior.to_arviz(rows(20, 1), seed=0)["posterior"].sizes["chain"] == 1
    assert fitted("vogn").predict(x, AtMean()).method == AtMean()
    assert "tensor(" not in repr(posterior)


def test_going_on_by_hand():
    posterior, (x, y) = fitted("vl"), rows(60, 0)
    before = {name: value.clone() for name, value in posterior.guide.named_parameters()}
    with posterior.in_store():
        optimizer = dvi.optim.Adam({"lr": 0.01})
        SVI(posterior.model, posterior.guide, optimizer, loss=posterior.elbo).step(x, y)
    assert any(not torch.equal(before[name], value) for name, value in posterior.guide.named_parameters())
    assert list(pyro.get_param_store()) == []
