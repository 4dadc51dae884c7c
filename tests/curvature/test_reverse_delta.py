# SPDX-License-Identifier: Apache-2.0
"""The reverse delta method against dense Jacobians, one example and one output at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dvi.curvature import reverse_delta
from pyro_dvi.curvature.reverse_delta import ReverseDeltaRecorder, calls_behind
from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from pyro_dvi.moments.dispatch import observed_by

B = 3


@pytest.fixture(autouse=True)
def _float64():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(3)


def uncertain(*shape: int) -> GaussianMoments:
    return GaussianMoments(torch.randn(shape), 0.2 * torch.rand(shape))


def pulled_back(
    call: Callable, x: object, weights: list[GaussianMoments], examples: int = 0
) -> tuple[GaussianMoments, Tensor]:
    recorder = ReverseDeltaRecorder({str(k): w for k, w in enumerate(weights)})
    with observed_by(recorder):
        out = call(x, *weights)
    return out, recorder.variance(out, examples)


@dataclass
class Case:
    """A layer that is linear in its input and linear in its weights."""

    name: str
    func: Callable
    call: Callable
    x: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    linear: bool = True  # in the input
    examples: int = 0


def conv(dims: int, x: tuple, w: tuple, bias: bool = True, **options: object) -> Case:
    function = (F.conv1d, F.conv2d, F.conv3d)[dims - 1]
    return Case(
        f"conv{dims}d {options}",
        function,
        lambda x, w, b=None: function(x, w, b, **options),
        (B, *x),
        (w, (w[0],)) if bias else (w,),
    )


MEAN, VARIANCE = torch.tensor([0.3, -0.2]).double(), torch.tensor([0.5, 2.0]).double()


def of_tokens(x: Tensor, table: GaussianMoments) -> Tensor:
    loc = x.loc if isinstance(x, GaussianMoments) else x
    return F.embedding((loc.detach().abs() * 10).long() % 4, table)


CASES = [
    Case("linear", F.linear, lambda x, w, b: F.linear(x, w, b), (B, 4), ((5, 4), (5,))),
    Case("only a bias", F.linear, lambda x, b: F.linear(x, torch.ones(5, 4), b), (B, 4), ((5,),)),
    Case("over positions", F.linear, lambda x, w, b: F.linear(x, w, b), (B, 2, 3, 4), ((5, 4), (5,))),
    Case(
        "positions first", F.linear, lambda x, w, b: F.linear(x, w, b), (6, B, 4), ((5, 4), (5,)), examples=1
    ),
    Case(
        "as many positions",
        F.linear,
        lambda x, w, b: F.linear(x, w, b),
        (B, B, 4),
        ((5, 4), (5,)),
        examples=1,
    ),
    Case("x @ w", torch.matmul, lambda x, w: x @ w, (B, 4), ((4, 5),)),
    Case("x @ w.T", torch.matmul, lambda x, w: x @ w.T, (B, 4), ((5, 4),)),
    Case("x @ vector", torch.matmul, lambda x, w: x @ w, (B, 2, 4), ((4,),)),
    Case("mm", torch.mm, lambda x, w: torch.mm(x, w), (B, 4), ((4, 5),)),
    Case("mv", torch.mv, lambda x, w: torch.mv(x, w), (B, 4), ((4,),)),
    Case("heads", torch.matmul, lambda x, w: x @ w, (B, 2, 5, 4), ((2, 4, 3),)),
    Case("addmm", torch.addmm, lambda x, b, w: torch.addmm(b, x, w, beta=2, alpha=3), (B, 4), ((5,), (4, 5))),
    Case(
        "slices of a packed weight",
        F.linear,
        lambda x, w: torch.cat([F.linear(x, w[:2]), F.linear(2 * x, w[2:])], -1),
        (B, 4),
        ((5, 4),),
    ),
    Case(
        "chunks",
        F.linear,
        lambda x, w: torch.cat([F.linear(c * x, w) for c, w in zip((1, 2), w.chunk(2), strict=True)], -1),
        (B, 4),
        ((6, 4),),
    ),
    conv(1, (2, 7), (4, 2, 3)),
    conv(1, (4, 8), (6, 2, 3), stride=2, padding=1, dilation=2, groups=2),
    conv(2, (2, 5, 4), (4, 2, 3, 2)),
    conv(2, (4, 6, 5), (6, 2, 3, 2), stride=(2, 1), padding=(1, 2), dilation=(1, 2), groups=2),
    conv(2, (3, 4, 4), (3, 1, 3, 3), bias=False, padding=1, groups=3),
    conv(2, (2, 4, 5), (3, 2, 3, 3), bias=False, padding="same", dilation=(1, 2)),
    conv(2, (2, 4, 4), (3, 2, 2, 3), padding="valid"),
    conv(3, (2, 3, 4, 3), (2, 2, 2, 2, 2), padding=1, stride=2),
    Case(
        "only a bias of channels",
        F.conv2d,
        lambda x, b: F.conv2d(x, torch.ones(2, 2, 2, 2), b),
        (B, 2, 3, 3),
        ((2,),),
    ),
    Case("x + b", torch.add, lambda x, b: x + b, (B, 2, 4), ((4,),)),
    Case("b + x", torch.add, lambda x, b: b + x, (B, 2, 4), ((2, 1),)),
    Case("add alpha", torch.add, lambda x, b: torch.add(x, b, alpha=2), (B, 4), ((),)),
    Case("x - b", torch.sub, lambda x, b: x - b, (B, 4), ((1, 4),)),
    Case("x * w", torch.mul, lambda x, w: x * w, (B, 2, 4), ((4,),)),
    Case("w * x", torch.mul, lambda x, w: w * x, (B, 2, 4), ((2, 1),)),
    Case(
        "batch norm",
        F.batch_norm,
        lambda x, w, b: F.batch_norm(x, MEAN, VARIANCE, w, b),
        (B, 2, 4),
        ((2,), (2,)),
    ),
    Case(
        "group norm", F.group_norm, lambda x, w, b: F.group_norm(x, 2, w, b), (B, 4, 3), ((4,), (4,)), False
    ),
    Case(
        "layer norm",
        F.layer_norm,
        lambda x, w, b: F.layer_norm(x, (4,), w, b),
        (B, 2, 4),
        ((4,), (4,)),
        False,
    ),
    Case("embedding", F.embedding, of_tokens, (B, 6), ((4, 3),), False),
]
every_layer = pytest.mark.parametrize(
    ("case", "certain"),
    [
        pytest.param(case, certain, id=f"{case.name}, {'certain' if certain else 'uncertain'} input")
        for case in CASES
        for certain in (True, False)
        if certain or case.linear
    ],
)


def read_out(case: Case, h: object) -> object:
    h = h.movedim(case.examples, 0).reshape(B, -1)
    generator = torch.Generator().manual_seed(0)
    return h @ torch.randn(h.shape[1], 2, generator=generator)


@every_layer
def test_a_layer_adds_the_expected_squares_of_its_gradients(case, certain):
    """For a layer linear in x and w: sum over w of Var[w] E[(df/dw)^2], the expectation over x."""
    x, weights = uncertain(*case.x), [uncertain(*shape) for shape in case.weights]
    out, variance = pulled_back(lambda *a: read_out(case, case.call(*a)), x.loc if certain else x, weights)
    expected = torch.zeros_like(out.loc)
    locs = [w.loc for w in weights]

    def gradients(inputs: Tensor, i: int, k: int) -> Tensor:
        leaves = [loc.detach().requires_grad_() for loc in locs]
        output = read_out(case, case.call(inputs, *leaves))[i, k]
        found = torch.autograd.grad(output, leaves, create_graph=True)
        return torch.cat([g.flatten() for g in found])

    spread = torch.cat([w.variance.flatten() for w in weights])
    for i in range(B):
        for k in range(2):
            expected[i, k] = gradients(x.loc, i, k).square() @ spread
            if not certain:
                mixed = torch.autograd.functional.jacobian(
                    lambda inputs, i=i, k=k: gradients(inputs, i, k), x.loc
                )
                expected[i, k] += spread @ mixed.flatten(1).square() @ x.variance.flatten()
    torch.testing.assert_close(variance, expected, atol=1e-10, rtol=1e-10)
    assert (variance > 0).all()


def smooth_rectifier(mu: Tensor, variance: Tensor) -> Tensor:
    sigma = variance.sqrt()
    z = mu / sigma
    density = torch.exp(-0.5 * z.square()) / math.sqrt(2 * math.pi)
    return mu * torch.special.ndtr(z) + sigma * density


def test_a_net_with_skips_has_the_squared_slopes_of_its_smoothed_self():
    """The oracle writes the smoothed network by hand, with the variances of the moment run as constants."""
    x = torch.randn(B, 4)
    weights = [uncertain(6, 4), uncertain(6), uncertain(6, 6), uncertain(2, 6)]
    entering: list[GaussianMoments] = []

    def net(x, w1, b1, w2, w3):
        h = F.linear(x, w1, b1)
        entering.append(h.snapshot())
        h = torch.relu(h) + h
        entering.append(h.snapshot())
        g = F.linear(h, w2)
        entering.append(g.snapshot())
        g = torch.relu(g)
        entering.append((g + h).snapshot())
        return F.linear(g + h, w3)

    out, variance = pulled_back(net, x, weights)
    v1, vh, v2, v3 = (m.variance for m in entering)

    def smoothed(i, w1, b1, w2, w3):
        h1 = x[i] @ w1.T + b1
        h = smooth_rectifier(h1, v1[i]) + h1
        g = smooth_rectifier(h @ w2.T, v2[i])
        return (g + h) @ w3.T

    expected = torch.zeros_like(out.loc)
    for i in range(B):
        locs = tuple(w.loc for w in weights)
        torch.testing.assert_close(smoothed(i, *locs), out.loc[i], atol=1e-9, rtol=1e-9)
        jacobians = torch.autograd.functional.jacobian(lambda *a, i=i: smoothed(i, *a), locs)
        for jacobian, w in zip(jacobians, weights, strict=True):
            expected[i] += jacobian.flatten(1).square() @ w.variance.flatten()
        # The noise of weights times that of their inputs: slopes of g are those behind the second layer.
        w2, w3 = weights[2], weights[3]
        expected[i] += w3.variance @ v3[i]
        slope = torch.autograd.functional.jacobian(
            lambda u, i=i: smooth_rectifier(u, v2[i]), entering[2].loc[i].detach()
        )
        behind = w3.loc @ slope
        expected[i] += behind.square() @ (w2.variance @ vh[i])
    torch.testing.assert_close(variance, expected, atol=1e-9, rtol=1e-9)


def test_it_is_exact_for_a_linear_model_where_layers_forward_are_not():
    """The terms of h + h @ A are dependent, which forward variances do not know."""
    x, a = torch.randn(B, 4), torch.randn(5, 5)
    weight, bias = uncertain(5, 4), uncertain(5)

    def net(x, w, b):
        h = F.linear(x, w, b)
        return h + h @ a

    out, variance = pulled_back(net, x, [weight, bias])
    head = torch.eye(5) + a
    exact = (x.square() @ weight.variance.T + bias.variance) @ head.square()
    torch.testing.assert_close(variance, exact)
    assert ((out.variance - exact).abs() > 0.05 * exact).any()


def test_multiplicative_noise_is_a_variance_like_any_other():
    x = torch.randn(B, 4)
    weight = MultiplicativeMoments(torch.randn(5, 4), torch.rand(1, 4))
    plain = GaussianMoments(weight.loc, weight.variance)
    out, variance = pulled_back(F.linear, x, [weight])
    torch.testing.assert_close(variance, out.variance)
    torch.testing.assert_close(variance, pulled_back(F.linear, x, [plain])[1])


def test_attention_brings_its_examples_behind_its_positions():
    """Against draws of the weights; forward variances are 10 % or more off."""
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(B, 5, 8)
    names = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
    locs = [dict(attention.named_parameters())[name].detach() for name in names]
    weights = [GaussianMoments(loc, torch.full_like(loc, 0.01**2)) for loc in locs]

    def call(x, w, b, v, c):
        x = x.transpose(0, 1)
        y, _ = F.multi_head_attention_forward(
            x, x, x, 8, 2, w, b, None, None, False, 0.0, v, c, need_weights=False
        )
        return y.transpose(0, 1).mean(1)

    _, variance = pulled_back(call, x, weights)
    draws = torch.stack(
        [call(x, *(w.loc + 0.01 * torch.randn_like(w.loc) for w in weights)) for _ in range(2000)]
    )
    # The mean of 24 ratios of sampled variances, each with a relative deviation of sqrt(2 / 2000) = 3 %.
    assert abs((variance / draws.var(0)).mean() - 1) < 0.05


def test_outputs_that_no_weight_reaches_keep_their_variance():
    x = uncertain(B, 2)
    _, variance = pulled_back(lambda x: 3 * x, x, [])
    torch.testing.assert_close(variance, 9 * x.variance)


def test_examples_need_not_come_first_in_the_outputs():
    x, weight = torch.randn(B, 4), uncertain(5, 4)
    _, expected = pulled_back(F.linear, x, [weight])
    _, variance = pulled_back(lambda x, w: F.linear(x, w).T, x, [weight], examples=-1)
    torch.testing.assert_close(variance, expected.T)


def test_a_use_without_rule_that_reaches_no_output_does_no_harm():
    x, weight, scale = torch.randn(B, 4), uncertain(5, 4), uncertain(1)

    def call(x, w, s):
        torch.exp(s)
        return F.linear(x, w)

    _, variance = pulled_back(call, x, [weight, scale])
    torch.testing.assert_close(variance, F.linear(x.square(), weight.variance))


# What is no plain layer -------------------------------------------------------------------------------------------

TINY = 1e-6


@dataclass
class Net:
    """A function of inputs and weights, with the functions that take a backward pass for each example."""

    call: Callable
    x: tuple[int, ...]
    weights: tuple[tuple[int, ...], ...]
    slow: tuple[str, ...] = ()


def windows(x: Tensor) -> Tensor:
    """Pictures ``[B, C, 4, 4]`` as windows ``[B * 4, C, 2, 2]``."""
    x = x.unflatten(2, (2, 2)).unflatten(4, (2, 2)).permute(0, 2, 4, 1, 3, 5)
    return x.flatten(0, 2)


def attended(x: Tensor, w: object, v: object) -> object:
    return F.multi_head_attention_forward(x, x, x, 4, 2, w, None, None, None, False, 0.0, v, None)[0]


def recurrent(function: Callable, x: Tensor, gates: int, *weights: object) -> object:
    zeros = torch.zeros(1, B, 3)
    state = (zeros, zeros) if function is torch.lstm else zeros
    return function(x, state, list(weights), True, 1, 0.0, False, False, False)[0].transpose(0, 1)


def bag(x: Tensor, w: object) -> object:
    return w[(x.abs() * 10).long() % 5]


NETS = {
    "tied": Net(lambda x, w: F.linear(torch.tanh(F.linear(x, w)), w), (B, 4), ((4, 4),)),
    "transposed and not": Net(lambda x, w: x @ w + x @ w.T, (B, 4), ((4, 4),), ("matmul",)),
    "overlapping slices": Net(
        lambda x, w: torch.cat([F.linear(x, w[:3]), F.linear(x, w[2:])], -1), (B, 4), ((5, 4),)
    ),
    "a square of a weight": Net(lambda x, w: w * w + x, (B, 4), ((4,),)),
    "a function of a weight": Net(lambda x, w: F.linear(x, torch.exp(2 * w)), (B, 4), ((5, 4),)),
    "low rank": Net(
        lambda x, a, b: F.linear(x, torch.ones(5, 4) + a @ b), (B, 4), ((5, 2), (2, 4)), ("add",)
    ),
    "joined weights": Net(lambda x, w, v: x + torch.cat([w, v]), (B, 4), ((2,), (2,))),
    "one weight for two uses": Net(lambda x, w: (x * w).exp() + w, (B, 4), ((4,),)),
    "expanded": Net(lambda x, w: x + w.expand(B, 4), (B, 4), ((1, 4),)),
    "class token": Net(
        lambda x, t, p: (torch.cat([t.expand(B, -1, -1), x], 1) + p).exp(), (B, 2, 4), ((1, 1, 4), (1, 3, 4))
    ),
    "repeated token": Net(lambda x, t: torch.cat([t.repeat(B, 1, 1), x], 1).exp(), (B, 2, 4), ((1, 1, 4),)),
    "positions first": Net(lambda x, p: (x + p).exp().transpose(0, 1), (5, B, 4), ((5, 1, 4),), ("add",)),
    "rows of examples": Net(lambda x, w: F.linear(x.reshape(-1, 2), w).reshape(B, -1), (B, 4), ((5, 2),)),
    "rows of examples, innermost": Net(
        lambda x, w: F.linear(x.transpose(0, 1).flatten(0, 1), w).tanh().unflatten(0, (5, B)).sum(0),
        (B, 5, 2),
        ((3, 2),),
    ),
    "rows of examples, in place": Net(
        lambda x, w, b: F.linear(x.reshape(-1, 2), w).add_(b).tanh().reshape(B, -1), (B, 4), ((5, 2), (5,))
    ),
    "convolution of windows": Net(
        lambda x, w, b: F.conv2d(windows(x), w, b).tanh().reshape(B, -1), (B, 2, 4, 4), ((3, 2, 2, 2), (3,))
    ),
    "attention of windows": Net(
        lambda x, w, v: (
            attended(x.unflatten(1, (2, 4)).flatten(0, 1).transpose(0, 1), w, v)
            .transpose(0, 1)
            .reshape(B, -1)
        ),
        (B, 8, 4),
        ((12, 4), (4, 4)),
    ),
    "lstm": Net(lambda x, *w: recurrent(torch.lstm, x, 4, *w), (5, B, 2), ((12, 2), (12, 3), (12,), (12,))),
    "gru": Net(lambda x, *w: recurrent(torch.gru, x, 3, *w), (5, B, 2), ((9, 2), (9, 3), (9,), (9,))),
    "transposed convolution": Net(
        lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1).tanh(), (B, 2, 3, 3), ((2, 3, 3, 3), (3,))
    ),
    "einsum": Net(lambda x, w: torch.einsum("bti,hio->btho", x, w), (B, 2, 3), ((2, 3, 4),)),
    "rms norm": Net(lambda x, w: F.rms_norm(x, (4,), w).exp(), (B, 2, 4), ((4,),)),
    "instance norm": Net(lambda x, w, b: F.instance_norm(x, weight=w, bias=b).exp(), (B, 2, 5), ((2,), (2,))),
    "division": Net(lambda x, w: x / (3 + w), (B, 4), ((4,),), ("div",)),
    "rows of a table by index": Net(bag, (B, 3), ((5, 2),), ("__getitem__",)),
    "weight on the left": Net(lambda x, w: (w @ x.T).T, (B, 4), ((5, 4),), ("matmul",)),
    "a weight for each example": Net(lambda x, w: (x + w).exp(), (B, 4), ((B, 4),), ("add",)),
    "examples that meet": Net(
        lambda x, w: F.batch_norm(F.linear(x, w), None, None, training=True).exp(),
        (B, 4),
        ((5, 4),),
        ("linear",),
    ),
}


@pytest.mark.parametrize("name", NETS)
def test_tiny_noise_is_multiplied_with_the_squares_of_plain_gradients(name):
    """The oracle knows nothing of moments: a backward pass for each output of the plain network."""
    net = NETS[name]
    x = torch.randn(net.x)
    weights = [uncertain(*shape) for shape in net.weights]
    weights = [GaussianMoments(w.loc, TINY**2 * w.variance) for w in weights]
    recorder = ReverseDeltaRecorder({str(k): w for k, w in enumerate(weights)})
    with observed_by(recorder):
        out = net.call(x, *weights)
    leaves = [w.loc.clone().requires_grad_() for w in weights]
    plain = net.call(x, *leaves)
    rows = []
    for value in plain.flatten():
        gradients = torch.autograd.grad(value, leaves, retain_graph=True)
        rows.append(sum((g.square() * w.variance).sum() for g, w in zip(gradients, weights, strict=True)))
    found = recorder.variance(out, 0) / TINY**2
    expected = torch.stack(rows).reshape(out.shape) / TINY**2
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-9)
    values = {id(w): w._loc for w in weights} | {id(c.result): c.output for c in recorder._calls if c.alone}
    traced = calls_behind(out.loc.reshape(B, -1), recorder._uses(), values)
    assert {one.call.func.__name__ for one in traced if one.uses is None} == set(net.slow)


def test_noise_of_weights_times_that_of_inputs_where_rows_are_no_examples():
    """Each window is a row; and two uses of a weight add up, each with the noise that it meets."""
    x, w = uncertain(B, 6), uncertain(3, 2)
    _, variance = pulled_back(lambda x, w: F.linear(x.reshape(-1, 2), w).reshape(B, -1).sum(1), x, [w])
    sums = x.loc.reshape(B, 3, 2).sum(1)
    exact = sums.square() @ w.variance.sum(0) + x.variance.reshape(B, 3, 2).sum(1) @ w.variance.sum(0)
    torch.testing.assert_close(variance, exact)
    _, variance = pulled_back(lambda x, w: F.linear(x, w) + F.linear(2 * x, w), uncertain(B, 2), [w])


def test_a_function_without_rule_has_noise_of_weights_times_that_of_inputs():
    x, w = uncertain(4, B), uncertain(5, 4)
    _, variance = pulled_back(lambda x, w: (w @ x).T, x, [w])
    exact = (x.loc.square() + x.variance).T @ w.variance.T
    torch.testing.assert_close(variance, exact)


def test_packed_multiplicative_weights_of_attention_are_not_lost():
    """Their parts are objects of their own; the layer is then one function."""
    loc, v = torch.randn(12, 4), torch.randn(4, 4)
    weight = MultiplicativeMoments(loc, torch.full((1, 4), TINY**2))
    plain = GaussianMoments(loc, weight.variance)
    x = torch.randn(2, B, 4)
    results = [pulled_back(lambda x, w: attended(x, w, v), x, [w], examples=1)[1] for w in (weight, plain)]
    torch.testing.assert_close(*results, rtol=1e-5, atol=0)


def test_examples_in_parts(monkeypatch):
    monkeypatch.setattr(reverse_delta, "_BUDGET", 50)
    for name in ("tied", "class token", "convolution of windows", "weight on the left", "lstm"):
        test_tiny_noise_is_multiplied_with_the_squares_of_plain_gradients(name)


def test_an_input_changed_in_place_is_refused():
    def call(x: Tensor, w: GaussianMoments) -> GaussianMoments:
        h = F.linear(x, w)
        x += 1
        return h

    with pytest.raises(UnsupportedError, match="changed in place"):
        pulled_back(call, torch.randn(B, 4), [uncertain(5, 4)])
