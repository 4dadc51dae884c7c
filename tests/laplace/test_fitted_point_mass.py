# SPDX-License-Identifier: Apache-2.0
"""The mode of a Laplace guide, and what tells it from an earlier one."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from pyro_dvi.errors import ArgumentError, GuideError
from pyro_dvi.laplace.fitted import ModelReference, PointMass

POINT = PointMass({"w": torch.zeros(2, 3), "b": torch.ones(3)})


def test_the_sites_that_vary():
    assert POINT.layout().names == ["w", "b"]
    assert POINT.layout("b*").size == 3


@pytest.mark.parametrize("subset", [[], "c"], ids=["none", "unknown"])
def test_a_subset_without_sites_is_refused(subset):
    with pytest.raises(ArgumentError, match="subset"):
        POINT.layout(subset)


def test_a_site_without_entries_never_varies():
    point = PointMass({**POINT.locs, "none": torch.zeros(2, 0)})
    assert point.layout().names == point.layout({"w": True, "b": True, "none": True}).names == ["w", "b"]


def test_what_has_changed_since_a_fit():
    assert POINT.change_since(replace(POINT)) is None
    moved = replace(POINT, locs={**POINT.locs, "b": torch.zeros(3)})
    for other, what in (
        (moved, "'b' has moved"),
        (replace(POINT, scale_factors={"w": 2.0}), "scale_factors"),
        (replace(POINT, kl_weight=0.5), "guide.kl_weight is 0.5, but the fit had kl_weight=1"),
    ):
        assert what in str(other.change_since(POINT))


def test_copies_share_the_model_and_files_leave_it_out():
    model = ModelReference(nn.Linear(1, 1))
    assert copy.deepcopy(model).get() is model.get()
    with pytest.raises(GuideError, match="loaded without its model"):
        pickle.loads(pickle.dumps(model)).get()
