# SPDX-License-Identifier: Apache-2.0
"""Calls that move elements: views, parts, copies, and those that put zeros beside them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

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


def parts_of(result: Any) -> tuple:
    return result if isinstance(result, tuple) else (result,)
