# SPDX-License-Identifier: Apache-2.0
"""Gathered minibatches are those that the loader itself yields, in the same order, with the same random numbers."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from pyro_dvi.training import minibatches
from pyro_dvi.training.minibatches import Minibatches

DATA = TensorDataset(torch.randn(53, 2, 3), torch.arange(53), torch.rand(53) > 0.5)


def generator():
    return torch.Generator().manual_seed(4)


GATHERED = {
    "in order": lambda: DataLoader(DATA, 8),
    "shuffled": lambda: DataLoader(DATA, 8, shuffle=True),
    "generator": lambda: DataLoader(DATA, 8, shuffle=True, generator=generator()),
    "drop_last": lambda: DataLoader(DATA, 8, shuffle=True, drop_last=True),
    "weighted": lambda: DataLoader(DATA, 8, sampler=WeightedRandomSampler(torch.rand(53), 40)),
    "with replacement": lambda: DataLoader(DATA, 8, sampler=RandomSampler(DATA, replacement=True)),
    "indices": lambda: DataLoader(DATA, 8, sampler=[4, 4, 0, -1]),
    "batch sampler": lambda: DataLoader(
        DATA, batch_sampler=BatchSampler(SubsetRandomSampler(range(9)), 4, False)
    ),
    "subset": lambda: DataLoader(Subset(DATA, [5, 1, 30, 7, 7]), 2, shuffle=True),
    "split of a split": lambda: DataLoader(random_split(random_split(DATA, [40, 13])[0], [30, 10])[1], 3),
}


def epochs(batches, count=3):
    found = [[list(map(torch.clone, batch)) for batch in batches()] for _ in range(count)]
    return found, torch.rand(1)


@pytest.mark.parametrize("name", GATHERED)
@pytest.mark.parametrize("rows", [1 << 16, 16])
def test_they_equal_those_of_the_loader(name, rows, monkeypatch):
    monkeypatch.setattr(minibatches, "_ROWS", rows)  # also several times an epoch
    torch.manual_seed(0)
    loader = GATHERED[name]()
    torch.manual_seed(1)
    expected, after = epochs(lambda: loader)
    torch.manual_seed(0)
    loader = GATHERED[name]()
    own = Minibatches(loader, on_device=False)
    monkeypatch.setattr(TensorDataset, "__getitem__", None)  # no row is read by itself
    torch.manual_seed(1)
    found, later = epochs(lambda: own.of_epoch(None))
    assert str(found) == str(expected)
    assert [[t.dtype for t in batch] for batch in found[0]] == [[t.dtype for t in b] for b in expected[0]]
    assert torch.equal(after, later)


class Own(TensorDataset):
    """A data set with code of its own."""


@pytest.mark.parametrize(
    "loader",
    [
        [(torch.ones(2), torch.zeros(2))],
        DataLoader(Own(torch.arange(4)), 2),
        DataLoader(
            TensorDataset(torch.arange(4)), 2, collate_fn=lambda rows: torch.stack([r[0] + 1 for r in rows])
        ),
        DataLoader(TensorDataset(torch.arange(4)), None),
        DataLoader(range(4), 2),
        DataLoader(TensorDataset(torch.arange(4)), batch_sampler=[[0, 1], [3]]),
        DataLoader(TensorDataset(torch.arange(4)), 3, sampler=SequentialSampler(range(3)), num_workers=1),
    ],
    ids=lambda loader: type(loader).__name__,
)
def test_other_loaders_are_iterated(loader):
    assert minibatches._tensors_of(loader) is None
    assert str(list(Minibatches(loader, on_device=True).of_epoch(None))) == str(list(loader))


def test_data_are_copied_to_the_device_once(device):
    data = TensorDataset(torch.randn(10, 2), torch.arange(10))
    own = Minibatches(DataLoader(data, 4), on_device=True)
    first = list(own.of_epoch(device))
    assert all(tensor.device == device for batch in first for tensor in batch)
    copies = [copy.data_ptr() for *_, copy in own._copies.values()]
    list(own.of_epoch(device))
    assert [copy.data_ptr() for *_, copy in own._copies.values()] == copies
    data.tensors[0].zero_()  # a change is followed
    assert not any(batch[0].cpu().any() for batch in own.of_epoch(device))
    torch.testing.assert_close(torch.cat([batch[1].cpu() for batch in first]), data.tensors[1])


def test_a_sampler_may_depend_on_the_training_so_far():
    class Own(list):
        def __iter__(self):
            return (len(taken) for _ in range(4))

    taken = []
    for batch in Minibatches(
        DataLoader(TensorDataset(torch.arange(4)), 1, sampler=Own([0])), on_device=False
    ).of_epoch(None):
        taken.append(int(batch[0]))
    assert taken == [0, 1, 2, 3]
