# SPDX-License-Identifier: Apache-2.0
"""Ensembles as ArviZ objects: draws of one member after the other."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer.autoguide import AutoDelta, AutoNormal

import pyro_dvi as dvi

pytestmark = pytest.mark.filterwarnings("ignore:.* scores '.*point estimate")

X = torch.linspace(0.5, 1, 6)


def model(x, y=None):
    slope = pyro.sample("slope", dist.Normal(0.0, 1.0))
    pyro.deterministic("double", 2 * slope)
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(slope * x, 0.01), obs=y)


def ensemble(make_guide=AutoDelta, num_members: int = 4, of=model, **options):
    def train():
        slope = torch.randn(())
        guide = make_guide(of, init_loc_fn=lambda site: slope, **options)
        guide(X, X)
        return of, guide

    return dvi.train_ensemble(train, num_members, progress=False)


def test_point_masses():
    model, guide = ensemble()
    slopes = torch.stack([*guide.parameters()]).detach().numpy()
    found = dvi.to_arviz(model, guide, (X, X), sites=["slope", "double", "member"], seed=0)
    assert found["posterior"]["slope"].shape == (1, 500)
    member = found["posterior"]["member"].values[0]
    assert np.bincount(member).tolist() == [125] * 4
    np.testing.assert_allclose(found["posterior"]["slope"].values[0], slopes[member])
    np.testing.assert_allclose(found["posterior"]["double"].values[0], 2 * slopes[member], rtol=1e-6)
    drawn = found["posterior_predictive"]["obs"].values[0]
    assert (
        np.abs(drawn - slopes[member][:, None] * X.numpy()).max() < 0.06
    )  # 6 standard deviations of 3,000 draws
    scored = found["log_likelihood"]["obs"].values[0]
    expected = dist.Normal(torch.as_tensor(slopes[member])[:, None] * X, 0.01).log_prob(X)
    np.testing.assert_allclose(scored, expected, rtol=1e-4)
    assert found.attrs["method"] == "4 x AtMean()"


def test_drawn_members():
    model, guide = ensemble(AutoNormal, init_scale=0.01)
    found = dvi.to_arviz(model, guide, X, 100, seed=0)
    assert found.attrs["method"] == "4 x Samples(num_samples=25)"
    slope, member = (found["posterior"][name].values[0] for name in ("slope", "member"))
    for k in range(4):
        own = slope[member == k]
        assert len(own) == 25
        centre = float(dict(guide.members[k].guide.named_parameters())["locs.slope_unconstrained"].detach())
        assert np.abs(own - centre).max() < 0.06 and own.std() > 0.003
    drawn = found["posterior_predictive"]["obs"].values[0]
    assert np.abs(drawn - slope[:, None] * X.numpy()).max() < 0.06


def test_numbers_of_draws():
    model, guide = ensemble(num_members=3)
    assert dvi.to_arviz(model, guide, X)["posterior"]["slope"].shape == (1, 498)
    with pytest.raises(dvi.errors.ArgumentError, match="num_samples=100 .* from 3 distributions.*omit"):
        dvi.to_arviz(model, guide, X, 100)


def test_prior_and_netcdf(tmp_path):
    model, guide = ensemble()
    found = dvi.to_arviz(model, guide, (X, X), 8, prior=20, predictions=X[:2], seed=0)
    assert found["prior_predictive"]["obs"].shape == (1, 20, 6)
    assert found["predictions"]["obs"].shape == (1, 8, 2)
    found.to_netcdf(tmp_path / "ensemble.nc")


def test_members_of_other_latents():
    def other(x, y=None):
        slope = pyro.sample("other", dist.Normal(0.0, 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("obs", dist.Normal(slope * x, 0.01), obs=y)

    mixed = dvi.training.EnsembleGuide([*ensemble()[1].members[:1], *ensemble(of=other)[1].members[1:2]])
    with pytest.raises(KeyError, match="slope"):
        dvi.to_arviz(mixed.model, mixed, X)
    found = dvi.to_arviz(mixed.model, mixed, X, sites=[])
    assert found["posterior_predictive"]["obs"].shape == (1, 500, 6)
