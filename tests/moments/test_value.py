# SPDX-License-Identifier: Apache-2.0
"""Changes in place: what is written into a part is written into the whole, and what became stale is refused."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from tests.moments.moves import (
    COPIES,
    PARTS,
    VIEWS,
    Case,
    gaussian,
    parts_of,
)

INDEXED = [case for case in VIEWS if case.func is torch.Tensor.__getitem__]


@pytest.mark.parametrize("case", INDEXED, ids=str)
def test_what_is_written_into_a_part_is_written_into_the_whole(case: Case) -> None:
    x = case.x()
    (index,) = case.args
    loc, variance = x.loc.clone(), x.variance.clone()
    part = x[index]
    assert part.mul_(3) is part
    loc[index] *= 3
    variance[index] *= 9
    assert x.loc.equal(loc) and x.variance.equal(variance)
    part += 1  # both stay valid
    loc[index] += 1
    assert x.loc.equal(loc) and part.loc.equal(loc[index])


def test_parts_of_parts_write_through() -> None:
    x = gaussian(3, 4)
    loc, variance = x.loc.clone(), x.variance.clone()
    row = x[1]
    row[2:].zero_()
    loc[1, 2:], variance[1, 2:] = 0, 0
    assert x.loc.equal(loc) and x.variance.equal(variance) and row.loc.equal(loc[1])


def test_a_part_of_a_base_that_changed_is_unusable() -> None:
    x = gaussian(3, 4)
    first, second = x[0], x[1]
    first.fill_(1.0)
    with pytest.raises(UnsupportedError, match="changed in place"):
        second.relu_()


@pytest.mark.parametrize("case", [*(c for c in VIEWS if c not in INDEXED), *PARTS], ids=str)
def test_a_change_of_a_view_makes_its_base_unusable(case: Case) -> None:
    x = case.x()
    view = parts_of(case(x))[0]
    view.relu_()
    with pytest.raises(UnsupportedError, match="changed in place"):
        x.sum()
    view.sum()


@pytest.mark.parametrize("case", VIEWS, ids=str)
def test_a_change_of_the_base_makes_a_view_unusable(case: Case) -> None:
    x = case.x()
    view = case(x)
    x += 1
    with pytest.raises(UnsupportedError, match="changed in place"):
        view.sum()


@pytest.mark.parametrize("case", COPIES, ids=str)
def test_a_copy_is_free_of_its_origin(case: Case) -> None:
    x = case.x()
    case(x).relu_()
    x.sum()


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_a_change_of_the_base_makes_its_parts_unusable(case: Case) -> None:
    x = case.x()
    first, second, *_ = case(x)
    inner = second.unbind(0)[0]
    x += 1
    for part in (first, second, inner):
        with pytest.raises(UnsupportedError, match="changed in place"):
            part.sum()


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_a_change_of_a_part_makes_the_others_unusable(case: Case) -> None:
    x = case.x()
    first, second, *_ = case(x)
    first.relu_()
    first.sum()
    for other in (x, second):
        with pytest.raises(UnsupportedError, match="changed in place"):
            other.sum()


def test_what_is_written_into_data_is_written_into_the_moments() -> None:
    x = gaussian(3)
    variance = x.variance.clone()
    x.data[0] = 7
    x.data.mul_(2)
    assert x.loc[0] == 14 and x.variance[0] == 0
    torch.testing.assert_close(x.variance[1:], 4 * variance[1:])
    kept = x.detach()
    x += 1
    with pytest.raises(UnsupportedError, match="changed in place"):
        kept.sum()


def test_flatten_then_relu_in_place_gives_the_same_as_out_of_place() -> None:
    x = gaussian(2, 3, 4)
    expected = torch.relu(x.flatten(1))
    h = x.flatten(1)
    assert F.relu(h, inplace=True) is h
    assert h.loc.equal(expected.loc) and h.variance.equal(expected.variance)


def test_numbers_and_tensors_are_written_with_variance_zero() -> None:
    x = gaussian(3, 4)
    loc, variance = x.loc.clone(), x.variance.clone()
    x[:, 0] = 0
    x[1] = torch.ones(4)
    loc[:, 0], variance[:, 0], loc[1], variance[1] = 0, 0, 1, 0
    assert x.loc.equal(loc) and x.variance.equal(variance)


def test_moments_are_written_with_their_variance() -> None:
    x, y = gaussian(3, 4), gaussian(2, 4)
    original = x.loc
    x[torch.tensor([True, False, True])] = y
    assert x.loc[2].equal(y.loc[1]) and x.variance[2].equal(y.variance[1])
    assert x.variance[0].equal(y.variance[0])
    assert not original[2].equal(y.loc[1])  # the tensors of others are left alone


def test_writing_makes_older_views_unusable() -> None:
    x = gaussian(3, 4)
    row = x[0]
    x[1] = 0
    with pytest.raises(UnsupportedError, match="changed in place"):
        row.sum()


@pytest.mark.parametrize("index", [0, (slice(None), 1), (..., slice(0, 2))], ids=str)
def test_a_part_is_changed_in_place(index: Any) -> None:
    x = gaussian(3, 4)
    loc, variance = x.loc.clone(), x.variance.clone()
    x[index] *= 3
    loc[index] *= 3
    variance[index] *= 9
    assert x.loc.equal(loc) and x.variance.equal(variance)


def test_a_changed_part_may_be_written_elsewhere() -> None:
    x = gaussian(3, 4)
    loc = x.loc.clone()
    row = x[0]
    row += 1
    x[1] = row
    loc[0] += 1
    loc[1] = loc[0]
    assert x.loc.equal(loc)


def test_overwriting() -> None:
    x, y = gaussian(3, 4), torch.relu(gaussian(3, 4))
    assert x.copy_(y) is x
    assert x.loc.equal(y.loc) and x.variance.equal(y.variance)
    assert x.fill_(2.0) is x and x.loc.eq(2).all() and x.variance.eq(0).all()
    assert x.zero_().loc.eq(0).all()
    with pytest.raises(UnsupportedError, match="no variance"):
        torch.zeros(3, 4).copy_(y)


def test_gradients_pass_through_writing() -> None:
    loc, variance = (t.clone().requires_grad_() for t in (torch.ones(3), torch.ones(3)))
    x = 2 * GaussianMoments(loc, variance)
    x[0] = 5
    (x.loc.sum() + x.variance.sum()).backward()
    assert loc.grad.tolist() == [0, 2, 2] and variance.grad.tolist() == [0, 4, 4]


def test_moments_do_not_fit_into_a_tensor() -> None:
    out = torch.zeros(3, 4)
    with pytest.raises(UnsupportedError, match=r"torch\.stack"):
        out[0] = gaussian(4)
