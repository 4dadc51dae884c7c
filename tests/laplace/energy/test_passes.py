# SPDX-License-Identifier: Apache-2.0
"""The data of a solve are compared between passes, and looked at once where they are the same tensors."""

from collections import Counter
from typing import Any

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from pyro_dvi.errors import DataError
from pyro_dvi.laplace import Dense, LaplaceGuide
from pyro_dvi.laplace.energy.passes import Passes, same_data


class Counted(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operators: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators[str(func)] += 1
        return func(*args, **(kwargs or {}))


def batches():
    return [(torch.randn(4, 2), torch.randn(4)) for _ in range(3)]


def test_a_list_of_batches_is_looked_at_once():
    passes = Passes(batches(), None)
    first = list(passes)
    checksum = passes.checksum
    with Counted() as counted:
        again = list(passes)
    assert not counted.operators
    assert passes.checksum == checksum and not passes.reordered
    assert all(
        a is b for one, other in zip(first, again, strict=True) for a, b in zip(one[0], other[0], strict=True)
    )


def test_a_change_in_place_is_noticed():
    data = batches()
    passes = Passes(data, None)
    list(passes)
    data[1][0].mul_(2)
    with pytest.raises(DataError, match="changed between two passes"):
        list(passes)


def test_a_loader_that_fills_the_same_tensors_again_is_noticed():
    class Filling:
        buffer = torch.zeros(4, 2)

        def __iter__(self):
            return (self.buffer.copy_(x) for x, _ in batches())

    passes = Passes(Filling(), None)
    with pytest.raises(DataError, match="within a pass.*copies"):
        [list(passes) for _ in range(2)]


@pytest.mark.parametrize("signs", [(-1, 1), (1, -1), (-1, -1)])
def test_a_change_of_sign_makes_other_data(signs):
    data = [(torch.randn(4, 2), torch.randn(4, 1))]
    one, other = (
        Passes(d, None) for d in (data, [tuple(s * t for s, t in zip(signs, data[0], strict=True))])
    )
    assert same_data(
        one.checksum, Passes([(t[0][[2, 0, 3, 1]], t[1][[2, 0, 3, 1]]) for t in data], None).checksum
    )
    assert not same_data(one.checksum, other.checksum)


def test_a_loader_makes_new_tensors_which_are_compared():
    data = TensorDataset(torch.arange(12.0))
    passes = Passes(DataLoader(data, batch_size=4, shuffle=True), None)
    list(passes)
    assert not passes.reordered
    for _ in range(3):
        list(passes)
    assert passes.reordered
    data.tensors[0].add_(1)
    with pytest.raises(DataError, match="changed between two passes"):
        list(passes)


def test_images_may_be_shuffled_in_single_precision():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(24, 3, 32, 32))  # sums over 3,072 pixels, in batches of 10, 10 and 4
    passes = Passes(DataLoader(data, batch_size=10, shuffle=True), None)
    for _ in range(5):
        list(passes)
    data.tensors[0][3, 0, 0, 0] += 1e-3
    with pytest.raises(DataError, match="changed between two passes"):
        list(passes)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_named_where_they_are_read(value):
    data = batches()
    data[1][1][2] = value
    with pytest.raises(DataError, match=r"NaN or infinite values: argument 2 \(1 of 4 elements\)"):
        list(Passes(data, None))


def test_values_within_nested_arguments_are_found():
    nested = ({"ids": torch.arange(3), "mask": torch.tensor([1.0, torch.nan, 1.0])}, torch.ones(3))
    with pytest.raises(DataError, match=r"argument 1 \(1 of 6 elements\)"):
        list(Passes([nested], None))


def test_numbers_beyond_float32_are_no_fault():
    list(Passes([(torch.full((3,), 1e200, dtype=torch.float64),)], None))


def test_the_first_batch_again_tells_rows_that_move_from_rows_that_change():
    data = TensorDataset(torch.arange(12.0))
    shuffled = Passes(DataLoader(data, batch_size=4, shuffle=True), None)
    list(shuffled)
    for _ in range(3):
        shuffled.first_again()
    assert shuffled.reordered

    class Augmented:
        def __iter__(self):
            yield from ((torch.randn(4),) for _ in range(3))

    augmented = Passes(Augmented(), None)
    list(augmented)
    with pytest.raises(DataError, match="changed between two passes"):
        augmented.first_again()


def test_batches_in_their_places_are_read_once_for_the_first_again():
    read = []

    class Loader:
        def __iter__(self):
            for k in range(3):
                read.append(k)
                yield (torch.full((4,), float(k)),)

    passes = Passes(Loader(), None)
    list(passes)
    passes.first_again()
    assert read == [0, 1, 2, 0]


@pytest.mark.parametrize("kind", ["tuples", "the same tuple", "mappings", "tensors"])
def test_the_same_tensors_count_once(kind):
    x, y = batches()[0]
    first = (x, y)
    twice: Any = {
        "tuples": [(x, y), batches()[1], (x, y)],
        "the same tuple": [first, first],
        "mappings": [{"x": x, "y": y}, {"x": x, "y": y}],
        "tensors": [x, x],
    }[kind]
    with pytest.raises(DataError, match="the same tensors twice.*every example once"):
        Passes(twice, None)


def test_equal_rows_and_common_tensors_are_no_repetition():
    """Data may hold the same numbers again, and batches share a tensor or differ in what is no tensor."""
    x, y = batches()[0]
    passes = Passes(
        [(x, y), (x.clone(), y.clone()), (x, y, slice(0, 2)), (x, y, slice(2, 4)), (x, y + 1)], None
    )
    assert len(list(passes)) == 5


def mode_of(batches: Any) -> None:
    """Fit a Gaussian around a mode of a model with a plate as long as each batch."""

    def model(x: Tensor, y: Tensor, rows: slice = slice(None)) -> None:
        w = pyro.sample("w", dist.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("data", len(y[rows])):
            pyro.sample("y", dist.Normal(x[rows] @ w, 1.0), obs=y[rows])

    guide = LaplaceGuide(model)
    guide.initialize(*next(iter(batches)))
    guide.fit(batches, method=Dense(), unconverged="accept")


X, Y = torch.randn(4, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([1.0, 0.0, 2.0, -1.0])


@pytest.mark.parametrize("kind", ["copies", "loader"])
def test_the_same_data_in_other_tensors_count_once(kind):
    data = TensorDataset(X, Y)
    twice: Any = {
        "copies": [(X, Y), (X.clone(), Y.clone())],
        "loader": DataLoader(ConcatDataset([data, data]), batch_size=4),
    }[kind]
    with pytest.raises(DataError, match="two batches contain the same data.*pass every row once"):
        mode_of(twice)


@pytest.mark.parametrize("kind", ["parts", "equal inputs", "equal rows", "rows in another order"])
def test_what_is_no_repetition(kind):
    """Rows picked in the model, repeated measurements, and rows that happen to be equal."""
    mode_of(
        {
            "parts": [(X, Y, slice(0, 2)), (X, Y, slice(2, 4))],
            "equal inputs": [(X, Y), (X.clone(), Y + 0.1)],
            "equal rows": [(X[:1], Y[:1]), (X[:1].clone(), Y[:1].clone())],
            "rows in another order": [(torch.ones(2, 2), Y[:2]), (torch.ones(2, 2), Y[:2].flip(0))],
        }[kind]
    )
