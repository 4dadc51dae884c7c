# SPDX-License-Identifier: Apache-2.0
"""Ensembles: how they are trained, and what they are to Pyro and to files."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import AutoDelta
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, DviWarning
from pyro_dvi.training import EnsembleGuide, train_ensemble

X = torch.linspace(-1, 1, 20)[:, None]
Y = X[:, 0].sin()


def build(make_guide=dvi.MeanFieldGuide):
    net = nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Linear(3, 1))
    model = dvi.regressor(dvi.to_bayesian_(net), 20, noise_scale=0.1)
    return model, make_guide(model)


def train(make_guide=dvi.MeanFieldGuide):
    model, guide = build(make_guide)
    svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.02}), loss=dvi.TaylorELBO())
    dvi.fit(svi, [(X, Y)], 3, progress=False)
    return model, guide


def mean_of(guide: EnsembleGuide) -> torch.Tensor:
    return dvi.predict(guide.model, guide, X).mean


@pytest.fixture(scope="module")
def ensemble() -> EnsembleGuide:
    return train_ensemble(train, 3, progress=False)[1]


def test_members_have_starts_of_their_own_and_the_seed_decides(ensemble):
    pyro.get_param_store()["mine"] = torch.ones(1)
    before = torch.get_rng_state()
    _, again = train_ensemble(train, 3, progress=False)
    _, other = train_ensemble(train, 3, seed=1, progress=False)
    assert torch.equal(torch.get_rng_state(), before)
    assert list(pyro.get_param_store()) == ["mine"]
    assert torch.equal(mean_of(again), mean_of(ensemble))
    members = [*again.members, *other.members]  # none of one ensemble is in the other
    centres = torch.stack(
        [dict(m.guide.named_parameters())["locs.net.0.weight_unconstrained"] for m in members]
    )
    assert torch.pdist(centres.flatten(1).detach()).min() > 1e-3


def test_pairs_that_were_trained_before(ensemble):
    """Two guides of one class take turns under the same names in the store, which holds the second one's now."""
    pairs = []
    for seed in range(2):
        pyro.clear_param_store()
        pyro.set_rng_seed(seed)
        pairs.append(train())
    guide = EnsembleGuide(pairs)
    apart = []
    for pair in pairs:
        pyro.clear_param_store()
        apart.append(dvi.predict(*pair, X).mean)
    assert not torch.allclose(*apart)
    torch.testing.assert_close(mean_of(guide), torch.stack(apart).mean(0))


def test_parameters_of_functions_come_from_the_store():
    def model(x, y=None):
        noise = pyro.param("noise", torch.tensor(0.5))
        slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(slope * x[:, 0], noise), obs=y)

    def guide(x, y=None):
        pyro.sample("slope", dist.Delta(pyro.param("mean", torch.tensor(0.0))))

    members = []
    for slope, noise in ((1.0, 0.1), (3.0, 0.2)):
        pyro.clear_param_store()
        pyro.param("mean", torch.tensor(slope))
        pyro.param("noise", torch.tensor(noise))
        members.append(EnsembleGuide([(model, guide)]).members[0])  # as the store is now
    both = EnsembleGuide(members)
    prediction = dvi.predict(both.model, both, torch.ones(1, 1), dvi.Samples(1))
    torch.testing.assert_close(prediction.mean, torch.tensor([2.0]))
    torch.testing.assert_close(prediction.aleatoric, torch.tensor([(0.01 + 0.04) / 2]))
    pyro.param("mean", torch.tensor(7.0))  # of nobody in the ensemble
    drawn = [pyro.poutine.trace(both).get_trace(torch.ones(1, 1)).nodes["slope"]["value"] for _ in range(30)]
    assert {value.item() for value in drawn} == {1.0, 3.0}  # one of them is missing once in 10^9


def test_parameters_that_live_in_modules():
    def train_in_modules():
        model, guide = build()
        elbo = dvi.TaylorELBO()(model, guide)
        elbo(X, Y)
        dvi.fit(elbo, [(X, Y)], 3, optimizer=torch.optim.Adam(elbo.parameters()), progress=False)
        return model, guide

    with pyro.settings.context(module_local_params=True):
        model, guide = train_ensemble(train_in_modules, 2, progress=False)
        each = [dvi.predict(m.model, m.guide, X).mean for m in guide.members]
        torch.testing.assert_close(mean_of(guide), torch.stack(each).mean(0))


def test_a_state_goes_into_a_fresh_ensemble(ensemble, tmp_path):
    torch.save((ensemble.model.state_dict(), ensemble.state_dict()), tmp_path / "state.pt")
    fresh = EnsembleGuide([build() for _ in range(3)])
    for part, state in zip((fresh.model, fresh), torch.load(tmp_path / "state.pt"), strict=True):
        part.load_state_dict(state)
    assert torch.equal(mean_of(fresh), mean_of(ensemble))


def test_a_checkpoint_goes_into_a_fresh_ensemble(ensemble, tmp_path):
    def svi(guide):
        return SVI(guide.model, guide, dvi.optim.Adam({"lr": 0.01}), loss=dvi.TaylorELBO())

    dvi.save(tmp_path / "ensemble.pt", svi(ensemble))
    fresh = EnsembleGuide([build() for _ in range(3)])
    dvi.load(tmp_path / "ensemble.pt", svi(fresh), example=(X, Y))
    assert torch.equal(mean_of(fresh), mean_of(ensemble))


def test_copies_and_pickles(ensemble, tmp_path):
    assert torch.equal(mean_of(copy.deepcopy(ensemble)), mean_of(ensemble))
    torch.save(ensemble, tmp_path / "guide.pt")
    loaded = torch.load(tmp_path / "guide.pt", weights_only=False)
    assert torch.equal(mean_of(loaded), mean_of(ensemble))


def test_another_dtype(ensemble):
    wide = copy.deepcopy(ensemble).double()
    wide.model.double()
    found = dvi.predict(wide.model, wide, X.double()).mean
    torch.testing.assert_close(found, mean_of(ensemble).double(), atol=1e-6, rtol=1e-5)


def test_nothing_moves_in_predictions(ensemble):
    before = copy.deepcopy((ensemble.state_dict(), ensemble.model.state_dict()))
    ensemble.model.train()
    mean_of(ensemble)
    assert ensemble.model.models[0].training
    for then, now in zip(before, (ensemble.state_dict(), ensemble.model.state_dict()), strict=True):
        for name, value in then.items():
            assert not torch.is_tensor(value) or torch.equal(value, now[name])


def test_predictive_of_pyro_draws_members_in_equal_shares(ensemble):
    """Of 300 draws of three members, 5 standard errors."""
    model = ensemble.model.eval()
    draws = Predictive(model, guide=ensemble, num_samples=300)(X)
    counts = torch.bincount(draws["member"].flatten(), minlength=3)
    assert (counts - 100).abs().max() < 5 * (300 * 2 / 9) ** 0.5
    assert draws["obs"].shape == (300, 20)


# Mistakes ---------------------------------------------------------------------------------------------------------


def test_trainings_that_all_start_the_same():
    def seeded():
        pyro.set_rng_seed(0)
        return train()

    with pytest.warns(DviWarning, match="members 0 and 1 have the same parameters"):
        train_ensemble(seeded, 2, progress=False)


def test_one_network_for_all():
    model, guide = build(lambda m: AutoDelta(m, init_loc_fn=dvi.bayesian.init_to_module))

    def again():
        svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.02}), loss=Trace_ELBO())
        dvi.fit(svi, [(X, Y)], 1, progress=False)
        return model, guide

    with pytest.raises(ArgumentError, match="same parameter, .*inside train"):
        train_ensemble(again, 2, progress=False)


@pytest.mark.parametrize("num_members", [0, 2.5])
def test_numbers_of_members(num_members):
    with pytest.raises(ArgumentError, match="num_members"):
        train_ensemble(train, num_members)
