# SPDX-License-Identifier: Apache-2.0
"""Ensembles of any method."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, CheckpointError, DviWarning
from tests.methods.cases import EPOCHS, METHODS, Slope, loader, network, rows, slope


@pytest.mark.filterwarnings("ignore:.* scores .*point estimate")
def test_members_begin_at_their_own_weights():
    posterior = dvi.Ensemble(dvi.MAP(), 3).fit(network(), loader(), EPOCHS, progress=False)
    prediction = posterior.predict(rows(20, 1), keep_draws=True)
    members = prediction.draws["probabilities"]
    assert len(members) == 3 and float(members.std(0).min()) > 0
    torch.testing.assert_close(members.mean(0), prediction.probabilities)
    assert posterior.to_arviz(rows(20, 1))["posterior_predictive"].sizes["draw"] >= 3


@pytest.mark.every(3)
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


class Attentive(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attention = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = self.embed(x)[:, None]
        return self.head(self.attention(h, h, h)[0][:, 0])


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.lstm(x[:, None])[0][:, 0])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x).tanh())


NETWORKS = {
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)),
    "LSTM": Recurrent,
    "attention": Attentive,
    "tied": Tied,
    "linear": lambda: nn.Linear(3, 3),
}


@pytest.mark.every(2)
@pytest.mark.parametrize("name", NETWORKS)
def test_members_of_a_converted_network_are_those_of_the_network(name):
    """Random weights, and everything that follows from them, do not depend on when the network got its priors."""
    torch.manual_seed(5)
    plain, method = NETWORKS[name](), dvi.Ensemble(dvi.MAP(), 2)
    converted = dvi.to_bayesian_(copy.deepcopy(plain), prior_scale=0.5)
    dvi.classifier(converted, 60)(rows(4, 0)[0])  # it was part of a model before
    expected, found = (
        method.fit(net, loader(), 2, progress=False).predict(rows(20, 1), keep_draws=True).draws
        for net in (plain, converted)
    )
    torch.testing.assert_close(found["probabilities"], expected["probabilities"], rtol=0, atol=0)
    assert float(found["probabilities"].std(0).mean()) > 1e-2


@pytest.mark.every(3)
@pytest.mark.parametrize("convert", [lambda net: net, dvi.to_bayesian_])
@pytest.mark.parametrize("name", NETWORKS)
def test_no_weight_of_two_members_starts_alike(name, convert):
    torch.manual_seed(1)  # the seed of the second member
    net = convert(NETWORKS[name]())
    members = dvi.Ensemble(dvi.MAP(lr=1e-12), 2).fit(net, loader(), 1, progress=False).guide.members
    first, second = (member.guide.median() for member in members)
    weights = [site for site, value in first.items() if value.dim() > 1]
    assert weights and all(float((first[site] - second[site]).abs().min()) > 0 for site in weights)


def test_a_frozen_weight_stays_beside_a_trained_bias():
    net = network()
    net[0].weight.requires_grad_(False)
    for member in dvi.Ensemble(dvi.MAP(), 2).fit(net, loader(), 1, progress=False).guide.members:
        assert torch.equal(member.model.net[0].weight, net[0].weight)


def test_weights_without_a_start_of_their_own_are_named():
    """``reset_parameters()`` of a layer with weight normalisation draws weights, and loses them."""
    net = nn.Sequential(nn.Linear(3, 6), parametrizations.weight_norm(nn.Linear(6, 3)))
    with pytest.warns(DviWarning, match=r"start with the same .*1\.parametrizations\.weight\.original1"):
        dvi.Ensemble(dvi.MAP(), 2).fit(net, loader(), 1, progress=False)


@pytest.mark.parametrize("model", [slope, Slope(), nn.Tanh()])
def test_members_need_new_weights(model):
    with pytest.raises(ArgumentError, match="reset_parameters.*train_ensemble"):
        dvi.Ensemble().fit(model, loader(labels=False), 1, progress=False)


def test_members_are_trained():
    with pytest.raises(ArgumentError, match="epochs=0 would discard the trained weights"):
        dvi.Ensemble(dvi.Laplace(), 2).fit(network(), loader(), 0, progress=False)
