# SPDX-License-Identifier: Apache-2.0
"""Which models a checkpoint takes, whatever the batches are made of."""

from collections import namedtuple
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from pyro.optim import Adam
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.errors import CheckpointError

X = torch.linspace(-1, 1, 12).reshape(6, 2)
Y = X.sum(1)


def svi_of(inputs=lambda batch: batch, prior=dist.Normal, seed=0):
    torch.manual_seed(seed)

    def model(batch, y=None):
        x = inputs(batch)
        w = pyro.sample("w", prior(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", 6):
            return pyro.sample("y", dist.Normal(x @ w, 0.3), obs=y)

    return SVI(model, dvi.MeanFieldGuide(model), Adam({"lr": 0.01}), loss=dvi.TaylorELBO())


@dataclass
class Pair:
    x: torch.Tensor


Named = namedtuple("Named", "x")
JAGGED = torch.nested.nested_tensor([X[:2], X[2:]], layout=torch.jagged)
BATCHES = {
    "dataclass": (Pair(X), lambda batch: batch.x),
    "namedtuple": (Named(X), lambda batch: batch.x),
    "NumPy": (X.numpy(), torch.as_tensor),
    "function": (lambda: X, lambda batch: batch()),
    "COO": (X.to_sparse(), lambda batch: batch.to_dense()),
    "jagged": (JAGGED, lambda batch: batch.values()),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_any_kind_are_trained_on_saved_and_loaded(kind, tmp_path):
    batch, inputs = BATCHES[kind]
    svi = svi_of(inputs)
    dvi.fit(svi, [(batch, Y)], 2, checkpoint=tmp_path / "x.pt", progress=False)
    expected = svi.guide.median()["w"]
    pyro.clear_param_store()
    again = svi_of(inputs, seed=1)
    history = dvi.load(tmp_path / "x.pt", again, example=(batch, Y))
    assert torch.equal(again.guide.median()["w"], expected)
    assert dvi.fit(again, [(batch, Y)], 1, history=history, progress=False).epoch == 3


def test_errors_of_a_model_are_its_own_beside_sparse_arguments():
    def refuses(batch):
        raise RuntimeError("my own server did not answer")

    with pytest.raises(RuntimeError, match="my own server"):
        dvi.fit(svi_of(refuses), [(X.to_sparse(), Y)], 1, progress=False)


def test_a_model_that_does_not_run_on_the_rows_is_refused_and_changes_nothing(tmp_path):
    dvi.fit(svi_of(), [(X, Y)], 2, checkpoint=tmp_path / "x.pt", progress=False)
    pyro.clear_param_store()
    other = svi_of(lambda batch: batch @ torch.ones(3, 2))
    with pytest.raises(CheckpointError, match="cannot be multiplied.*another model"):
        dvi.load(tmp_path / "x.pt", other)
    assert not list(other.guide.parameters())


def test_a_refusal_names_the_way_past_it(tmp_path):
    svi = svi_of()
    dvi.fit(svi, [(X, Y)], 1, checkpoint=tmp_path / "x.pt", progress=False)
    state = svi.guide.state_dict()
    pyro.clear_param_store()
    other = svi_of(prior=dist.Laplace)
    with pytest.raises(CheckpointError, match=r"family Normal → Laplace.*guide\.load_state_dict"):
        dvi.load(tmp_path / "x.pt", other)
    other.guide.load_state_dict(state)


ACTIVATIONS = [nn.Tanh, nn.ReLU, nn.SiLU, nn.Softplus]


def network(activation=nn.Tanh, seed=1, noise=0.3, scale=1.0):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(2, 16), activation(), nn.Linear(16, 1))
    return dvi.regressor(dvi.to_bayesian_(net, scale), num_data=6, noise_scale=noise)


def svi_with(guide, **options):
    pyro.clear_param_store()
    model = network(**options)
    options = {"init_loc_fn": dvi.bayesian.init_to_module} if guide in (AutoNormal, AutoDelta) else {}
    elbo = dvi.SampledELBO() if guide is AutoDelta else dvi.TaylorELBO()
    return SVI(model, guide(model, **options), dvi.optim.Adam({"lr": 0.01}), loss=elbo)


@pytest.mark.every(3)
@pytest.mark.parametrize("guide", [dvi.MeanFieldGuide, AutoNormal, AutoDelta, dvi.LaplaceGuide])
@pytest.mark.parametrize(
    "change", [*({"activation": a} for a in ACTIVATIONS[1:]), {"noise": 0.31}, {"scale": 1.1}], ids=str
)
def test_a_network_that_computes_something_else_is_refused_and_changes_nothing(guide, change, tmp_path):
    """However short the training was: with the weights in place, the outputs at artificial inputs must be the same."""
    dvi.fit(svi_with(guide), [(X, Y[:, None])], 1, checkpoint=tmp_path / "x.pt", progress=False)
    same = svi_with(guide, seed=2)
    dvi.load(tmp_path / "x.pt", same)
    other = svi_with(guide, seed=2, **change)
    other.guide(X, Y[:, None])
    before = {name: value.clone() for name, value in other.guide.median().items()}
    with pytest.raises(CheckpointError, match="another model: (distribution|prior) of site 'obs|net"):
        dvi.load(tmp_path / "x.pt", other)
    assert all(torch.equal(value, before[name]) for name, value in other.guide.median().items())


@pytest.mark.parametrize(
    "method", [dvi.NaturalGradients(), dvi.MomentPropagation(), dvi.Laplace(), dvi.MAP()]
)
def test_posteriors_are_not_read_into_another_network(method, tmp_path):
    def net(activation):
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(2, 16), activation(), nn.Linear(16, 2))

    loader = [(X, (Y > 0).long())]
    method.fit(net(nn.Tanh), loader, 1, progress=False).save(tmp_path / "x.pt")
    method.load(tmp_path / "x.pt", net(nn.Tanh), loader)
    for activation in ACTIVATIONS[1:]:
        with pytest.raises(CheckpointError, match="another model: distribution of site 'obs': logits"):
            method.load(tmp_path / "x.pt", net(activation), loader)


def test_a_guide_without_medians_is_compared_by_its_sites(tmp_path):
    def svi(scale=0.3, prior=dist.Normal):
        pyro.clear_param_store()

        def model(x, y=None):
            w = pyro.sample("w", prior(torch.zeros(2), 1.0).to_event(1))
            with pyro.plate("data", 6):
                return pyro.sample("y", dist.Normal(x @ w, scale), obs=y)

        def guide(x, y=None):
            loc = pyro.param("loc", torch.zeros(2))
            pyro.sample("w", dist.Normal(loc, 0.1).to_event(1))

        return SVI(model, guide, Adam({"lr": 0.01}), loss=dvi.TaylorELBO())

    dvi.fit(svi(), [(X, Y)], 2, checkpoint=tmp_path / "x.pt", progress=False)
    trained = pyro.param("loc").detach().clone()
    dvi.load(tmp_path / "x.pt", svi(scale=0.4))
    assert torch.equal(pyro.param("loc"), trained)
    with pytest.raises(CheckpointError, match="family Normal → Laplace"):
        dvi.load(tmp_path / "x.pt", svi(prior=dist.Laplace))
