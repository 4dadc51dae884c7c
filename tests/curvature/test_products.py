# SPDX-License-Identifier: Apache-2.0
"""Counting what autograd saves changes nothing about its gradients."""

import weakref

import pytest
import torch
from torch import Tensor

from pyro_dvi.curvature.products import SavedBytes
from pyro_dvi.errors import ModelError


def energy(w: Tensor) -> Tensor:
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(4, 3)
    return ((x @ w).tanh().exp().softmax(-1) * w.sum()).square().sum()


def test_first_and_second_derivatives_are_those_of_torch():
    w = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    with SavedBytes():
        counted = energy(w)
    for plain, same in zip(derivatives(energy(w), w), derivatives(counted, w), strict=True):
        assert torch.equal(plain, same)


def derivatives(value: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    (gradient,) = torch.autograd.grad(value, w, create_graph=True)
    return gradient, torch.autograd.grad(gradient.square().sum(), w)[0]


def test_each_memory_counts_once_and_is_freed_with_its_graph():
    w, saved = torch.ones(10, dtype=torch.float64, requires_grad=True), SavedBytes()
    with saved:
        y = w.tanh()
        z = y * y.view(10)
    assert saved.total == 80  # y is saved by tanh, and twice by the product
    gone = weakref.ref(y.untyped_storage())
    del y, z
    assert gone() is None


def test_a_write_in_place_is_noticed_as_torch_does():
    w = torch.ones(3, requires_grad=True)
    with SavedBytes():
        y = w.exp()
        z = y.mul_(2.0)
    with pytest.raises(ModelError, match=r"shape \(3,\) in place.*x\.clone\(\)"):
        z.sum().backward()
