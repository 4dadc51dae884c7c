# SPDX-License-Identifier: Apache-2.0
"""Random networks of every supported layer.

A state of the network is a vector ``[B, d]``, a sequence ``[B, T, d]`` or a picture ``[B, C, *sizes]`` of one to three
dimensions. Each layer knows which of them it takes; all else is chance.
"""

import random
from collections.abc import Callable

import torch
from torch import Tensor, nn

EXAMPLES = 4


class Apply(nn.Module):
    """A function, with layers that it calls."""

    def __init__(self, text: str, call: Callable[..., Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.text, self.call, self.layers = text, call, nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x, *self.layers)

    def extra_repr(self) -> str:
        return self.text


SMOOTH = [
    nn.Tanh, nn.Sigmoid, nn.Softplus, nn.GELU, nn.SiLU, nn.Mish, nn.LogSigmoid, nn.Tanhshrink,
    lambda: nn.GELU(approximate="tanh"), lambda: nn.Softplus(beta=2.0),
]  # fmt: skip
KINKED = [
    nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Softshrink, nn.ELU, nn.SELU,
    nn.CELU, nn.RReLU, nn.PReLU, 
    lambda: Apply("relu_(x.clone())", lambda x: nn.functional.relu_(x.clone())),
    lambda: nn.CELU(alpha=0.5), nn.Softsign,
]  # fmt: skip


class Grower:
    """Adds layers to a network and keeps account of the shape behind them."""

    def __init__(self, rng: random.Random, smooth: bool) -> None:
        self.rng, self.smooth = rng, smooth
        self.layers: list[nn.Module] = []
        self.shape: tuple[int, ...] = ()  # behind the examples; a sequence is (T, d), a picture (C, *sizes)
        self.kind = ""

    def add(self, layer: nn.Module, shape: tuple[int, ...] | None = None, kind: str | None = None) -> None:
        self.layers.append(layer)
        self.shape, self.kind = shape or self.shape, kind or self.kind

    def activation(self) -> nn.Module:
        return self.rng.choice(SMOOTH if self.smooth else SMOOTH + KINKED)()

    def grow(self) -> None:
        """Add one layer."""
        options = {"vector": VECTOR, "sequence": SEQUENCE, "picture": PICTURE}[self.kind]
        self.rng.choice(options)(self)

    def inner(self) -> nn.Module:
        """A layer that keeps the shape."""
        if self.kind == "picture":
            c, dims = self.shape[0], len(self.shape) - 1
            return CONV[dims](c, c, 3, padding=1, bias=self.rng.random() < 0.7)
        return nn.Linear(self.shape[-1], self.shape[-1], bias=self.rng.random() < 0.7)


CONV = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORM = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MAX_POOL = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVG_POOL = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}


# Everywhere ------------------------------------------------------------------------------------------------------


def activation(g: Grower) -> None:
    g.add(g.activation())


def residual(g: Grower) -> None:
    g.add(Apply("x + act(layer(x))", lambda x, f, a: x + a(f(x)), g.inner(), g.activation()))


def gate(g: Grower) -> None:
    g.add(Apply("x * sigmoid(layer(x))", lambda x, f: x * f(x).sigmoid(), g.inner()))


def scaled(g: Grower) -> None:
    g.add(Apply("0.5 * x - 0.1", lambda x: 0.5 * x - 0.1))


def dropout(g: Grower) -> None:
    g.add(nn.Dropout(0.3))


def twice(g: Grower) -> None:
    g.add(Apply("act(layer(act(layer(x))))", lambda x, f, a: a(f(a(f(x)))), g.inner(), nn.Tanh()))


def again(g: Grower) -> None:
    """The same layer twice."""
    g.add(Apply("layer(act(layer(x)))", lambda x, f, a: f(a(f(x))), g.inner(), g.activation()))


def centred(g: Grower) -> None:
    g.add(Apply("x - x.mean(-1)", lambda x: x - x.mean(-1, keepdim=True)))


def softmax(g: Grower) -> None:
    g.add(nn.Softmax(-1) if g.rng.random() < 0.5 else nn.LogSoftmax(-1))


def multiplied(g: Grower) -> None:
    g.add(Apply("layer(x) * tanh(layer(x))", lambda x, f, h: f(x) * h(x).tanh(), g.inner(), g.inner()))


# Vectors ---------------------------------------------------------------------------------------------------------


def linear(g: Grower) -> None:
    out = g.rng.randint(1, 5)
    g.add(nn.Linear(g.shape[-1], out, bias=g.rng.random() < 0.8), (*g.shape[:-1], out))


def layer_norm(g: Grower) -> None:
    g.add(
        nn.LayerNorm(g.shape[-1], elementwise_affine=g.rng.random() < 0.8)
        if g.rng.random() < 0.6
        else nn.RMSNorm(
            g.shape[-1], eps=1e-2
        )  # by default it is far from smooth at zero, as at a padding row
    )


def vector_batch_norm(g: Grower) -> None:
    g.add(nn.BatchNorm1d(g.shape[0]))


def joined(g: Grower) -> None:
    g.add(
        Apply("cat([x, layer(x)])", lambda x, f: torch.cat([x, f(x)], -1), g.inner()),
        (*g.shape[:-1], 2 * g.shape[-1]),
    )


def halved(g: Grower) -> None:
    linear_out = 2 * g.rng.randint(1, 3)
    g.add(nn.Linear(g.shape[-1], linear_out), (*g.shape[:-1], linear_out))
    g.add(nn.GLU(-1), (*g.shape[:-1], linear_out // 2))


def bilinear(g: Grower) -> None:
    d = g.shape[-1]
    if d > 12:
        return linear(g)
    g.add(Apply("bilinear(x, tanh(x))", lambda x, f: f(x, x.tanh()), nn.Bilinear(d, d, 2)), (2,))


def to_sequence(g: Grower) -> None:
    d = g.shape[0]
    g.add(nn.Linear(d, 6))
    g.add(nn.Unflatten(1, (3, 2)), (3, 2), "sequence")


# Sequences -------------------------------------------------------------------------------------------------------


def attention(g: Grower) -> None:
    d = g.shape[-1]
    heads = 2 if d % 2 == 0 else 1
    layer = nn.MultiheadAttention(d, heads, batch_first=True, bias=g.rng.random() < 0.7)
    g.add(Apply("attention(x, x, x)", lambda x, f: f(x, x, x, need_weights=False)[0], layer))


def encoder(g: Grower) -> None:
    d = g.shape[-1]
    g.add(
        nn.TransformerEncoderLayer(
            d,
            1,
            dim_feedforward=3,
            dropout=0.1,
            activation="gelu",
            batch_first=True,
            norm_first=g.rng.random() < 0.5,
        )
    )


def recurrent(g: Grower) -> None:
    d, hidden = g.shape[-1], g.rng.randint(1, 3)
    kind = g.rng.choice([nn.LSTM, nn.GRU, nn.RNN])
    both = g.rng.random() < 0.3
    depth, bias = g.rng.choice([1, 1, 2]), g.rng.random() < 0.8
    layer = kind(d, hidden, depth, batch_first=True, bidirectional=both, bias=bias)
    g.add(Apply("recurrent(x)[0]", lambda x, f: f(x)[0], layer), (g.shape[0], hidden * (1 + both)))


def transposed(g: Grower) -> None:
    t, d = g.shape
    g.add(Apply("x.transpose(1, 2)", lambda x: x.transpose(1, 2)), (d, t), "picture")


def mean_of_sequence(g: Grower) -> None:
    g.add(Apply("x.mean(1)", lambda x: x.mean(1)), g.shape[1:], "vector")


def last_of_sequence(g: Grower) -> None:
    g.add(Apply("x[:, -1]", lambda x: x[:, -1]), g.shape[1:], "vector")


# Pictures --------------------------------------------------------------------------------------------------------


def convolution(g: Grower) -> None:
    c, *sizes = g.shape
    out = g.rng.randint(1, 3)
    stride, groups = g.rng.choice([1, 1, 2]), 1
    if c > 1 and g.rng.random() < 0.3:
        out = groups = c
    if g.rng.random() < 0.2:
        g.add(CONV[len(sizes)](c, out, 3, padding=2, dilation=2, groups=groups), (out, *sizes))
        return
    mode = g.rng.choice(["zeros", "zeros", "circular", "replicate"])
    layer = CONV[len(sizes)](c, out, 3, stride, 1, groups=groups, padding_mode=mode)
    g.add(layer, (out, *[(s - 1) // stride + 1 for s in sizes]))


def transposed_convolution(g: Grower) -> None:
    c, *sizes = g.shape
    if max(sizes) > 4:
        return convolution(g)
    out = g.rng.randint(1, 2)
    g.add(TRANSPOSED[len(sizes)](c, out, 2, 2), (out, *[2 * s for s in sizes]))


def pooling(g: Grower) -> None:
    c, *sizes = g.shape
    if min(sizes) < 2:
        return activation(g)
    if g.rng.random() < 0.3:  # windows that overlap
        g.add(g.rng.choice([MAX_POOL, AVG_POOL])[len(sizes)](2, 1), (c, *[s - 1 for s in sizes]))
        return
    kind = g.rng.choice([MAX_POOL, AVG_POOL])
    g.add(kind[len(sizes)](2), (c, *[s // 2 for s in sizes]))


def adaptive_pooling(g: Grower) -> None:
    g.add(ADAPTIVE[len(g.shape) - 1](2), (g.shape[0], *[2] * (len(g.shape) - 1)))


def picture_norm(g: Grower) -> None:
    c, *sizes = g.shape
    which = g.rng.choice(["batch", "group", "instance"])
    if which == "batch":
        g.add(BATCH_NORM[len(sizes)](c))
    elif which == "group" or max(sizes) < 2:
        g.add(nn.GroupNorm(1, c))
    else:
        g.add(INSTANCE_NORM[len(sizes)](c, affine=g.rng.random() < 0.5))


def upsample(g: Grower) -> None:
    c, *sizes = g.shape
    if max(sizes) > 3:
        return picture_norm(g)
    g.add(nn.Upsample(scale_factor=2), (c, *[2 * s for s in sizes]))


def padded(g: Grower) -> None:
    c, *sizes = g.shape
    if max(sizes) > 5:
        return pooling(g)
    g.add(Apply("pad(x, 1)", lambda x: nn.functional.pad(x, (1, 1))), (c, *sizes[:-1], sizes[-1] + 2))


def flattened(g: Grower) -> None:
    size = 1
    for s in g.shape:
        size *= s
    g.add(nn.Flatten(), (size,), "vector")


COMMON = [
    activation, activation, activation, residual, gate, scaled, dropout, twice, again, centred, softmax, multiplied,
]  # fmt: skip
VECTOR = [
    *COMMON,
    linear,
    linear,
    linear,
    layer_norm,
    vector_batch_norm,
    joined,
    halved,
    bilinear,
    to_sequence,
]
SEQUENCE = [
    *COMMON, linear, linear, layer_norm, joined, halved, attention, attention, encoder, recurrent, recurrent,
    transposed, mean_of_sequence, last_of_sequence,
]  # fmt: skip
PICTURE = [
    *COMMON, convolution, convolution, convolution, transposed_convolution, pooling, pooling, adaptive_pooling,
    picture_norm, picture_norm, upsample, padded, flattened,
]  # fmt: skip

STARTS: list[tuple[str, tuple[int, ...]]] = [
    ("vector", (3,)), ("sequence", (3, 2)), ("tokens", (3,)), ("bag", (3,)),
    ("picture", (1, 6)), ("picture", (1, 4, 5)), ("picture", (2, 2, 3, 2)),
]  # fmt: skip


def random_network(rng: random.Random, smooth: bool) -> tuple[nn.Sequential, Tensor, int]:
    """Return a network in evaluation mode, inputs, and the number of outputs."""
    g = Grower(rng, smooth)
    kind, shape = rng.choice(STARTS)
    if kind in ("tokens", "bag"):
        x = torch.randint(5, (EXAMPLES, *shape))
        if kind == "tokens":
            g.add(nn.Embedding(5, 2, padding_idx=rng.choice([None, 0])), (*shape, 2), "sequence")
        else:
            g.add(nn.EmbeddingBag(5, 2, mode=rng.choice(["sum", "mean"])), (2,), "vector")
    else:
        x, g.shape, g.kind = torch.randn(EXAMPLES, *shape), shape, kind
    for _ in range(rng.randint(1, 8)):
        g.grow()
    if g.kind != "vector":
        flattened(g)
    outputs = rng.randint(2, 3)
    g.add(nn.Linear(g.shape[0], outputs))
    net = nn.Sequential(*g.layers).eval()
    for module in net.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None:
            module.running_mean.normal_(0, 0.3)
            module.running_var.uniform_(0.5, 2.0)
    return net, x, outputs
