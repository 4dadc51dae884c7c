# SPDX-License-Identifier: Apache-2.0
"""Ensembles of any method."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, CheckpointError
from tests.methods.cases import EPOCHS, METHODS, Slope, loader, network, rows, slope


def test_members_begin_at_their_own_weights():
    posterior = dvi.Ensemble(dvi.MAP(), 3).fit(network(), loader(), EPOCHS, progress=False)
    prediction = posterior.predict(rows(20, 1), keep_draws=True)
    members = prediction.draws["probabilities"]
    assert len(members) == 3 and float(members.std(0).min()) > 0
    torch.testing.assert_close(members.mean(0), prediction.probabilities)
    assert posterior.to_arviz(rows(20, 1))["posterior_predictive"].sizes["draw"] >= 3


@pytest.mark.parametrize("member", ["map", "moments", "laplace"])
def test_an_ensemble_is_saved_with_what_belongs_to_its_networks(member, tmp_path):
    """Running statistics and learned scales are no part of the guides."""
    net = nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 1))
    method, data = dvi.Ensemble(METHODS[member], 2), loader(labels=False)
    posterior, x = method.fit(net, data, EPOCHS, progress=False), rows(20, 1)[0]
    posterior.save(tmp_path / "ensemble")
    read = method.load(tmp_path / "ensemble", net, data)
    expected, found = posterior.predict(x), read.predict(x)
    assert torch.equal(found.mean, expected.mean) and torch.equal(found.variance, expected.variance)
    with pytest.raises(CheckpointError, match=r"2\.pt\' is missing"):
        replace(method, num_members=3).load(tmp_path / "ensemble", net, data)


def test_members_share_what_is_frozen():
    """As the layers of a pretrained network, which new weights would spoil."""
    net = network()
    net[0].requires_grad_(False)
    first, second = dvi.Ensemble(dvi.MAP(), 2).fit(net, loader(), 1, progress=False).guide.members
    for member in (first, second):
        assert torch.equal(member.model.net[0].weight, net[0].weight)
    assert not torch.equal(first.guide.median()["net.2.weight"], second.guide.median()["net.2.weight"])


@pytest.mark.parametrize("model", [slope, Slope(), nn.Tanh()])
def test_members_need_new_weights(model):
    with pytest.raises(ArgumentError, match="reset_parameters.*train_ensemble"):
        dvi.Ensemble().fit(model, loader(labels=False), 1, progress=False)


def test_members_are_trained():
    with pytest.raises(ArgumentError, match="epochs=0 would discard the trained weights"):
        dvi.Ensemble(dvi.Laplace(), 2).fit(network(), loader(), 0, progress=False)
