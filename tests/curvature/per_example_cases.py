# SPDX-License-Identifier: Apache-2.0
"""Models with one latent weight or more, for the per-example gradients; a plain loop over examples is the oracle."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

M = 5


@dataclass(frozen=True)
class Case:
    """A model ``call(x, *weights) -> one number per example``, and whether the layer-wise rules cover it."""

    name: str
    call: Callable[..., Tensor]
    x: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    covered: tuple[bool, ...] | None = None  # by weight; all by default
    heavy: bool = False  # large enough to be worked through in parts; second derivatives are left out
    twice: bool = True  # can be differentiated twice

    def inputs(self) -> tuple[Tensor, list[Tensor]]:
        generator = torch.Generator().manual_seed(2)
        x, *weights = (
            torch.randn(s, dtype=torch.float64, generator=generator) for s in (self.x, *self.weights)
        )
        return x, [w.requires_grad_() for w in weights]


def head(h: Tensor) -> Tensor:
    """A non-linear number per example."""
    return torch.tanh(h.flatten(1)).square().sum(1) if h.dim() > 1 else torch.tanh(h)


def conv(dims: int, x: tuple, w: tuple, bias: bool = True, covered: bool = True, **options: Any) -> Case:
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    ordered = [options.get(k, d) for k, d in (("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))]

    def call(x: Tensor, weight: Tensor, b: Tensor | None = None) -> Tensor:
        return head(function(x, weight, b, *ordered))

    name = ", ".join([f"conv{dims}d", *(f"{k}={v}" for k, v in options.items())])
    weights = (w, (w[0],)) if bias else (w,)
    return Case(name, call, (M, *x), weights, (covered,) * len(weights))


def keyword_linear(x: Tensor, w: Tensor) -> Tensor:
    return head(F.linear(input=x, weight=w))


def twice(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return head(F.linear(F.softplus(F.linear(x, w, b)), w, b))


def in_place(x: Tensor, w: Tensor) -> Tensor:
    h = F.linear(x, w)
    h.mul_(h.detach() * 0 + 3.0)
    return head(h)


def in_place_activation(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return head(F.silu(F.linear(x, w, b), inplace=True))


def frozen_part(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        constant = F.linear(x, w)
    return head(F.linear(x, w) + constant)


def parts(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Slices and chunks of a packed weight, one of them transposed, and a part that another use overlaps."""
    first, second = w.T.chunk(2)
    return head((F.linear(x, first.T, b[:5]) @ second.T + F.linear(x, w[:3, 3:])).tanh() @ w[1:4, :2] + b[5])


def folded(x: Tensor, w: Tensor, b: Tensor, scale: Tensor) -> Tensor:
    """Tokens of all examples as rows, by example or by token."""
    by_example = F.linear(x.reshape(-1, 3), w, b).unflatten(0, x.shape[:2])
    by_token = F.layer_norm(F.linear(x.transpose(0, 1).reshape(-1, 3), w, b), (4,), scale)
    return head(by_example.tanh() + by_token.unflatten(0, (-1, len(x))).transpose(0, 1))


def tokens_first(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x.transpose(0, 1), w, b).tanh().cumsum(0).transpose(0, 1)


def films(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    """Convolutions of single pictures."""
    return head(F.conv2d(x.flatten(0, 1), w, b).tanh().unflatten(0, x.shape[:2]))


def attention(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return head(
        F.multi_head_attention_forward(x, x, x, 4, 2, w, b, None, None, False, 0.0, v, c)[0].transpose(0, 1)
    )


def written_into(x: Tensor, w: Tensor) -> Tensor:
    buffer = torch.zeros(3, 4, dtype=x.dtype)
    buffer[0] = w[0]
    buffer = torch.cat([buffer, w[1:]])
    return head(F.linear(F.linear(x, w), buffer.T[:, :3].T))


def plus_equals(x: Tensor, b: Tensor) -> Tensor:
    x = 2 * x
    x += b
    return head(x)


def forgotten(x: Tensor, w: Tensor) -> Tensor:
    F.linear(x, w).sum()
    return head(F.linear(x, w))


def running(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.tensor([0.5, -0.2], dtype=x.dtype), torch.tensor([0.7, 2.0], dtype=x.dtype)


def transposed(dims: int, x: tuple, w: tuple, **options: Any) -> Case:
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
    name = ", ".join([f"conv_transpose{dims}d", *(f"{k}={v}" for k, v in options.items())])
    groups = options.get("groups", 1)

    def call(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return head(function(x, weight, bias, **options))

    return Case(name, call, (M, *x), (w, (w[1] * groups,)))


CASES = [
    Case("linear", lambda x, w, b: head(F.linear(x, w, b)), (M, 3), ((4, 3), (4,))),
    Case("linear without bias", lambda x, w: head(F.linear(x, w)), (M, 3), ((4, 3),)),
    Case("linear over positions", lambda x, w, b: head(F.linear(x, w, b)), (M, 2, 6, 3), ((4, 3), (4,))),
    Case(
        "deep",
        lambda x, v, w, b: head(F.linear(F.silu(F.linear(x, v)), w, b)),
        (M, 3),
        ((6, 3), (2, 6), (2,)),
    ),
    Case("used twice", twice, (M, 3), ((3, 3), (3,))),
    Case("tied", lambda x, w: head(F.linear(F.silu(F.linear(x, w)), w.T)), (M, 3), ((4, 3),)),
    Case("matmul", lambda x, w: head(torch.matmul(x, w)), (M, 3), ((3, 4),)),
    Case("method", lambda x, w: head(x.matmul(w)), (M, 3), ((3, 4),)),
    Case("x @ w", lambda x, w: head(x @ w), (M, 3), ((3, 4),)),
    Case("x @ vector", lambda x, w: head(x @ w), (M, 3), ((3,),)),
    Case("positions @ vector", lambda x, w: head(x @ w), (M, 2, 3), ((3,),)),
    Case("mm", lambda x, w: head(torch.mm(x, w)), (M, 3), ((3, 4),)),
    Case("mm by name", lambda x, w: head(torch.mm(x, mat2=w)), (M, 3), ((3, 4),)),
    Case("mv by name", lambda x, w: head(x.mv(vec=w)), (M, 3), ((3,),)),
    Case("mv", lambda x, w: head(torch.mv(x, w)), (M, 3), ((3,),)),
    Case("mv method", lambda x, w: head(x.mv(w)), (M, 3), ((3,),)),
    Case("mm method", lambda x, w: head(x.mm(w)), (M, 3), ((3, 4),)),
    Case("add", lambda x, b: head(torch.add(x, b)), (M, 3), ((3,),)),
    Case("add method", lambda x, b: head(x.add(b)), (M, 3), ((3,),)),
    Case("x + b", lambda x, b: head(x + b), (M, 2, 3), ((2, 3),)),
    Case("b + x", lambda x, b: head(b + x), (M, 3), ((3,),)),
    Case("1 + b", lambda x, b: head(x * (1 + b)), (M, 3), ((3,),), (False,)),
    Case("scalar", lambda x, b: head(x + b), (M, 3), ((),)),
    Case(
        "functional",
        lambda x, v, c, w, b: head(torch.tanh(x @ v + c) @ w + b),
        (M, 3),
        ((3, 4), (4,), (4,), ()),
    ),
    conv(1, (2, 7), (4, 2, 3)),
    conv(1, (4, 8), (6, 2, 3), stride=2, padding=1, dilation=2, groups=2),
    conv(2, (2, 5, 4), (4, 2, 3, 2)),
    conv(2, (4, 6, 5), (6, 2, 3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
    conv(2, (3, 4, 4), (3, 1, 3, 3), bias=False, padding=1, groups=3),
    conv(2, (2, 4, 4), (3, 2, 2, 2), stride=(2,), padding=(1,)),
    conv(
        2,
        (2, 4, 4),
        (3, 2, 3, 3),
        bias=False,
        padding="same",
    ),
    conv(3, (2, 3, 3, 3), (2, 2, 2, 2, 2)),
    Case("embedding", lambda x, e: head(F.embedding(tokens(x), e)), (M, 9), ((7, 4),)),
    Case("keywords", keyword_linear, (M, 3), ((4, 3),)),
    Case("einsum", lambda x, w: head(torch.einsum("bi,oi->bo", x, w)), (M, 3), ((4, 3),)),
    Case("einsum of heads", lambda x, w: head(torch.einsum("hid,bti->bthd", w, x)), (M, 2, 3), ((2, 3, 4),)),
    Case(
        "einsum over examples",
        lambda x, w: head(torch.einsum("bi,bo->bo", x, w)),
        (M, 3),
        ((M, 2),),
        (False,),
    ),
    Case("einsum of one", lambda x, w: head(x @ torch.einsum("oi->io", w)), (M, 3), ((4, 3),), (False,)),
    Case(
        "einsum, ellipsis",
        lambda x, w: head(torch.einsum("...i,oi->...o", x, w)),
        (M, 3),
        ((4, 3),),
        (False,),
    ),
    Case("w @ features", lambda x, w: head((w @ x.T).T), (M, 3), ((4, 3),), (False,)),
    Case("square w @ features", lambda x, w: head((w @ x.T).T), (M, 3), ((M, 3),), (False,)),
    Case("scaled weight", lambda x, w: head(F.linear(x, 2 * w)), (M, 3), ((4, 3),), (False,)),
    Case("transposed elsewhere", lambda x, w: head(F.linear(x, w) + x @ w.T), (M, 3), ((4, 3),)),
    Case("parts of a weight", parts, (M, 3), ((5, 6), (6,))),
    Case("rows of tokens", folded, (M, 6, 3), ((4, 3), (4,), (4,))),
    Case("tokens first", lambda x, w, b: head(tokens_first(x, w, b)), (M, 6, 3), ((4, 3), (4,))),
    Case(
        "tokens as many as examples", lambda x, w, b: head(tokens_first(x, w, b)), (M, M, 3), ((4, 3), (4,))
    ),
    Case("films", films, (M, 2, 2, 4, 4), ((3, 2, 3, 3), (3,))),
    Case("attention", attention, (M, 3, 4), ((12, 4), (12,), (4, 4), (4,))),
    Case(
        "stacked",
        lambda x, v, w: head(x @ torch.stack([v, w]).sum(0) + x @ v),
        (M, 3),
        ((3, 2), (3, 2)),
        (False, False),
    ),
    Case("written into a buffer", written_into, (M, 4), ((4, 4),), (False,)),
    Case(
        "one row times M rows",
        lambda x, w: head(F.linear(x[0], w) * x.sum(1)),
        (M, 3),
        ((M, 3),),
        (False,),
    ),
    Case(
        "one picture",
        lambda x, w, b: head(F.conv2d(x[0], w, b).sum((1, 2)) * x.sum((1, 2, 3))),
        (M, 1, 3, 3),
        ((M, 1, 2, 2), (M,)),
        (False, False),
    ),
    Case("changed in place", in_place, (M, 3), ((4, 3),)),
    Case("activated in place", in_place_activation, (M, 3), ((4, 3), (4,))),
    Case("no_grad", frozen_part, (M, 3), ((4, 3),)),
    Case("unused", lambda x, w, v: head(F.linear(x, w)), (M, 3), ((4, 3), (2,)), (True, False)),
    Case("outer", lambda x, w: head(x[:, None, :] * w), (M, 3), ((1, 3),)),
    # Dense layers and products
    Case("linear by keywords", lambda x, w, b: head(F.linear(x, bias=b, weight=w)), (M, 3), ((4, 3), (4,))),
    Case("linear, two rows", lambda x, w, b: head(F.linear(x, w, b)), (M, 2, 3), ((4, 3), (4,))),
    Case("linear, five rows", lambda x, w, b: head(F.linear(x, w, b)), (M, 5, 3), ((4, 3), (4,))),
    Case("large linear", lambda x, w: head(F.linear(x, w)), (M, 6, 800), ((700, 800),), heavy=True),
    Case("matmul by keyword", lambda x, w: head(torch.matmul(x, other=w)), (M, 3), ((3, 4),)),
    Case("w @ matrices", lambda x, w: head(w @ x), (M, 3, 2), ((4, 3),)),
    Case("vector @ matrices", lambda x, w: head(w @ x), (M, 3, 2), ((3,),)),
    Case("matrices @ heads", lambda x, w: head(x @ w), (M, 2, 4, 3), ((2, 3, 5),)),
    Case("heads @ matrices", lambda x, w: head(w @ x), (M, 2, 3, 4), ((2, 5, 3),)),
    Case("bmm, one matrix each", lambda x, w: head(torch.bmm(x, w)), (M, 2, 3), ((M, 3, 4),), (False,)),
    Case("addmm", lambda x, b, w: head(torch.addmm(b, x, w)), (M, 3), ((4,), (3, 4))),
    Case("addmm method", lambda x, w: head(x.addmm(x, w)), (M, 3), ((3, 3),)),
    Case(
        "addmm, scaled",
        lambda x, b, w: head(torch.addmm(b, x, w, beta=2.0, alpha=3.0)),
        (M, 3),
        ((4,), (3, 4)),
    ),
    Case("tied, transposed first", lambda x, w: head(x @ w @ w), (M, 3), ((3, 3),)),
    # Broadcasting
    Case("add_", lambda x, b: head((2 * x).add_(b)), (M, 3), ((3,),)),
    Case("+=", plus_equals, (M, 2, 3), ((1, 3),)),
    Case("add by keyword", lambda x, b: head(torch.add(x, other=b)), (M, 3), ((1, 3),)),
    Case("add, alpha", lambda x, b: head(torch.add(x, b, alpha=2.0)), (M, 3), ((3,),)),
    Case("add, one value per example", lambda x, b: head(x + b), (M, 3), ((M, 1),), (False,)),
    Case("sub", lambda x, b: head(torch.sub(x, b)), (M, 3), ((3,),)),
    Case("x.sub", lambda x, b: head(x.sub(b)), (M, 3), ((3,),)),
    Case("x - b", lambda x, b: head(x - b), (M, 3), ((3,),)),
    Case("b - x", lambda x, b: head(b - x), (M, 2, 3), ((2, 1),)),
    Case("mul", lambda x, b: head(torch.mul(x, b)), (M, 2, 3), ((2, 1),)),
    Case("x.mul", lambda x, b: head(x.mul(b)), (M, 3), ((3,),)),
    Case("x * b", lambda x, b: head(x * b), (M, 2, 3), ((3,),)),
    Case("b * x", lambda x, b: head(b * x), (M,), ((),)),
    Case("div", lambda x, b: head(torch.div(x, b)), (M, 3), ((3,),)),
    Case("x.div", lambda x, b: head(x.div(b)), (M, 3), ((),)),
    Case("x / b", lambda x, b: head(x / b), (M, 2, 3), ((3,),)),
    Case("b / x", lambda x, b: head(b / (2 + x.square())), (M, 2, 3), ((3,),)),
    Case("scale and shift", lambda x, a, b: head(a * F.silu(a * x + b) + b), (M, 3), ((3,), (3,))),
    Case("expand", lambda x, w: head(torch.cat([w.expand(M, -1, -1), x], 1) ** 3), (M, 2, 3), ((1, 1, 3),)),
    Case("expand by sizes", lambda x, w: head(x * w.expand(torch.Size((M, 3)))), (M, 3), ((3,),)),
    Case("expand within", lambda x, w: head(F.linear(x, w.expand(4, 3))), (M, 3), ((1, 3),), (False,)),
    Case("repeat", lambda x, w: head(torch.cat([w.repeat(M, 1, 1), x], 1) ** 3), (M, 2, 3), ((1, 1, 3),)),
    Case("repeat by sizes", lambda x, w: head(x * w.repeat([M, 1])), (M, 3), ((3,),)),
    Case("repeat within", lambda x, w: head(x * w.repeat(M, 3)), (M, 3), ((1,),), (False,)),
    # Convolutions
    conv(2, (2, 5, 4), (4, 2, 3, 2), padding="same", dilation=(1, 2)),
    conv(1, (2, 7), (4, 2, 4), padding="same"),
    conv(2, (2, 4, 4), (3, 2, 3, 3), padding="valid"),
    conv(3, (2, 5, 4, 4), (4, 1, 3, 2, 2), stride=(2, 1, 2), padding=(1, 0, 1), dilation=(1, 2, 1), groups=2),
    Case(
        "conv by keywords",
        lambda x, w, b: head(F.conv2d(x, weight=w, bias=b, padding=1)),
        (M, 2, 4, 4),
        ((3, 2, 3, 3), (3,)),
    ),
    Case(
        "large conv, few positions",
        lambda x, w: head(F.conv2d(x, w, padding=1)),
        (M, 40, 4, 3),
        ((50, 40, 3, 3),),
        heavy=True,
    ),
    Case(
        "large conv, many positions",
        lambda x, w: head(F.conv2d(x, w, None, 2, 1, 1, 2)),
        (M, 40, 14, 13),
        ((100, 20, 3, 3),),
        heavy=True,
    ),
    Case("large conv1d", lambda x, w: head(F.conv1d(x, w)), (M, 60, 50), ((100, 60, 3),), heavy=True),
    Case(
        "large conv3d", lambda x, w: head(F.conv3d(x, w)), (M, 20, 5, 6, 5), ((40, 20, 3, 3, 3),), heavy=True
    ),
    transposed(1, (2, 5), (2, 3, 3)),
    transposed(1, (4, 5), (4, 3, 3), stride=3, padding=2, output_padding=1, groups=2, dilation=2),
    transposed(2, (2, 4, 3), (2, 3, 3, 2), stride=2, padding=1),
    transposed(
        2, (4, 4, 3), (4, 2, 2, 3), stride=(1, 2), padding=(0, 1), output_padding=(1, 1), dilation=(2, 1)
    ),
    transposed(2, (2, 4, 3), (2, 1, 3, 3), padding=2, groups=2),
    transposed(3, (2, 3, 3, 2), (2, 2, 2, 3, 2), stride=2, padding=(0, 1, 0), output_padding=(1, 0, 1)),
    Case(
        "large transposed conv",
        lambda x, w: head(F.conv_transpose2d(x, w, None, 2, 1, 1)),
        (M, 50, 7, 6),
        ((50, 40, 3, 3),),
        heavy=True,
    ),
    Case(
        "convolutions on each other",
        lambda x, v, w: head(
            F.conv_transpose2d(F.silu(F.conv2d(x, v, padding=1)), w, None, 2, 1, (1, 2), 1, (1, 3))
        ),
        (M, 2, 3, 4),
        ((3, 2, 3, 3), (3, 2, 2, 3)),
    ),
    # Embeddings
    Case("one token", lambda x, e: head(F.embedding(tokens(x), e)), (M,), ((7, 4),)),
    Case("pages of tokens", lambda x, e: head(F.embedding(tokens(x), e)), (M, 3, 4), ((7, 2),)),
    Case("padding token", lambda x, e: head(F.embedding(tokens(x), e, padding_idx=-2)), (M, 9), ((7, 4),)),
    Case(
        "embedding by frequency",
        lambda x, e: head(F.embedding(tokens(x), e, scale_grad_by_freq=True)),
        (M, 3),
        ((7, 2),),
        (False,),
        twice=False,
    ),
    Case(
        "embedding tied with the output",
        lambda x, e: head(F.linear(F.embedding(tokens(x), e), e)),
        (M, 6),
        ((7, 4),),
    ),
    # Normalisation
    Case("layer_norm", lambda x, w, b: head(F.layer_norm(x, (3,), w, b)), (M, 2, 3), ((3,), (3,))),
    Case(
        "layer_norm by keywords",
        lambda x, w, b: head(F.layer_norm(x, [2, 3], weight=w, bias=b, eps=0.1)),
        (M, 2, 3),
        ((2, 3), (2, 3)),
    ),
    Case(
        "layer_norm of one example",
        lambda x, w, b: head(F.layer_norm(x, (M, 3), w, b)),
        (M, 3),
        ((M, 3), (M, 3)),
        (False, False),
    ),
    Case("rms_norm", lambda x, w: head(F.rms_norm(x, (3,), w)), (M, 2, 3), ((3,),)),
    Case("group_norm", lambda x, w, b: head(F.group_norm(x, 2, w, b)), (M, 4, 3), ((4,), (4,))),
    Case(
        "instance_norm",
        lambda x, w, b: head(F.instance_norm(x, weight=w, bias=b)),
        (M, 2, 3, 2),
        ((2,), (2,)),
    ),
    Case(
        "instance_norm, running",
        lambda x, w, b: head(F.instance_norm(x, *running(x), w, b, use_input_stats=False)),
        (M, 2, 3),
        ((2,), (2,)),
    ),
    Case("batch_norm", lambda x, w, b: head(F.batch_norm(x, *running(x), w, b)), (M, 2, 3), ((2,), (2,))),
    Case(
        "batch_norm of features",
        lambda x, w, b: head(F.batch_norm(x, *running(x), weight=w, bias=b)),
        (M, 2),
        ((2,), (2,)),
    ),
    Case("output not used", forgotten, (M, 3), ((4, 3),)),
]


def tokens(x: Tensor) -> Tensor:
    return (x.abs() * 10).long() % 7  # some tokens repeat


def loop(call: Callable[..., Tensor], x: Tensor, weights: list[Tensor], cotangent: Tensor) -> list[Tensor]:
    totals = [torch.zeros_like(w) for w in weights]
    for f, c in zip(call(x, *weights).reshape(-1), cotangent.reshape(-1), strict=True):
        grads = torch.autograd.grad(f, weights, create_graph=True, allow_unused=True)
        totals = [t if g is None else t + (c * g).square() for t, g in zip(totals, grads, strict=True)]
    return totals
