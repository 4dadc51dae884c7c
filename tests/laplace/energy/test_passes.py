# SPDX-License-Identifier: Apache-2.0
"""The data of a solve are compared between passes."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from pyro_dvi.errors import DataError
from pyro_dvi.laplace.energy.passes import Passes


def batches():
    return [(torch.randn(4, 2), torch.randn(4)) for _ in range(3)]


def test_a_change_in_place_is_noticed():
    data = batches()
    passes = Passes(data, None)
    list(passes)
    data[1][0].mul_(2)
    with pytest.raises(DataError, match="changed between two passes"):
        list(passes)


def test_mirrored_images_are_noticed():
    class Augmented:
        images = torch.randn(6, 1, 4, 4)

        def __iter__(self):
            yield (torch.where(torch.rand(6, 1, 1, 1) < 0.5, self.images, self.images.flip(-1)),)

    passes = Passes(Augmented(), None)
    with pytest.raises(DataError, match="changed between two passes"):
        [list(passes) for _ in range(5)]


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
    data.tensors[0][3, 0, 0, 0] += 1e-2
    with pytest.raises(DataError, match="changed between two passes"):
        list(passes)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_values_that_are_not_finite_are_named_where_they_are_read(value):
    data = batches()
    data[1][1][2] = value
    passes = Passes(data, None)
    found = [passes.bad for _ in passes]
    assert "NaN or infinite values: argument 2 (1 of 4 elements)" in str(found[1])
    assert all(bad is None for k, bad in enumerate(found) if k != 1)


def test_values_within_nested_arguments_are_found():
    nested = ({"ids": torch.arange(3), "mask": torch.tensor([1.0, torch.nan, 1.0])}, torch.ones(3))
    passes = Passes([nested], None)
    assert "argument 1 (1 of 6 elements)" in [str(passes.bad) for _ in passes][0]


def test_numbers_beyond_float32_are_no_fault():
    list(Passes([(torch.full((3,), 1e200, dtype=torch.float64),)], None))


def test_the_first_batch_again_tells_rows_that_move_from_rows_that_change():
    data = TensorDataset(torch.arange(12.0))
    shuffled = Passes(DataLoader(data, batch_size=4, shuffle=True), None)
    list(shuffled)
    for _ in range(3):
        shuffled.first()
    assert shuffled.reordered

    class Augmented:
        def __iter__(self):
            yield from ((torch.randn(4),) for _ in range(3))

    augmented = Passes(Augmented(), None)
    list(augmented)
    with pytest.raises(DataError, match="changed between two passes"):
        augmented.first()
