# SPDX-License-Identifier: Apache-2.0
"""Nested batches keep their types, whatever they are made of."""

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType

import pytest
import torch
from torch import Tensor

from pyro_dvi.core.batches import arguments, mapped, tensors_in

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
