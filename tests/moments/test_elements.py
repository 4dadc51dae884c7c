# SPDX-License-Identifier: Apache-2.0
"""Functions that move elements: mean and variance move as every sample does, and so do links."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.points import at_points
from pyro_dvi.moments import GaussianMoments
from tests.moments.moves import (
    MOVING,
    OTHERS,
    ZEROING,
    Case,
    gaussian,
    parts_of,
)

CASES = [*MOVING, *ZEROING, *OTHERS]


@pytest.mark.parametrize("case", [*MOVING, *ZEROING], ids=str)
def test_mean_and_variance_move_as_values_do(case: Case) -> None:
    x = case.x()
    plain = tuple(a.loc if isinstance(a, GaussianMoments) else a for a in case.args)
    values = Case(case.func, case.shape, plain, case.kwargs)
    results = parts_of(case(x))
    expected = zip(parts_of(values(x.loc)), parts_of(values(x.variance)), strict=True)
    for result, (loc, variance) in zip(results, expected, strict=True):
        assert result.shape == loc.shape
        assert result.loc.equal(loc) and result.variance.equal(variance)
    for part in parts_of(case(GaussianMoments(x.loc, torch.zeros_like(x.loc)))):
        assert part.variance.eq(0).all()


@pytest.mark.parametrize("case", MOVING, ids=str)
def test_links_move_along(case: Case) -> None:
    x = case.x()
    y = torch.relu(0.5 * x)
    for part, inner in zip(parts_of(case(y)), parts_of(case(0.5 * x)), strict=True):
        assert part.link.name == "relu" and part.link.elementwise
        assert part.link.inner.loc.equal(inner.loc) and part.link.inner.variance.equal(inner.variance)
        assert part.link.function(torch.tensor([-1.0, 2.0])).tolist() == [0, 2]


def test_the_standard_deviation_of_a_head_is_linked_to_its_logarithm() -> None:
    c = gaussian(5, 2)
    scale = torch.square(0.5 * c[..., 1]).clone()[:, None].squeeze(-1)
    assert scale.link.name == "square"
    torch.testing.assert_close(scale.link.inner.loc, 0.5 * c.loc[:, 1])
    torch.testing.assert_close(scale.link.inner.variance, 0.25 * c.variance[:, 1])


def test_a_shift_stays_in_the_link() -> None:
    y = (torch.relu(gaussian(3, 2)) + 0.01)[..., 1]
    assert y.link.name is None
    torch.testing.assert_close(y.link.function(torch.tensor([-1.0, 2.0])), torch.tensor([0.01, 2.01]))


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch.take inside vmap
@pytest.mark.parametrize("case", [case for case in MOVING if case.shape], ids=str)
def test_a_link_that_differs_between_elements_moves_what_it_returns(case: Case) -> None:
    x = case.x()
    factor = torch.arange(1.0, 1 + x.numel(), dtype=torch.float64).reshape(x.shape)
    y = torch.exp(x) * factor
    assert y.link.elementwise and not y.link.uniform
    points = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    spread = x.variance.sqrt()
    plain = Case(
        case.func,
        case.shape,
        tuple(a.loc if isinstance(a, GaussianMoments) else a for a in case.args),
        case.kwargs,
    )
    for k, part in enumerate(parts_of(case(y))):
        again = part.unsqueeze(-1)
        assert part.link.moved and again.link.moved and not part.link.elementwise
        expected = [parts_of(plain((x.loc + z * spread).exp() * factor))[k] for z in points.tolist()]
        torch.testing.assert_close(at_points(part, points), torch.stack(expected))
        torch.testing.assert_close(at_points(again, points), torch.stack(expected).unsqueeze(-1))
        draws = torch.stack([x.loc + z * spread for z in points.tolist()])
        torch.testing.assert_close(part.link.function(draws), torch.stack(expected))


@pytest.mark.parametrize("shape", [(2,), (3, 2)])
@pytest.mark.parametrize(
    "move",
    [lambda y: y[..., [1, 0]], lambda y: y.flip(-1), lambda y: y[..., None].squeeze(-1)],
    ids=["index", "flip", "squeeze"],
)
def test_certain_over_uncertain_keeps_its_numerators_when_moved(move: Callable, shape: tuple) -> None:
    x = GaussianMoments(torch.full((2,), 4.0), torch.tensor([0.01, 0.02]))
    numerator = torch.arange(1.0, 1 + torch.Size(shape).numel()).reshape(shape)
    y = numerator / x
    assert y.link.inner.shape == y.shape and y.link.elementwise and not y.link.uniform
    z = torch.tensor([-1.0, 1.0])
    expected = torch.stack([move(numerator / (x.loc + s * x.variance.sqrt())) for s in z.tolist()])
    torch.testing.assert_close(at_points(move(y), z), expected)


@pytest.mark.parametrize(
    "convert", [torch.detach, torch.clone, lambda x: x.data, lambda x: x.detach(), lambda x: x.float()]
)
@pytest.mark.parametrize(
    "function",
    [torch.exp, lambda h: torch.exp(h) * h.loc, lambda h: torch.softmax(h, -1), lambda h: 1 + torch.relu(h)],
    ids=["exp", "scaled", "softmax", "shifted"],
)
def test_conversions_keep_links(convert: Callable, function: Callable) -> None:
    loc = gaussian(3, 2).loc.clone().requires_grad_()
    h = GaussianMoments(loc, gaussian(3, 2).variance)
    before = function(h)
    after = convert(before)
    z = torch.tensor([-1.0, 1.0], dtype=torch.float64)
    values = at_points(after, z.to(after.link.inner.dtype))
    torch.testing.assert_close(values, at_points(before, z).to(after.dtype), check_dtype=False)
    assert (after.link.name, after.link.elementwise) == (before.link.name, before.link.elementwise)
    if not after.loc.requires_grad:
        assert not values.requires_grad


def test_a_link_is_broadcast_with_its_moments() -> None:
    y = torch.relu(gaussian(1, 2)) + torch.ones(3, 2)
    assert y.link.inner.shape == (3, 2)


def test_a_link_outlives_changes_in_place() -> None:
    x = gaussian(3)
    before = x.loc
    y = torch.relu(x)
    x += 1
    assert y.link.inner.loc is before


def test_a_link_to_a_function_in_place_leaves_its_argument_alone() -> None:
    x = gaussian(3)
    x.square_()
    value = torch.tensor([2.0])
    assert x.link.function(value).item() == 4
    assert value.item() == 2


def test_a_variance_that_is_expanded_can_be_viewed() -> None:
    x = GaussianMoments(torch.zeros(2, 6), torch.arange(6.0))
    for y in (x.view(4, 3), x.view(-1), x.unflatten(1, (2, 3)), x.flatten(), x.view_as(torch.zeros(12))):
        assert y.variance.shape == y.loc.shape


def test_iteration_and_unpacking() -> None:
    x = gaussian(2, 3)
    first, second = x
    assert first.loc.equal(x.loc[0]) and second.variance.equal(x.variance[1])
    assert len(x) == 2 and [len(r) for r in x] == [3, 3]
    assert x.T.shape == (3, 2) and x.mT.shape == (3, 2)


def test_view_as_another_dtype_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="reinterprets bits"):
        gaussian(2).view(torch.int64)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x[x],
        lambda x: x[0, x],
        lambda x: torch.zeros(3)[x],
        lambda x: torch.zeros(2)[x, 0],
        lambda x: torch.gather(torch.zeros(3), 0, x),
        lambda x: x.masked_fill(torch.tensor([True, False, False]), x[0]),
    ],
)
def test_uncertain_indices_are_refused(call: Callable) -> None:
    with pytest.raises(UnsupportedError, match="deterministic"):
        call(gaussian(3))


# --- joining -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "func",
    [
        torch.cat,
        torch.concat,
        torch.concatenate,
        torch.stack,
        torch.hstack,
        torch.vstack,
        torch.dstack,
        torch.column_stack,
        torch.row_stack,
    ],
)
def test_moments_and_tensors_join(func: Callable) -> None:
    x, c, y = gaussian(2, 3), torch.randn(2, 3, dtype=torch.float64), gaussian(2, 3)
    joined = func([x, c, y])
    assert joined.loc.equal(func([x.loc, c, y.loc]))
    assert joined.variance.equal(func([x.variance, torch.zeros_like(c), y.variance]))


def test_joining_follows_dimensions_and_dtypes() -> None:
    x: Any = GaussianMoments(torch.ones(2, 3), torch.ones(2, 3))
    c = torch.zeros(2, 3, dtype=torch.float64)
    for y in (torch.cat((c, x), dim=1), torch.cat(tensors=[x, c], dim=-1), torch.stack((c, x), -1)):
        assert y.loc.dtype is y.variance.dtype is torch.float64
        assert y.variance.sum() == 6
    with pytest.raises(UnsupportedError, match="out="):
        torch.cat([x, x], out=torch.zeros(4, 3))


def test_broadcast_tensors_keeps_what_is_certain() -> None:
    x, c = torch.broadcast_tensors(gaussian(3), torch.zeros(2, 1))
    assert x.shape == c.shape == (2, 3)
    assert isinstance(x, GaussianMoments) and type(c) is Tensor


def test_fold_adds_what_overlaps() -> None:
    x = gaussian(1, 8, 9)
    y = F.fold(x, (4, 4), 2)
    assert y.loc.equal(F.fold(x.loc, (4, 4), 2)) and y.variance.equal(F.fold(x.variance, (4, 4), 2))


def test_padding_is_certain() -> None:
    y = F.pad(gaussian(2, 3), (1, 0), value=7.0)
    assert y.loc[:, 0].eq(7).all() and y.variance[:, 0].eq(0).all() and y.variance[:, 1:].gt(0).all()


def test_a_tensor_takes_the_shape_and_dtype_of_moments() -> None:
    c, x = torch.zeros(12), gaussian(3, 4)
    assert c.view_as(x).shape == c.reshape_as(x).shape == c[:4].expand_as(x).shape == (3, 4)
    assert c.to(x).dtype is c.type_as(x).dtype is torch.float64
    assert torch.relu(x).to(gaussian(2).float()).link.name == "relu"
