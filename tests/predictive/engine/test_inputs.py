# SPDX-License-Identifier: Apache-2.0
"""Forms of data and options: which are taken as they are, which are refused and how."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from pyro_dvi import AtMean, Samples, predict
from pyro_dvi.errors import ArgumentError, DataError, GuideError

X = torch.linspace(-1, 1, 10)
DATA = TensorDataset(X, 2 * X)


def model(x, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(w * x, 1.0), obs=y)


def guide(x, *_args, **_kwargs):
    pyro.sample("w", dist.Delta(torch.tensor(2.0)))


def by_name(x, *, scale, y=None):
    w = pyro.sample("w", dist.Normal(0.0, 1.0))
    with pyro.plate("data", len(x)):
        return pyro.sample("obs", dist.Normal(w * x, scale), obs=y)


def masked(x, y=None, mask=None):
    return model(x, y)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(DATA)


UNORDERED = {
    "shuffle": lambda: DataLoader(DATA, batch_size=3, shuffle=True),
    "subset": lambda: DataLoader(DATA, batch_size=3, sampler=SubsetRandomSampler(range(10))),
    "weighted": lambda: DataLoader(DATA, batch_size=3, sampler=WeightedRandomSampler([1.0] * 10, 10)),
    "batches": lambda: DataLoader(DATA, batch_sampler=BatchSampler(RandomSampler(DATA), 3, False)),
    "own batches": lambda: DataLoader(DATA, batch_sampler=[[9, 8], [7, 6, 5, 4, 3, 2, 1, 0]]),
    "stream": lambda: DataLoader(Stream(), batch_size=3),
}


@pytest.mark.parametrize("name", UNORDERED)
def test_values_in_an_order_that_is_not_known_are_refused(name):
    prediction = predict(model, guide, UNORDERED[name](), AtMean())
    assert prediction.metrics()["rmse"] < 1e-6  # its own values came along
    with pytest.raises(DataError, match="shuffle=False"):
        prediction.metrics(2 * X)


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(DATA, batch_size=3),
        DataLoader(DATA, batch_sampler=BatchSampler(SequentialSampler(DATA), 3, False)),
        DataLoader(X, batch_size=4),
        [(X[:5],), (X[5:],)],
    ],
)
def test_values_in_the_order_of_the_data_are_taken(loader):
    assert predict(model, guide, loader, AtMean()).metrics(2 * X)["rmse"] < 1e-6


REFUSED = {
    "observed array": (
        lambda: predict(model, guide, (X, X.numpy())),
        DataError,
        "observation.*ndarray.*as_tensor",
    ),
    "observed list": (
        lambda: predict(model, guide, (X, X.tolist())),
        DataError,
        "observation.*list.*as_tensor",
    ),
    "input array": (
        lambda: predict(masked, guide, {"x": X, "mask": X.numpy()}, observed="y"),
        DataError,
        "input 2.*ndarray",
    ),
    "three entries": (
        lambda: predict(model, guide, (X, X, torch.arange(10))),
        DataError,
        r"3 entries for the arguments \['x', 'y'\]",
    ),
    "three entries of a loader": (
        lambda: predict(model, guide, DataLoader(TensorDataset(X, X, X))),
        DataError,
        "3 entries.*the arguments",
    ),
    "input by name only": (
        lambda: predict(by_name, guide, {"x": X, "scale": torch.ones(10), "y": X}, observed="y"),
        DataError,
        r"arguments \['scale'\].* are keyword-only.*Move the",
    ),
    "which is observed": (
        lambda: predict(masked, guide, (X, X, X)),
        ArgumentError,
        "name it, as in observed='mask'",
    ),
    "guide of draws": (lambda: predict(model, {"w": torch.zeros(3)}, X), GuideError, "type dict.*Predictive"),
    "no guide": (lambda: predict(model, None, X), GuideError, "type NoneType"),
    "nested quantiles": (
        lambda: predict(model, guide, X, AtMean()).quantiles(torch.ones(1, 1) / 2),
        ArgumentError,
        "between 0 and 1",
    ),
    "empty quantiles": (
        lambda: predict(model, guide, X, AtMean()).quantiles([]),
        ArgumentError,
        "between 0 and 1",
    ),
    "quantile 1": (
        lambda: predict(model, guide, X, AtMean()).quantiles([0.5, 1.0]),
        ArgumentError,
        "between 0 and 1",
    ),
    "level 95": (
        lambda: predict(model, guide, X, AtMean()).interval(95),
        ArgumentError,
        "level must be.*95",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_meant_is_refused(name):
    run, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        run()


@pytest.mark.parametrize("q", [np.array([0.1, 0.9]), torch.tensor([0.1, 0.9]), (0.1, np.float64(0.9))])
def test_quantiles_of_any_sequence(q):
    prediction = predict(model, guide, X, AtMean())
    torch.testing.assert_close(prediction.quantiles(q), prediction.quantiles([0.1, 0.9]))
    for single in (0.5, np.float32(0.5), torch.tensor(0.5)):
        torch.testing.assert_close(prediction.quantiles(single), 2 * X)


def test_whole_numbers_of_numpy():
    assert Samples(np.int64(3)) == Samples(3)
    assert type(Samples(np.int64(3)).num_samples) is int
    prediction = predict(model, guide, X, Samples(np.int64(3)), batch_size=np.int64(4))
    assert prediction.method.num_components == 3
    assert predict(model, guide, X, AtMean()).sample(np.int32(2)).shape == (2, 10)


Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024 (as collate functions make them)


@dataclass(frozen=True)
class Both:
    left: torch.Tensor
    right: torch.Tensor

    def __post_init__(self):
        assert torch.is_tensor(self.left)


FORMS = {
    "named tuple": (Pair(X, 2 * X), lambda d: d.left + d.right),
    "dataclass": (Both(X, 2 * X), lambda d: d.left + d.right),
    "UserDict": (UserDict(left=X, right=2 * X), lambda d: d.data["left"] + d["right"]),
    "OrderedDict": (OrderedDict(left=X, right=2 * X), lambda d: next(iter(d.values())) + d["right"]),
}


@pytest.mark.parametrize("name", FORMS)
def test_containers_of_inputs_keep_their_type_in_batches(name):
    value, read = FORMS[name]

    def of_container(pair, y=None):
        return model(read(pair), y)

    prediction = predict(of_container, guide, (value, X), AtMean(), batch_size=4)
    torch.testing.assert_close(prediction.mean, 6 * X)


def test_a_mapping_of_arguments_need_not_be_a_dict():
    assert predict(model, guide, UserDict(x=X, y=2 * X), AtMean()).metrics()["rmse"] < 1e-6
    loader = [UserDict(x=X[:5], y=2 * X[:5]), UserDict(x=X[5:], y=2 * X[5:])]
    assert predict(model, guide, loader, AtMean()).metrics()["rmse"] < 1e-6


def test_latents_that_are_computed_from_the_inputs_are_predicted_batch_by_batch():
    def local(x, y=None):
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Normal(0.0, 1.0))
            pyro.sample("obs", dist.Normal(z + x, 0.1), obs=y)

    def amortised(x, y=None):
        with pyro.plate("data", len(x)):
            pyro.sample("z", dist.Normal(x, 0.1))

    with pytest.raises(DataError, match=r"computes the values from its inputs.*pyro.plate\(name, len\(x\)\)"):
        predict(local, amortised, X, AtMean(), batch_size=5)
    for part in (X[:5], X[5:]):
        torch.testing.assert_close(predict(local, amortised, part, AtMean()).mean, 2 * part)
