# SPDX-License-Identifier: Apache-2.0
"""Nested batches keep their types, whatever they are made of."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from pyro_dvi.core.batches import arguments, dataset_size, mapped, tensors_in

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Graph:
    nodes: Tensor
    name: str = "g"


A, B = torch.ones(2), torch.zeros(3)


@pytest.mark.parametrize(
    "value",
    [
        (A, B),
        [A, [B]],
        Pair(A, B),
        {"a": A, "b": (B,)},
        OrderedDict(a=A, b=B),
        UserDict(a=A, b=B),
        Pair(Graph(A), Graph(B)),
    ],
    ids=lambda v: type(v).__name__,
)
def test_containers_keep_their_type(value):
    assert [t is o for t, o in zip(tensors_in(value), (A, B), strict=True)] == [True, True]
    doubled = mapped(lambda v: 2 * v if isinstance(v, Tensor) else v, value)
    assert type(doubled) is type(value)
    assert all(map(torch.equal, tensors_in(doubled), (2 * A, 2 * B)))
    assert torch.equal(tensors_in(value)[0], A), "the original is left alone"


def test_a_mapping_that_cannot_be_written_to_becomes_a_dict():
    assert mapped(abs, MappingProxyType({"x": -1})) == {"x": 1}


def test_a_data_class_of_tensors_moves_with_its_batch():
    (moved,), _ = arguments([Graph(A)], torch.device("meta"))
    assert moved.nodes.is_meta and moved.name == "g"


PART = [3, 5, 7]


class Own(Sampler):
    def __iter__(self):
        return iter(PART)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(100))

    def __len__(self):
        return 100


@pytest.mark.parametrize(
    "size, options",
    [
        (100, {"shuffle": True, "drop_last": True, "batch_size": 7}),
        (98, {"drop_last": True, "batch_size": 7}),
        (2, {"sampler": PART, "drop_last": True, "batch_size": 2}),
        (3, {"sampler": PART, "drop_last": True, "batch_size": 4}),
        (50, {"sampler": SubsetRandomSampler(range(50)), "drop_last": True, "batch_size": 7}),
        (100, {"sampler": RandomSampler(range(100), replacement=True, num_samples=7)}),
        (100, {"sampler": DistributedSampler(range(100), num_replicas=4, rank=1)}),
        (50, {"sampler": RandomSampler(range(50))}),
        (50, {"sampler": SequentialSampler(range(50))}),
        (3, {"sampler": SubsetRandomSampler(PART)}),
        (3, {"sampler": PART}),
        (3, {"sampler": WeightedRandomSampler([0.0, 2.0, 1.0, 1.0], 9)}),
        (3, {"batch_sampler": BatchSampler(SubsetRandomSampler(PART), 2, False)}),
        (3, {"batch_sampler": BatchSampler(PART, 2, False)}),
        (3, {"batch_sampler": [PART[:1], PART[1:]]}),
        (3, {"batch_size": None, "sampler": BatchSampler(PART, 2, False)}),
        (None, {"batch_size": None}),
        (None, {"sampler": Own()}),
        (None, {"batch_sampler": BatchSampler(Own(), 2, False)}),
    ],
)
def test_the_size_of_the_data_is_the_number_of_rows_that_a_sampler_can_draw(size, options):
    assert dataset_size(DataLoader(range(100), **options)) == size


def test_the_size_of_the_data_without_a_sampler():
    assert dataset_size(DataLoader(Stream())) == 100
    assert dataset_size([1, 2]) is None
