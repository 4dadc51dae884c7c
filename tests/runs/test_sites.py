# SPDX-License-Identifier: Apache-2.0
"""Every sample site of a run is of one kind."""

import pyro
import pyro.distributions as dist
import pyro.poutine as poutine
import pytest
import torch
from pyro.infer.reparam import LocScaleReparam
from pyro.poutine.util import site_is_factor

from pyro_dvi import MeanFieldGuide, TaylorELBO
from pyro_dvi.errors import ArgumentError
from pyro_dvi.runs.sites import is_data, is_deterministic, is_latent, sites_named

KINDS = [is_latent, is_data, site_is_factor, is_deterministic]


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(torch.zeros(3), 1.0).to_event(1))
    pyro.factor("f", w.sum())
    pyro.param("p", torch.ones(()))
    mean = pyro.deterministic("mean", x @ w)
    with pyro.plate("data", 10, subsample_size=len(x)):
        return pyro.sample("y", dist.Normal(mean, 1.0), obs=y)


def kinds(model, *args):
    nodes = poutine.trace(model).get_trace(*args).nodes
    return {name: [kind.__name__ for kind in KINDS if kind(node)] for name, node in nodes.items()}


def test_kinds_of_sites():
    found = kinds(model, torch.ones(4, 3), torch.ones(4))
    assert {name: kind for name, kind in found.items() if kind} == {
        "w": ["is_latent"],
        "f": ["site_is_factor"],
        "mean": ["is_deterministic"],
        "y": ["is_data"],
    }
    assert "data" in found and "p" in found


def test_an_unobserved_response_is_latent():
    assert kinds(model, torch.ones(4, 3))["y"] == ["is_latent"]


def test_a_reparameterised_site_is_no_data():
    """Its values are weights, whose number says nothing about the size of the data set."""
    centred = poutine.reparam(model, config={"w": LocScaleReparam(0.0)})
    assert kinds(centred, torch.ones(4, 3), torch.ones(4))["w"] == ["is_deterministic"]

    def square(x, y):  # as many weights as rows
        w = pyro.sample("w", dist.Normal(torch.zeros(4), 1.0).to_event(1))
        with pyro.plate("data", 12, subsample_size=4):
            pyro.sample("y", dist.Normal(x @ w, 1.0), obs=y)

    square = poutine.reparam(square, config={"w": LocScaleReparam(0.0)})
    x, y = torch.eye(4), torch.ones(4)
    assert TaylorELBO(num_data=12).loss(square, MeanFieldGuide(square), x, y) > 0


def test_a_pattern_without_sites_is_refused():
    assert sites_named("exclude", "net.*", ["net.a", "b"]) == ["net.a"]
    with pytest.raises(
        ArgumentError, match=r"exclude names 'c', which is not a site of the guide; the sites are \['b'\]"
    ):
        sites_named("exclude", ["c"], ["b"])
    with pytest.raises(ArgumentError, match=r"write '\*fc\.\*' for \['net\.fc\.bias'\]"):
        sites_named("subset", "fc.*", ["net.conv.bias", "net.fc.bias"])
