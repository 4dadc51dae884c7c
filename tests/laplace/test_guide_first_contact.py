# SPDX-License-Identifier: Apache-2.0
"""Mistakes that people make first, in whichever call they make them: each has an answer that names it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import pyro_dvi as dvi
from pyro_dvi.errors import ArgumentError, DataError, ModelError
from pyro_dvi.laplace import Diagonal

N = 6
X = torch.tensor([[1.0, -1.0], [0.5, 2.0], [-1.5, 0.3], [0.2, 0.1], [2.0, 1.0], [-0.7, -0.4]])
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])


class Augmented(Dataset):
    def __len__(self) -> int:
        return N

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        return X[k] + 0.1 * torch.randn(2), LABELS[k]


def halves(x: Any, y: Any) -> list[Any]:
    return [(x[:3], y[:3]), (x[3:], y[3:])]


def with_value(tensor: Tensor, value: float) -> Tensor:
    return tensor.index_fill(0, torch.tensor(0), value)


LOADER = TensorDataset(X, LABELS)
MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "NaN": (
        lambda: halves(with_value(X, torch.nan), LABELS),
        DataError,
        r"NaN or infinite.*argument 1 \(2 of 6 elem",
    ),
    "infinite": (lambda: halves(with_value(X, torch.inf), LABELS), DataError, "infinite.*argument 1 .*Drop"),
    "float64": (lambda: halves(X.double(), LABELS), DataError, r"argument 1 torch.float64.*x.float\(\)"),
    "whole numbers": (lambda: halves(X.long(), LABELS), DataError, r"argument 1 torch.int64.*x.float\(\)"),
    "labels first": (lambda: halves(LABELS, X), DataError, r"argument 1 torch.int64 \(3,\).*in the order of"),
    "columns": (
        lambda: halves(X[:, :1], LABELS),
        DataError,
        r"argument 1 torch.float32 \(3, 1\).*multiplied",
    ),
    "label columns": (
        lambda: halves(X, LABELS[:, None].expand(-1, 2)),
        DataError,
        r"y has the shape \(3, 2\).*need the shape \(3,\)",
    ),
    "few labels": (lambda: [(X, LABELS[:3])], DataError, r"y has the shape \(3,\).*need the shape \(6,\)"),
    "class 3": (
        lambda: halves(X, LABELS + 1),
        DataError,
        r"'obs': labels from 1 to 3, but outputs for 3 classes",
    ),
    "fractions": (lambda: halves(X, LABELS + 0.5), DataError, "'obs'.*do not fit Categorical"),
    "empty batch": (lambda: [(X[:0], LABELS[:0])], DataError, "argument 1 of the model has no rows"),
    "too many": (lambda: [(X, LABELS, LABELS)], DataError, r"too many.*it takes \(x, y\)"),
    "names": (
        lambda: [{"image": X, "y": LABELS}],
        TypeError,
        "unexpected keyword argument 'image'",
    ),
    "arrays": (
        lambda: [(X.numpy(), LABELS.numpy())],
        DataError,
        "argument 1 .*ndarray: convert.*torch.as_tensor",
    ),
    "no labels": (lambda: [(X,)], ModelError, "'obs' .*pass the observed values"),
    "no batches": (list, DataError, "no batches"),
    "a tensor": (lambda: X, ArgumentError, r"is a tensor.*\[\(x, y\)\]"),
    "a tuple": (lambda: (X, LABELS), ArgumentError, r"is one batch: pass \[\(x, y\)\]"),
    "a generator": (lambda: iter(halves(X, LABELS)), DataError, "ends after one pass"),
    "drop_last": (lambda: DataLoader(LOADER, batch_size=4, drop_last=True), DataError, "drop_last=False"),
    "augmented": (lambda: DataLoader(Augmented(), batch_size=4), DataError, "changed between two passes"),
}
CALLS: dict[str, Callable[[dvi.LaplaceGuide, Any], Any]] = {
    "polish": lambda guide, batches: guide.polish(batches, progress=False),
    "diagnose": lambda guide, batches: guide.diagnose(batches),
    "fit": lambda guide, batches: guide.fit(batches),
    "fit as it is": lambda guide, batches: guide.fit(batches, Diagonal(), unconverged="accept"),
    "evidence": lambda guide, batches: guide.log_evidence(batches),
    "tune": lambda guide, batches: guide.tune(batches, values=[1.0, 2.0], progress=False),
}


def classifier() -> Any:
    torch.manual_seed(0)
    return dvi.classifier(dvi.to_bayesian_(nn.Linear(2, 3)), num_data=N)


@pytest.mark.every(5)
@pytest.mark.parametrize("seen", [False, True], ids=["fresh", "initialized"])
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_the_data_are_named_by_every_call(mistake, call, seen):
    batches, error, message = mistake
    guide = dvi.LaplaceGuide(classifier())
    if seen:
        guide.initialize(X, LABELS)
    with pytest.raises(error, match=message):
        call(guide, batches())


@pytest.mark.every(4)
@pytest.mark.filterwarnings(
    "ignore:the Gaussian is fitted around a mode",
    "ignore:the best value of PriorPrecision",
    "ignore:class probabilities",
)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    "batches",
    [
        [{"x": x, "y": y} for x, y in halves(X, LABELS)],
        halves(X, LABELS.to(torch.uint8)),
        DataLoader(LOADER, batch_size=4, shuffle=True),
    ],
    ids=["mappings", "bytes", "shuffled"],
)
def test_what_is_no_mistake(batches, call):
    call(dvi.LaplaceGuide(classifier()), batches)


@pytest.mark.parametrize("name", ["float64", "whole numbers", "labels first", "columns", "empty batch"])
def test_predictions_name_them_too(name):
    batches, error, message = MISTAKES[name]
    model = classifier()
    guide = dvi.LaplaceGuide(model)
    guide.fit(halves(X, LABELS), Diagonal(), unconverged="accept")
    with pytest.raises(error, match=message):
        dvi.predict(model, guide, batches())


def test_data_of_less_precision_than_a_model():
    model = dvi.classifier(dvi.to_bayesian_(nn.Linear(2, 3).double()), num_data=N)
    with pytest.raises(DataError, match=r"argument 1 torch.float32.*Float and Double.*x.float\(\)"):
        dvi.LaplaceGuide(model).initialize(X, LABELS)


@pytest.mark.parametrize("kind", [dvi.LaplaceGuide, dvi.MeanFieldGuide, dvi.NaturalGradientGuide])
def test_a_network_that_is_no_model_yet_is_told_how_to_become_one(kind):
    """Before and after to_bayesian_, in a run with and without labels."""
    line = r"dvi\.classifier\(dvi\.to_bayesian_\(net\), num_data=...\)"
    net = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(ModelError, match=f"no latent site.*{line}"):
        kind(net).initialize(X)
    for network in (net, dvi.to_bayesian_(net)):
        with pytest.raises(DataError, match=f"it takes .input.*{line}"):
            kind(network).initialize(X, LABELS)
    with pytest.raises(DataError, match=line):
        dvi.LaplaceGuide(net).fit([(X, LABELS)])
    with pytest.raises(ModelError, match=f"no observed site.*{line}"):
        dvi.LaplaceGuide(net).fit([(X,)])
    with pytest.raises(DataError, match=r"it takes \(x, y\)$"):
        kind(dvi.classifier(net, num_data=N)).initialize(X, LABELS, LABELS)
