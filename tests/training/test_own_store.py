# SPDX-License-Identifier: Apache-2.0
"""Each posterior keeps its own parameters, wherever its model and guide are called."""

import copy
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive
from torch import nn

import pyro_dvi as dvi
from tests.methods.cases import METHODS, Slope, rows, slope


@pytest.fixture
def empty_store():
    with pyro.get_param_store().scope():
        yield


X = rows(60, 0)[0]
BATCH = torch.eye(3)


def weights_of(posterior):
    return {name: value.clone() for name, value in posterior.guide.named_parameters()}


def up_and_down(name):
    """Posteriors of y = 2 sum(x) and y = -2 sum(x)."""
    for sign in (2, -2):
        net = nn.Linear(3, 1)
        with torch.no_grad():
            net.weight.fill_(sign)
        yield METHODS[name].fit(net, [(X, sign * X.sum(1))], 2, progress=False)


@pytest.mark.every(6)
@pytest.mark.filterwarnings("ignore:weights are drawn from a Laplace posterior")
@pytest.mark.parametrize("name", ["vl", "moments", "vogn", "noisy k-fac", "laplace", "map"])
def test_two_posteriors_called_outside_their_stores(name, empty_store):
    posteriors = list(up_and_down(name))
    before = [(weights_of(p), p.predict(BATCH, seed=0).mean) for p in posteriors]
    for posterior, sign in zip(posteriors, (2, -2), strict=True):
        predictive = Predictive(posterior.model, guide=posterior.guide, num_samples=500)
        for drawn in posterior.guide(BATCH)["net.weight"], predictive(BATCH)["obs"].mean(0):
            expected = torch.full([3], float(sign))
            torch.testing.assert_close(drawn.flatten().detach(), expected, rtol=0, atol=1.2)
    for posterior, (weights, mean) in zip(posteriors, before, strict=True):
        assert all(torch.equal(value, weights[name]) for name, value in posterior.guide.named_parameters())
        assert torch.equal(posterior.predict(BATCH, seed=0).mean, mean)


@pytest.mark.parametrize("model", [Slope(), slope], ids=["module", "function"])
def test_predictive_with_two_posteriors_of_one_model(model, empty_store):
    """Each draws from its own posterior outside its store, and predicts afterwards as before."""
    data = [(X, sign * X.sum(1)) for sign in (2, -2)]
    posteriors = [dvi.VariationalLaplace(lr=0.1).fit(model, [one], 60, progress=False) for one in data]
    before = [p.predict(one, seed=0).mean for p, one in zip(posteriors, data, strict=True)]
    for _ in range(2):
        for posterior, (x, y) in zip(posteriors, data, strict=True):
            drawn = Predictive(posterior.model, guide=posterior.guide, num_samples=100)(x)["obs"]
            assert (drawn.mean(0) - y).square().mean().sqrt() < 0.5
    for posterior, one, mean in zip(posteriors, data, before, strict=True):
        assert torch.equal(posterior.predict(one, seed=0).mean, mean)


def observed(mean, y):
    shift = pyro.sample("shift", dist.Normal(0.0, 0.1))
    with pyro.plate("data", 60, subsample_size=len(mean)):
        return pyro.sample("obs", dist.Normal(mean + shift, 0.1), obs=y)


def reads_parameters(x, y=None):
    return observed(x @ pyro.param("slopes", torch.zeros(3)), y)


OUTSIDE = nn.Linear(3, 1)


def registers_a_network(x, y=None):
    return observed(pyro.module("outside", OUTSIDE)(x).squeeze(-1), y)


def has_a_parameter_and_a_network(x, y=None):
    return observed(pyro.param("slope", torch.ones(())) * OUTSIDE(x).squeeze(-1), y)


@pytest.mark.parametrize("model", [reads_parameters, registers_a_network, has_a_parameter_and_a_network])
def test_functions_that_read_the_store_use_their_own_parameters_anywhere(model, empty_store):
    """Whatever the store holds, or however the calls follow each other."""
    batches = [(X, sign * X.sum(1)) for sign in (2, -2)]
    posteriors = [dvi.MAP(lr=0.1).fit(model, [one], 60, progress=False) for one in batches]
    before = [p.predict(one, seed=0).mean for p, one in zip(posteriors, batches, strict=True)]
    assert (before[0] - before[1]).abs().mean() > 0.3
    for _ in range(2):
        for posterior, one, mean in zip(posteriors, batches, before, strict=True):
            drawn = Predictive(posterior.model, guide=posterior.guide, num_samples=100)(one[0])["obs"]
            assert (drawn.mean(0) - mean).abs().max() < 0.1
            assert torch.equal(posterior.predict(one, seed=0).mean, mean)


def test_going_on_with_a_function_and_fitting_it_anew(empty_store):
    first, second = (
        dvi.MAP(lr=0.1).fit(reads_parameters, [(X, sign * X.sum(1))], 60, progress=False) for sign in (2, -2)
    )
    with first.in_store():
        svi = SVI(first.model, first.guide, dvi.optim.Adam({"lr": 1e-3}), loss=first.elbo)
        dvi.fit(svi, [(X, 2 * X.sum(1))], 2, progress=False)
    rmse = first.predict((X, 2 * X.sum(1))).metrics()["rmse"]
    assert rmse < 0.2
    anew = dvi.MAP(lr=0.1).fit(second.model, [(X, 5 * X.sum(1))], 1, progress=False)
    assert float(anew.store["params"]["slopes"].detach().abs().max()) < 0.2, "it starts as the function does"
    assert second.predict((X, -2 * X.sum(1))).metrics()["rmse"] < 0.2
    assert first.predict((X, 2 * X.sum(1))).metrics()["rmse"] == rmse
    copied = pickle.loads(pickle.dumps(first.model))
    with pyro.get_param_store().scope():
        assert torch.equal(
            pyro.poutine.trace(copied).get_trace(X).nodes["slopes"]["value"], first.store["params"]["slopes"]
        )


def test_a_copy_of_a_model_is_trained_beside_the_original(empty_store):
    first, second = up_and_down("vl")
    first.guide(BATCH), second.guide(BATCH)
    again = dvi.MAP().fit(second.model, [(X, 2 * X.sum(1))], 3, progress=False)
    assert len(again.store["params"]) == 3, "weight, bias and noise"
    assert float(again.model.noise_scale.detach()) != float(second.model.noise_scale.detach())
    guide = copy.deepcopy(second.guide)
    with pyro.get_param_store().scope():
        assert torch.equal(guide.locs.net.weight, second.guide.locs.net.weight)
        guide(BATCH)
        assert "MeanFieldGuide.locs.net.weight" in pyro.get_param_store()


def test_going_on_outside_the_store(empty_store):
    posterior, _ = up_and_down("vl")
    before = weights_of(posterior)
    svi = SVI(posterior.model, posterior.guide, dvi.optim.Adam({"lr": 0.1}), loss=posterior.elbo)
    dvi.fit(svi, [(X, 2 * X.sum(1))], 3, progress=False)
    assert all(not torch.equal(before[k], value) for k, value in posterior.guide.named_parameters())
    stored = pyro.get_param_store()._params["MeanFieldGuide.locs.net.weight"]
    assert stored is posterior.guide.locs.net.weight_unconstrained


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ["vl", "moments", "vogn", "map"])
@pytest.mark.parametrize("registered", [False, True])
def test_two_fits_of_a_function_that_calls_one_network(name, registered, empty_store):
    """Running statistics and deterministic weights are those of each fit, and the network stays as it was."""
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), dvi.to_bayesian_(nn.Linear(4, 1))
    original = copy.deepcopy(body.state_dict())

    def model(x, y=None):
        f = head((pyro.module("body", body) if registered else body)(x)).squeeze(-1)
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("obs", dist.Normal(f, 0.5), obs=y)

    def fitted(shift):
        data = X + shift, X.sum(1)
        posterior = METHODS[name].fit(model, [data], 5, progress=False)
        return data, posterior, posterior.predict(data, seed=0).metrics()["nll"]

    data, first, before = fitted(0.0)
    _, _, other = fitted(20.0)
    assert first.predict(data, seed=0).metrics()["nll"] == before
    assert fitted(20.0)[2] == other  # each fit starts from the same weights
    assert all(torch.equal(value, original[key]) for key, value in body.state_dict().items())
    with first.in_store():
        assert not torch.equal(body[1].running_mean, original["1.running_mean"])
        assert torch.equal(body[0].weight, original["0.weight"]) != registered


@pytest.mark.slow
def test_a_search_for_settings_of_a_function_keeps_the_network_of_the_best(empty_store):
    torch.manual_seed(0)
    body, head = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), dvi.to_bayesian_(nn.Linear(4, 1))
    data = X + 5, X.sum(1)

    def model(x, y=None):
        f = head(pyro.module("body", body)(x)).squeeze(-1)
        with pyro.plate("data", 60, subsample_size=len(x)):
            return pyro.sample("obs", dist.Normal(f, 0.5), obs=y)

    space = {"lr": (0.001, 0.05)}
    found = dvi.MAP().tune(model, [data], 30, validation=data, space=space, progress=False)
    alone = [dvi.MAP(lr=lr).fit(model, [data], 30, progress=False) for lr in space["lr"]]
    expected = min(one.predict(data).metrics()["nll"] for one in alone)
    assert found.predict(data).metrics()["nll"] == pytest.approx(expected, rel=1e-6)
    assert found.method.lr == 0.05 and alone[1].predict(data).metrics()["nll"] == pytest.approx(expected)
