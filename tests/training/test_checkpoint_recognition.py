# SPDX-License-Identifier: Apache-2.0
"""Which models a checkpoint takes, whatever the batches are made of."""

from collections import namedtuple
from dataclasses import dataclass

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from pyro.optim import Adam

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
