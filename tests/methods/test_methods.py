# SPDX-License-Identifier: Apache-2.0
"""A method in one object does what is written by hand, and leaves everything else alone."""

from dataclasses import replace
from functools import partial
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.bayesian import Heteroscedastic, LearnedScale, init_to_module
from pyro_dvi.errors import ArgumentError, CheckpointError, DataError, UnsupportedError
from pyro_dvi.laplace import ByValidation, KroneckerFactored
from pyro_dvi.predictive import AtMean

EPOCHS = 8
METHODS = {
    "vl": dvi.VariationalLaplace(),
    "moments": dvi.MomentPropagation(),
    "mean-field moments": dvi.MomentPropagation(posterior=dvi.MeanFieldGuide),
    "vogn": dvi.NaturalGradients(),
    "ivon": dvi.NaturalGradients(by=dvi.IVON),
    "noisy k-fac": dvi.NaturalGradients(by=dvi.NoisyKFAC),
    "laplace": dvi.Laplace(),
    "map": dvi.MAP(),
}


def rows(count, seed, labels=True):
    x = torch.randn(count, 3, generator=torch.Generator().manual_seed(seed))
    return x, x.argmax(1) if labels else x.sum(1)


def loader(labels=True):
    return DataLoader(TensorDataset(*rows(60, 0, labels)), batch_size=25, shuffle=True)


def network(outputs=3):
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, outputs))


def fitted(name, net=None, **options):
    options = {"progress": False} | options
    return METHODS[name].fit(network() if net is None else net, loader(), EPOCHS, **options)


# By hand --------------------------------------------------------------------------------------------------------------


def by_hand(make_guide, elbo, optimizer=None):
    pyro.clear_param_store()
    net = network()
    model = dvi.classifier(dvi.to_bayesian_(net, 1.0), 60)
    if optimizer is None:
        schedule = partial(CosineAnnealingLR, T_max=EPOCHS)
        optimizer = dvi.optim.Adam(dvi.optim.learning_rates(0.01), scheduler=schedule)
    pyro.set_rng_seed(0)
    guide = make_guide(model)
    dvi.fit(SVI(model, guide, optimizer, loss=elbo), loader(), EPOCHS, progress=False)
    return model, guide


def laplace_by_hand():
    model, guide = by_hand(dvi.LaplaceGuide, dvi.TaylorELBO())
    guide.polish(loader(), subset="net.2.*", progress=False)
    guide.fit(loader(), subset="net.2.*")
    return model, guide


HANDS = {
    "vl": partial(by_hand, dvi.MeanFieldGuide, dvi.TaylorELBO(temperature=0.1)),
    "moments": partial(by_hand, dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO(temperature=0.1)),
    "mean-field moments": partial(by_hand, dvi.MeanFieldGuide, dvi.MomentPropagationELBO(temperature=0.1)),
    "vogn": lambda: by_hand(dvi.NaturalGradientGuide, dvi.NaturalGradientELBO(temperature=0.1), dvi.VOGN({})),
    "ivon": lambda: by_hand(dvi.NaturalGradientGuide, dvi.NaturalGradientELBO(temperature=0.1), dvi.IVON({})),
    "noisy k-fac": lambda: by_hand(
        dvi.KroneckerGuide, dvi.NaturalGradientELBO(temperature=0.1), dvi.NoisyKFAC({})
    ),
    "laplace": laplace_by_hand,
    "map": partial(by_hand, partial(AutoDelta, init_loc_fn=init_to_module), dvi.SampledELBO()),
}


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


# Models ---------------------------------------------------------------------------------------------------------------


class Slope(PyroModule):
    def __init__(self):
        super().__init__()
        self.w = PyroSample(dist.Normal(0.0, 1.0).expand([3]).to_event(1))

    def forward(self, x, y=None):
        mean = x @ self.w
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("obs", dist.Normal(mean, 0.1), obs=y)


def slope(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    with pyro.plate("data", 60, subsample_size=len(x)):
        return pyro.sample("obs", dist.Normal(x @ w, 0.1), obs=y)


@pytest.mark.parametrize("model", [Slope(), slope, nn.Linear(3, 1), dvi.to_bayesian_(nn.Linear(3, 1), 2.0)])
def test_any_model_with_numbers(model):
    posterior = dvi.VariationalLaplace(lr=0.1).fit(model, loader(labels=False), 60, progress=False)
    assert posterior.predict(rows(20, 1, labels=False)).metrics()["rmse"] < 0.1
    assert (posterior.model is model) == (model is slope)


def test_the_prior_the_noise_and_the_number_of_data():
    def prior_and_plate(posterior, batch):
        trace = pyro.poutine.trace(posterior.model).get_trace(*batch)
        return trace.nodes["net.weight"]["fn"].base_dist.scale.max(), trace.nodes["obs"]["scale"]

    batches = list(loader(labels=False))  # of 25, 25 and 10 rows
    method = dvi.VariationalLaplace(prior_scale=0.3, noise_scale=2.0)
    posterior = method.fit(nn.Linear(3, 1), batches, 1, progress=False)
    scale, plate = prior_and_plate(posterior, batches[0])
    assert float(scale) == pytest.approx(0.3) and plate == 60 / 25
    assert posterior.predict(rows(4, 1)[0]).aleatoric.tolist() == pytest.approx([4.0] * 4)
    learned = dvi.VariationalLaplace(noise_scale=LearnedScale(0.5)).fit(
        nn.Linear(3, 1), batches, 1, progress=False
    )
    assert float(learned.model.noise_scale.detach()) == pytest.approx(0.5, rel=0.1)
    by_input = dvi.VariationalLaplace(noise_scale=Heteroscedastic()).fit(
        nn.Linear(3, 2), batches, 1, progress=False
    )
    assert len(set(by_input.predict(rows(4, 1)[0]).aleatoric.tolist())) == 4


@pytest.mark.parametrize(
    "batches",
    [
        [torch.ones(4, 3)],
        [{"x": torch.ones(4, 3)}],
        [(torch.ones(4, 3), 1, 2)],
        [(torch.ones(4, 3), 1)],
        iter([]),
        [(torch.ones(3), torch.tensor(1))],
    ],
)
def test_batches_of_a_network_are_inputs_and_targets(batches):
    with pytest.raises(DataError, match="a network needs batches .* pass a Pyro model|is an iterator"):
        dvi.MAP().fit(network(), batches, 1, progress=False)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(2, 3)

    def forward(self, first, second):
        return self.first(first) + self.second(second)


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("name", ["vl", "moments", "vogn", "laplace"])
def test_a_network_with_several_inputs(name, named):
    """In a tuple beside the labels, or by name, as data sets of Hugging Face give them."""
    (first, labels), second = rows(60, 0), torch.randn(60, 2, generator=torch.Generator().manual_seed(1))
    data: Any
    if named:
        data = {"first": first, "second": second, "labels": labels}
        examples = [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]
    else:
        data = (first, second), labels
        examples = list(zip(zip(first, second, strict=True), labels, strict=True))
    method = replace(METHODS[name], lr=0.1)
    posterior = method.fit(TwoInputs(), DataLoader(examples, 20, shuffle=True), 20, progress=False)
    assert posterior.model.num_data == 60
    assert posterior.predict(data, seed=0).metrics()["accuracy"] > 0.6


def grouped(x, group, count=None):
    """A hierarchy with a learned scale of its groups, and counts."""
    spread = pyro.sample("spread", dist.HalfNormal(1.0))
    with pyro.plate("groups", 3):
        level = pyro.sample("level", dist.Normal(0.0, spread))
    with pyro.plate("data", 60, subsample_size=len(x)):
        return pyro.sample("count", dist.Poisson((level[group] + x[:, 0]).exp()), obs=count)


@pytest.mark.parametrize("name", ["vl", "moments"])
def test_a_pyro_model_is_not_tempered_unless_asked(name):
    x, group = rows(60, 0)
    data = x, group, torch.poisson(x[:, 0].exp(), generator=torch.Generator().manual_seed(1))
    posterior = METHODS[name].fit(grouped, DataLoader(TensorDataset(*data), 20), 10, progress=False)
    assert posterior.elbo.temperature == posterior.method.temperature == 1.0
    assert posterior.predict(data).mean.shape == (60,)
    assert fitted(name).method.temperature == 0.1 == fitted(name).elbo.temperature
    cold = replace(METHODS[name], temperature=0.5)
    assert cold.fit(slope, loader(labels=False), 1, progress=False).elbo.temperature == 0.5


# Afterwards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_saved_and_read_again(name, tmp_path):
    test, path = rows(20, 1), tmp_path / "posterior.pt"
    posterior = fitted(name)
    posterior.save(path)
    read = METHODS[name].load(path, network(), loader())
    expected = posterior.predict(test, seed=0).probabilities
    assert torch.equal(read.predict(test, seed=0).probabilities, expected)
    assert read.history["loss"] == posterior.history["loss"]
    with pytest.raises(CheckpointError):
        METHODS["moments" if name == "vl" else "vl"].load(path, network(), loader())


def test_exported_and_handed_to_arviz():
    posterior, x = fitted("vl"), rows(20, 1)[0]
    module = posterior.export(x[:2])
    torch.testing.assert_close(module(x).mean, posterior.predict(x).probabilities)
    assert posterior.to_arviz(rows(20, 1), seed=0)["posterior"].sizes["chain"] == 1
    assert fitted("vogn").predict(x, AtMean()).method == AtMean()


def test_going_on_by_hand():
    posterior, (x, y) = fitted("vl"), rows(60, 0)
    before = {name: value.clone() for name, value in posterior.guide.named_parameters()}
    with posterior.in_store():
        optimizer = dvi.optim.Adam({"lr": 0.01})
        SVI(posterior.model, posterior.guide, optimizer, loss=posterior.elbo).step(x, y)
    assert any(not torch.equal(before[name], value) for name, value in posterior.guide.named_parameters())
    assert list(pyro.get_param_store()) == []


# Settings by validation data ------------------------------------------------------------------------------------------


def test_settings_that_are_best_on_validation_data(tmp_path):
    space = {"lr": (1e-4, 0.01, 3.0), "temperature": (0.1,)}
    posterior = dvi.VariationalLaplace().tune(
        network(), loader(), EPOCHS, validation=rows(40, 2), space=space, max_trainings=3, progress=False
    )
    assert posterior.method == dvi.VariationalLaplace(lr=0.01, temperature=0.1)
    assert posterior.tuned.table["lr"] == [1e-4, 0.01, 3.0]
    by_hand = posterior.method.fit(network(), loader(), EPOCHS, progress=False)
    test = rows(20, 1)
    assert torch.equal(posterior.predict(test).probabilities, by_hand.predict(test).probabilities)
    assert posterior.history["loss"] == by_hand.history["loss"]
    assert list(pyro.get_param_store()) == []
    posterior.save(tmp_path / "tuned.pt")
    read = posterior.method.load(tmp_path / "tuned.pt", network(), loader())
    assert torch.equal(read.predict(test).probabilities, by_hand.predict(test).probabilities)


@pytest.mark.parametrize("name", METHODS)
def test_the_space_of_each_method_names_its_arguments(name):
    method = METHODS[name]
    for setting, values in method.space.items():
        assert getattr(replace(method, **{setting: values[0]}), setting) == values[0]
    with pytest.raises(ArgumentError, match=r"has no setting 'rate' to tune; choose from \['"):
        method.tune(network(), loader(), 1, validation=rows(9, 2), space={"rate": (0.1, 0.2)})


# Laplace --------------------------------------------------------------------------------------------------------------


def test_a_trained_network_gets_a_gaussian_around_its_weights():
    net = network(1)
    data = rows(60, 0, labels=False)
    adam = torch.optim.Adam(net.parameters(), 0.02)
    for _ in range(200):
        adam.zero_grad()
        nn.functional.mse_loss(net(data[0])[:, 0], data[1]).backward()
        adam.step()
    x = rows(20, 1)[0]
    everything = dvi.Laplace(
        layers=None, covariance=KroneckerFactored(), noise_scale=0.1, unconverged="accept"
    )
    posterior = everything.fit(net, loader(labels=False), progress=False)
    near, far = posterior.predict(x).epistemic, posterior.predict(10 * x).epistemic
    assert float(far.mean()) > 2 * float(near.mean()) > 0
    assert posterior.history.epoch == 0 and "KroneckerPosterior" in repr(posterior.guide)
    last = dvi.Laplace(noise_scale=0.1).fit(net, loader(labels=False), progress=False)
    assert torch.equal(last.guide.median()["net.0.weight"], net[0].weight)
    polished = last.guide.median()["net.2.weight"] - net[2].weight
    assert 0 < float(polished.detach().abs().max()) < 1


@pytest.mark.filterwarnings("ignore:the best value of PriorPrecision")
@pytest.mark.parametrize(
    "as_given", [tuple, lambda pair: [pair], lambda pair: DataLoader(TensorDataset(*pair), 40)]
)
def test_the_prior_is_tuned_on_validation_data(as_given):
    def gaussian(validation):
        return dvi.Laplace().fit(network(), loader(), EPOCHS, validation=validation, progress=False)

    held_out, test = rows(40, 2), rows(20, 1)
    plain, tuned = gaussian(None), gaussian(as_given(held_out))
    with plain.in_store():
        plain.guide.tune(loader(), criterion=ByValidation([held_out]), progress=False)
    assert plain.guide.scale_factors == pytest.approx(tuned.guide.scale_factors) != {}
    torch.testing.assert_close(plain.predict(test).probabilities, tuned.predict(test).probabilities)


def test_there_is_no_last_layer():
    with pytest.raises(ArgumentError, match="needs a network with a Linear layer: pass names of sites"):
        dvi.Laplace().fit(slope, loader(labels=False), progress=False)


def test_a_data_set_is_no_loader():
    data = TensorDataset(*rows(60, 0))
    with pytest.raises(ArgumentError, match="loader must yield batches"):
        dvi.MAP().fit(network(), data, 1, progress=False)
    with pytest.raises(ArgumentError, match="validation must yield batches"):
        dvi.Laplace().fit(network(), loader(), validation=data, progress=False)


# Ensembles ------------------------------------------------------------------------------------------------------------


def test_members_begin_at_their_own_weights():
    posterior = dvi.Ensemble(dvi.MAP(), 3).fit(network(), loader(), EPOCHS, progress=False)
    prediction = posterior.predict(rows(20, 1), keep_draws=True)
    members = prediction.draws["probabilities"]
    assert len(members) == 3 and float(members.std(0).min()) > 0
    torch.testing.assert_close(members.mean(0), prediction.probabilities)
    assert posterior.to_arviz(rows(20, 1))["posterior_predictive"].sizes["draw"] >= 3
    with pytest.raises(UnsupportedError, match="use torch.save"):
        posterior.save("ensemble.pt")


@pytest.mark.parametrize("model", [slope, Slope(), nn.Tanh()])
def test_members_need_new_weights(model):
    with pytest.raises(ArgumentError, match="reset_parameters.*train_ensemble"):
        dvi.Ensemble().fit(model, loader(labels=False), 1, progress=False)


@pytest.mark.parametrize("named", [False, True])
def test_the_noise_of_a_trained_network_is_that_of_its_residuals(named):
    """No training adapts a learned scale to a network that is trained already; one that is given stays."""
    x = torch.linspace(-1, 1, 200, dtype=torch.float64)[:, None]
    y = 2 * x + 0.1 * torch.randn(200, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    net = nn.Linear(1, 1).double()
    with torch.no_grad():
        net.weight.fill_(2.0), net.bias.zero_()
    data: Any = TensorDataset(x, y)
    loader = DataLoader([{"input": a, "y": b} for a, b in data] if named else data, 50)
    posterior = dvi.Laplace().fit(net, loader, progress=False)
    residuals = (y - 2 * x).square().mean().sqrt()
    assert torch.allclose(posterior.model.noise_scale, residuals, rtol=1e-6)
    given = dvi.Laplace(noise_scale=0.5).fit(net, loader, progress=False)
    assert given.model.noise_scale == 0.5
