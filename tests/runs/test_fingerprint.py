# SPDX-License-Identifier: Apache-2.0
"""Models are recognised without any data: changes are seen, rounding is not."""

import io
from collections import namedtuple
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import nn

import pyro_dvi as dvi
from pyro_dvi.runs.fingerprint import Fingerprint

X = torch.linspace(-1, 2, 6)
LATENTS = {"w": torch.tensor(0.7)}


def line(x, y=None, slope=1.0, offset=0.0, scale=0.5, num_data=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", num_data or len(x), subsample_size=len(x)):
        loc = offset + slope * w * x
        return pyro.sample("y", dist.Normal(loc, scale, validate_args=False), obs=y)


def differences(first, second):
    return Fingerprint.of(first, (X, X), {}, LATENTS).differences(second, LATENTS)


def test_other_models_are_seen_and_rounding_is_not():
    assert differences(line, line) == ""
    assert differences(line, partial(line, slope=1.0001)) == ""
    assert differences(line, partial(line, slope=1.2)).startswith("distribution of site 'y': loc")
    assert differences(line, partial(line, scale=0.6)) == "distribution of site 'y': scale 0.5 → 0.6"
    assert differences(line, partial(line, num_data=9)) == ""
    assert "site 'y': loc" in differences(line, partial(line, offset=3.0))


@pytest.mark.parametrize("depth", [1, 3])
def test_activations_are_told_apart(depth):
    """Each element is compared, because means of logits hardly depend on the activation: they missed every third."""
    activations = [nn.Tanh, nn.ReLU, nn.SiLU, nn.Softplus]

    def model_of(activation, seed):
        torch.manual_seed(seed)
        layers = [part for k in range(depth) for part in (nn.Linear(3 if k == 0 else 16, 16), activation())]
        return dvi.classifier(nn.Sequential(*layers, nn.Linear(16, 2)), num_data=6)

    x, seen = torch.randn(6, 3), []
    for seed in range(5):
        models = [model_of(activation, seed) for activation in activations]
        for model in models:
            first = Fingerprint.of(model, (x, torch.arange(6) % 2), {}, {})
            found = [first.differences(other, {}) for other in models]
            assert found[models.index(model)] == ""
            seen += [text != "" for text in found]
    assert sum(seen) >= 0.9 * len(seen) * 3 / 4


def test_without_values_of_latents_only_sites_are_compared():
    first = Fingerprint.of(line, (X, X), {})
    assert first.differences(partial(line, scale=0.6)) == ""
    assert first.differences(pyro.poutine.block(line, hide=["w"])) == "site 'w' is missing"


def test_no_data_are_kept():
    kept = io.BytesIO()
    torch.save(vars(Fingerprint.of(line, (X, 7 * X), {}, LATENTS)), kept)
    torch.save(vars(Fingerprint.of(line, (-3 * X, X), {}, LATENTS)), other := io.BytesIO())
    assert kept.getvalue() == other.getvalue()
    kept.seek(0)
    state = torch.load(kept, weights_only=True)
    assert [value.shape for value in state["args"]] == [(4,), (4,)]
    assert Fingerprint(**state).differences(line, LATENTS) == ""


def test_random_numbers_of_the_model_are_the_same():
    def noisy(x, y, slope=1.0):
        return line(x, y, slope=slope, offset=torch.rand(()))

    assert differences(noisy, noisy) == ""
    assert "site 'y': loc" in differences(noisy, partial(noisy, slope=2.0))


@pytest.mark.parametrize("batch", [namedtuple("Named", "x")(X), X.numpy(), 3.0, "text", X.to_sparse()])
def test_arguments_that_may_be_data_are_not_kept(batch):
    assert Fingerprint.of(lambda batch, y: line(y, y), (batch, X), {}, LATENTS) is None
