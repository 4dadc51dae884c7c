# SPDX-License-Identifier: Apache-2.0
"""The reverse delta method against dense Jacobians, one example and one output at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments, MultiplicativeMoments, observed_by
from pyro_dvi.moments.reverse_delta import ReverseDeltaRecorder
from pyro_dvi.moments.weight_spread import _RULES, spread_rule_for

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


def test_every_rule_has_a_case():
    assert {case.func for case in CASES} == set(_RULES)


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


def changed_in_place(x: Tensor, w: GaussianMoments) -> GaussianMoments:
    h = F.linear(x, w)
    x += 1
    return h


def attention(x: Tensor, w: GaussianMoments) -> GaussianMoments:
    v = torch.ones(4, 4)
    y, _ = F.multi_head_attention_forward(x, x, x, 4, 2, w, None, None, None, False, 0.0, v, None)
    return y


MISTAKES = {
    "tied": (lambda x, w: F.linear(F.linear(x, w), w), ((4, 4),), "'0' a second time"),
    "transposed and not": (lambda x, w: x @ w + x @ w.T, ((4, 4),), "'0' a second time"),
    "overlapping slices": (
        lambda x, w: F.linear(x, w[:3]).sum(-1) + F.linear(x, w[2:]).sum(-1),
        ((5, 4),),
        "'0' a second time",
    ),
    "twice in one call": (lambda x, w: w * w + x, ((4,),), "'0' a second time"),
    "a function of a weight": (
        lambda x, w: F.linear(x, torch.exp(w)),
        ((5, 4),),
        "torch.exp uses the weight '0'",
    ),
    "expanded": (lambda x, w: x + w.expand(B, 4), ((1, 4),), "expand uses the weight '0' in a way"),
    "a list": (lambda x, w, v: x + torch.cat([w, v]), ((2,), (2,)), "torch.cat uses the weight '0' and '1'"),
    "weight on the left": (lambda x, w: (w @ x.T).T, ((5, 4),), "no dimension counts the 3 examples"),
    "rows that are no examples": (
        lambda x, w: F.linear(x.reshape(-1, 2), w).reshape(B, -1),
        ((5, 2),),
        r"shape \(6, 5\), in which no dimension",
    ),
    "a weight for each example": (lambda x, w: x + w, ((B, 4),), "no dimension counts"),
    "examples that meet": (
        lambda x, w: F.batch_norm(F.linear(x, w), None, None, training=True),
        ((5, 4),),
        "no dimension counts",
    ),
    "input changed in place": (changed_in_place, ((5, 4),), "changed in place"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_has_no_rule_is_named_with_the_way_out(mistake):
    call, shapes, message = MISTAKES[mistake]
    with pytest.raises(UnsupportedError, match=message):
        pulled_back(call, torch.randn(B, 4), [uncertain(*shape) for shape in shapes])


def test_packed_multiplicative_weights_of_attention_are_not_lost_silently():
    weight = MultiplicativeMoments(torch.randn(12, 4), torch.full((1, 4), 0.1))
    with pytest.raises(UnsupportedError, match="multi_head_attention_forward uses the weight '0'"):
        pulled_back(attention, torch.randn(2, B, 4), [weight], examples=1)


def test_spellings_share_a_rule():
    assert spread_rule_for(torch.Tensor.__matmul__) is spread_rule_for(torch.matmul)
    assert spread_rule_for(torch.Tensor.add_) is spread_rule_for(torch.add)
    assert spread_rule_for(torch.exp) is None
