# SPDX-License-Identifier: Apache-2.0
"""By what a model is recognised: small changes are seen, rounding is not, and little is kept."""

import math
from collections import namedtuple
from dataclasses import dataclass
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_dvi.runs.fingerprint import Fingerprint

X = torch.linspace(-1, 2, 6)
LATENTS = {"w": torch.tensor(0.7)}


def line(x, y=None, slope=1.0, offset=0.0, scale=0.5, num_data=None):
    w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
    with pyro.plate("data", num_data or len(x), subsample_size=len(x)):
        loc = offset + slope * w * x
        return pyro.sample("y", dist.Normal(loc, scale, validate_args=False), obs=y)


def differences(first, second, *args, latents=LATENTS):
    return Fingerprint.of(first, args, {}, latents).differences(second, latents)


def test_a_change_of_a_thousandth_is_another_model():
    assert differences(line, partial(line, slope=1.001), X, X).startswith("distribution of site 'y': loc")
    assert (
        differences(line, partial(line, scale=0.5005), X, X) == "distribution of site 'y': scale 0.5 → 0.5005"
    )


def test_what_was_computed_elsewhere_may_be_rounded_more():
    found = Fingerprint.of(line, (X, X), {}, LATENTS)
    elsewhere = Fingerprint(found.args, found.kwargs, found.sites)
    assert elsewhere.differences(partial(line, slope=1.001), LATENTS) == ""
    with torch.autocast("cpu"):
        assert not Fingerprint.of(line, (X, X), {}, LATENTS).precise
        assert found.differences(partial(line, slope=1.001), LATENTS) == ""


def test_an_offset_does_not_hide_what_changes():
    far = partial(line, offset=2000.0)
    assert differences(far, far, X, X) == ""
    assert "site 'y': loc" in differences(far, partial(line, offset=2000.0, slope=-1.0), X, X)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_seen(bad):
    spoilt = partial(line, offset=torch.tensor([bad, 0.0, 0.0, 0.0]))
    x = X[:4]
    assert differences(spoilt, spoilt, x) == ""
    assert "site 'y': loc" in differences(spoilt, line, x)
    assert "site 'y': loc" in differences(line, spoilt, x)
    assert "site 'y': loc" in differences(spoilt, partial(line, offset=torch.tensor([bad, 0.0, 0.0, 1.0])), x)


def test_integers_are_compared_exactly():
    def throws(x, count=100):
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Binomial(torch.tensor(count), logits=w * x), obs=torch.ones(len(x)))

    assert differences(throws, throws, X) == ""
    assert "total_count 100 → 101" in differences(throws, partial(throws, count=101), X)


def test_rows_of_nested_batches_are_cut():
    found = Fingerprint.of(lambda batch, y: line(batch["x"][0], y), ({"x": [X]}, X), {}, LATENTS)
    assert len(found.args[0]["x"][0]) == len(found.args[1]) == 4


def test_batches_that_are_large_and_cannot_be_cut_are_not_kept():
    def subsampling(x, y):
        w = pyro.sample("w", dist.Normal(x.new_zeros(()), 1.0))
        with pyro.plate("data", 300_000, subsample_size=5) as rows:
            return pyro.sample("y", dist.Normal(w * x[rows].sum(-1), 0.5), obs=y[rows])

    x = torch.zeros(300_000, 4)
    assert Fingerprint.of(subsampling, (x, x[:, 0]), {}, LATENTS) is None
    assert len(Fingerprint.of(subsampling, (x[:, :2], x[:, 0]), {}, LATENTS).args[0]) == 300_000


@dataclass
class Pair:
    x: torch.Tensor


@pytest.mark.parametrize(
    "batch",
    [Pair(X), namedtuple("Named", "x")(X), X.numpy(), torch.sin, X.to_sparse()],
    ids=["dataclass", "namedtuple", "NumPy", "function", "sparse"],
)
def test_what_a_safe_load_does_not_build_stays_out_of_files(batch):
    found = Fingerprint.of(lambda batch, y: line(y, y), (batch, X), {}, LATENTS)
    assert found.state() is None
    assert found.differences(lambda batch, y: line(y, y), LATENTS) == ""
    plain = Fingerprint.of(lambda batch, y: line(y, y), ({"x": [X, None], "n": (1, 2.0)}, X), {}, LATENTS)
    assert set(plain.state()) == {"args", "kwargs", "sites", "precise"}


def test_the_model_runs_once_where_it_is_known_what_depends_on_chance():
    runs = []

    def model(x, y):
        runs.append(len(x))
        return line(x, y, offset=torch.rand(()))

    first = Fingerprint.of(model, (X, X), {}, LATENTS)
    assert runs == [4, 4]
    other = Fingerprint.of(model, first.args, {}, {"w": torch.tensor(0.2)}, first.sites)
    assert runs == [4, 4, 4]
    assert list(other.sites["y"]["parameters"]) == ["scale"]
    assert other.differences(model, {"w": torch.tensor(0.2)}) == ""
