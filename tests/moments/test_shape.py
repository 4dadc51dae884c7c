# SPDX-License-Identifier: Apache-2.0
"""Functions that move elements: mean and variance move as every sample does; views, links and changes in place."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.expectations.gaussian import at_points
from pyro_dvi.moments import GaussianMoments


@dataclass(frozen=True)
class Case:
    """One call ``func(x, *args, **kwargs)`` for x of a shape; methods are called as such."""

    func: Callable
    shape: tuple[int, ...]
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def __call__(self, x: Any) -> Any:
        name = self.func.__name__
        if getattr(torch.Tensor, name, None) is self.func:
            return getattr(x, name)(*self.args, **self.kwargs)
        return self.func(x, *self.args, **self.kwargs)

    def __str__(self) -> str:
        options = (type(a).__name__ if hasattr(a, "dtype") else a for a in (*self.args, *self.kwargs.items()))
        return f"{self.func.__name__}({','.join(map(str, options))})"

    def x(self) -> GaussianMoments:
        return gaussian(*self.shape)


def gaussian(*shape: int) -> Any:
    generator = torch.Generator().manual_seed(5)
    loc, variance = (f(shape, generator=generator, dtype=torch.float64) for f in (torch.randn, torch.rand))
    return GaussianMoments(loc, variance + 0.1)


S = (2, 3, 4)
INDEX = torch.tensor([2, 0, 0])
MASK = gaussian(*S).loc > 0

VIEWS = [
    Case(torch.reshape, S, ((6, 4),)),
    Case(torch.reshape, S, ((-1,),)),
    Case(torch.Tensor.reshape, S, (6, -1)),
    Case(torch.Tensor.view, S, (2, 12)),
    Case(torch.Tensor.view, S, ((-1, 2),)),
    Case(torch.Tensor.view, S, (torch.Size([24]),)),
    Case(torch.flatten, S, (1,)),
    Case(torch.flatten, S, (), {"start_dim": 0, "end_dim": 1}),
    Case(torch.ravel, S),
    Case(torch.unflatten, S, (2, (2, 2))),
    Case(torch.Tensor.unflatten, S, (-1, (2, 2))),
    Case(torch.permute, S, ((2, 0, 1),)),
    Case(torch.Tensor.permute, S, (2, 0, 1)),
    Case(torch.transpose, S, (1, 2)),
    Case(torch.transpose, S, (), {"dim0": -1, "dim1": 0}),
    Case(torch.swapaxes, S, (0, 1)),
    Case(torch.swapdims, S, (0, 1)),
    Case(torch.movedim, S, (0, -1)),
    Case(torch.moveaxis, S, (0, -1)),
    Case(torch.t, (3, 4)),
    Case(torch.adjoint, S),
    Case(torch.squeeze, (1, 3, 1)),
    Case(torch.squeeze, (1, 3, 1), (0,)),
    Case(torch.Tensor.squeeze, (1, 3, 1), (-1,)),
    Case(torch.unsqueeze, S, (1,)),
    Case(torch.Tensor.expand, (1, 3), (2, -1)),
    Case(torch.Tensor.expand, (1, 3), ((4, 2, 3),)),
    Case(torch.Tensor.view_as, (12,), (torch.zeros(3, 4),)),
    Case(torch.Tensor.view_as, (12,), (gaussian(3, 4),)),
    Case(torch.Tensor.reshape_as, (12,), (gaussian(3, 4),)),
    Case(torch.Tensor.expand_as, (4,), (gaussian(3, 4),)),
    Case(torch.Tensor.expand_as, (4,), (torch.zeros(3, 4),)),
    Case(torch.broadcast_to, (1, 3), ((2, 3),)),
    Case(torch.narrow, S, (2, 1, 2)),
    Case(torch.select, S, (1, -1)),
    Case(torch.diagonal, S, (), {"dim1": 1, "dim2": 2}),
    Case(torch.Tensor.unfold, (2, 9), (1, 3, 2)),
    Case(torch.atleast_1d, ()),
    Case(torch.atleast_2d, (3,)),
    Case(torch.atleast_3d, (3,)),
    Case(torch.Tensor.__getitem__, S, (0,)),
    Case(torch.Tensor.__getitem__, S, (-1,)),
    Case(torch.Tensor.__getitem__, S, (slice(1, None),)),
    Case(torch.Tensor.__getitem__, S, ((..., 0),)),
    Case(torch.Tensor.__getitem__, S, ((slice(None), None, 1, slice(0, 4, 2)),)),
]

PARTS = [
    Case(torch.split, S, (2,), {"dim": 1}),
    Case(torch.split, S, ([1, 3],), {"dim": -1}),
    Case(torch.Tensor.split, S, (2, 1)),
    Case(torch.split_with_sizes, S, ([1, 3], 2)),
    Case(torch.chunk, S, (2, 2)),
    Case(torch.tensor_split, S, (3, 2)),
    Case(torch.hsplit, (3, 4), (2,)),
    Case(torch.vsplit, (4, 3), (2,)),
    Case(torch.dsplit, S, (2,)),
    Case(torch.unbind, S, (1,)),
]

COPIES = [
    Case(torch.Tensor.__getitem__, S, (MASK,)),
    Case(torch.Tensor.__getitem__, S, ((slice(None), INDEX),)),
    Case(torch.Tensor.__getitem__, S, ([1, 0],)),
    Case(torch.index_select, S, (1, INDEX)),
    Case(torch.gather, S, (1, torch.zeros(2, 1, 4, dtype=torch.long))),
    Case(torch.take, S, (INDEX,)),
    Case(torch.take_along_dim, S, (torch.zeros(2, 1, 4, dtype=torch.long), 1)),
    Case(torch.masked_select, S, (MASK,)),
    Case(torch.Tensor.repeat, (2, 3), (2, 1, 2)),
    Case(torch.tile, (2, 3), ((2, 2),)),
    Case(torch.Tensor.tile, (2, 3), (2, 2)),
    Case(torch.repeat_interleave, (2, 3), (2,), {"dim": 1}),
    Case(torch.repeat_interleave, (3, 2), (torch.tensor([1, 0, 2]),), {"dim": 0}),
    Case(torch.roll, S, (1, 2)),
    Case(torch.roll, S, (), {"shifts": (1, 2), "dims": (0, 1)}),
    Case(torch.flip, S, ((0, 2),)),
    Case(torch.Tensor.flip, S, (0, 2)),
    Case(torch.fliplr, S),
    Case(torch.flipud, S),
    Case(torch.rot90, S),
    Case(torch.pixel_shuffle, (1, 8, 2, 2), (2,)),
    Case(torch.pixel_unshuffle, (1, 2, 4, 4), (2,)),
    Case(torch.channel_shuffle, (1, 6, 2, 2), (3,)),
]

ZEROING = [  # elements move, and what appears besides is zero
    Case(torch.tril, S),
    Case(torch.triu, S, (1,)),
    Case(torch.diag, (3,)),
    Case(torch.diag, (3, 3), (1,)),
    Case(torch.diag_embed, (2, 3)),
    Case(F.unfold, (1, 2, 4, 4), (3,), {"padding": 1}),
    Case(F.pad, (2, 4), ((1, 2),)),
    Case(F.pad, (2, 4), (), {"pad": (-1, 2), "value": 0.0}),
    Case(F.pad, (2, 4), ((1, 2), "reflect")),
    Case(F.pad, (2, 4), ((1, 2),), {"mode": "replicate"}),
    Case(F.pad, (1, 2, 4), ((1, 2),), {"mode": "circular"}),
]

OTHERS = [  # with tests of their own
    Case(F.fold, (1, 8, 9), ((4, 4), 2)),
    Case(torch.broadcast_tensors, (3,)),
    Case(torch.Tensor.__setitem__, S),
    *(
        Case(f, S)
        for f in (torch.Tensor.copy_, torch.Tensor.fill_, torch.fill_, torch.Tensor.zero_, torch.zero_)
    ),
    *(
        Case(f, S)
        for f in (torch.cat, torch.concat, torch.concatenate, torch.stack, torch.hstack, torch.vstack)
    ),
    *(Case(f, S) for f in (torch.dstack, torch.column_stack, torch.row_stack)),
]

MOVING = [*VIEWS, *PARTS, *COPIES]
CASES = [*MOVING, *ZEROING, *OTHERS]


def parts_of(result: Any) -> tuple:
    return result if isinstance(result, tuple) else (result,)


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


@pytest.mark.parametrize("case", [*MOVING, *ZEROING], ids=str)
def test_certain_inputs_stay_certain(case: Case) -> None:
    x = case.x()
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


# --- views ---------------------------------------------------------------------------------------------------


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
def test_parts_do_not_overlap(case: Case) -> None:
    x = case.x()
    first, second, *_ = case(x)
    view, expected = second.flatten(), second.loc
    first.relu_()
    assert second.loc is expected and view.sum().loc.isfinite()
    second.relu_()  # nor the other way round
    first.sum()
    with pytest.raises(UnsupportedError, match="changed in place"):
        view.sum()


@pytest.mark.parametrize("case", PARTS, ids=str)
def test_a_change_of_the_base_makes_its_parts_unusable(case: Case) -> None:
    x = case.x()
    first, second, *_ = case(x)
    inner = second.unbind(0)[0]
    x += 1
    for part in (first, second, inner):
        with pytest.raises(UnsupportedError, match="changed in place"):
            part.sum()


def test_parts_of_different_calls_do_overlap() -> None:
    x = gaussian(4)
    first, second = x.chunk(2)
    third, fourth = x.chunk(2)
    inner, other = second.chunk(2)
    first[0] = 0  # written by index, which reaches the part and what it is a part of
    for part in (x, third, fourth):
        with pytest.raises(UnsupportedError, match="changed in place"):
            part.sum()
    for part in (first, second, inner, other):
        part.sum()
    inner.zero_()
    other.sum()
    with pytest.raises(UnsupportedError, match="changed in place"):
        second.sum()


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
    with pytest.raises(UnsupportedError, match="certain"):
        call(gaussian(3))


# --- writing by index ----------------------------------------------------------------------------------------


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
