# SPDX-License-Identifier: Apache-2.0
"""Attention: the plain function in the certain limit, samples elsewhere, and the modules of torch in each mode."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.bilinear import MultiplicativeMoments
from pyro_dvi.moments.value import loc_of

DOUBLE = {"dtype": torch.float64}


class Case(NamedTuple):
    func: Callable


CASES = [Case(F.scaled_dot_product_attention), Case(F.multi_head_attention_forward)]


def gaussian(*shape: int, variance: float, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    loc = torch.randn(shape, generator=generator, **DOUBLE)
    return GaussianMoments(loc, variance * (0.2 + 1.6 * torch.rand(shape, generator=generator, **DOUBLE)))


def uncertain(module: nn.Module, make: Callable[[Tensor], GaussianMoments], names: str = "") -> Any:
    """Replace parameters by moments, as a guide does."""
    for name, parameter in list(module.named_parameters()):
        if names in name:
            path, _, last = name.rpartition(".")
            owner = module.get_submodule(path)
            del owner._parameters[last]
            object.__setattr__(owner, last, make(parameter.detach()))
    return module


def multiplicative(alpha: float) -> Callable[[Tensor], GaussianMoments]:
    return lambda w: MultiplicativeMoments(w, torch.full((1,) * w.dim(), alpha, dtype=w.dtype))


def sampled(call: Callable[..., Tensor], *inputs: Any, samples: int = 4000) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    values = []
    for _ in range(samples):
        drawn = [
            x.loc + x.variance.sqrt() * torch.randn(x.shape, generator=generator, dtype=x.dtype)
            if isinstance(x, GaussianMoments)
            else x
            for x in inputs
        ]
        values.append(call(*drawn))
    stacked = torch.stack(values)
    return stacked.mean(0), stacked.std(0)


# --- scaled dot-product attention ----------------------------------------------------------------------------

BOOLEAN = torch.rand(5, 7, generator=torch.Generator().manual_seed(0)) > 0.3
BOOLEAN[:, 0] = True
OPTIONS: list[dict[str, Any]] = [
    {},
    {"attn_mask": BOOLEAN},
    {"attn_mask": torch.randn(5, 7, **DOUBLE)},
    {"is_causal": True},
    {"scale": 0.3},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
def test_certain_inputs_give_plain_attention(options: dict[str, Any]) -> None:
    q, k, v = (torch.randn(2, 3, n, 4, **DOUBLE) for n in (5, 7, 7))
    expected = F.scaled_dot_product_attention(q, k, v, **options)
    for which in range(3):
        inputs = [
            GaussianMoments(t, torch.zeros_like(t)) if i == which else t for i, t in enumerate((q, k, v))
        ]
        y = F.scaled_dot_product_attention(*inputs, **options)
        torch.testing.assert_close(y.loc, expected)
        assert y.variance.abs().max() < 1e-25


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "plain")
def test_uncertain_values_are_exact(options: dict[str, Any]) -> None:
    q, k, v = torch.randn(2, 5, 4, **DOUBLE), torch.randn(2, 7, 4, **DOUBLE), gaussian(2, 7, 4, variance=1.0)
    y = F.scaled_dot_product_attention(q, k, v, **options)
    # Attention is linear in values: its matrix is attention of unit vectors.
    eye = torch.eye(7, **DOUBLE).expand(2, 7, 7)
    weights = F.scaled_dot_product_attention(q, k, eye, **options)
    torch.testing.assert_close(y.loc, weights @ v.loc)
    torch.testing.assert_close(y.variance, weights.square() @ v.variance)


# The deviation relative to samples: median over outputs. Queries vary for all scores together, which is dropped.
@pytest.mark.every(3)
@pytest.mark.parametrize(("which", "low", "high"), [("q", 0.85, 1.15), ("k", 0.92, 1.08), ("qkv", 0.9, 1.1)])
def test_deviation_of_attention_against_samples(which: str, low: float, high: float) -> None:
    q, k, v = (gaussian(3, n, 8, variance=0.1, seed=i) for i, n in enumerate((5, 12, 12)))
    inputs = [x if name in which else x.loc for name, x in zip("qkv", (q, k, v), strict=True)]
    mean, deviation = sampled(F.scaled_dot_product_attention, *inputs)
    y = F.scaled_dot_product_attention(*inputs)
    assert low < (y.variance.sqrt() / deviation).median() < high
    assert ((y.loc - mean) / deviation).abs().mean() < 0.06


def test_what_all_keys_share_changes_nothing() -> None:
    q, k, v = (gaussian(2, n, 4, variance=0.3, seed=i) for i, n in enumerate((5, 7, 7)))
    y, z = F.scaled_dot_product_attention(q, k, v), F.scaled_dot_product_attention(q, k + 10.0, v)
    torch.testing.assert_close(y.loc, z.loc)
    torch.testing.assert_close(y.variance, z.variance)


def test_the_variance_stays_below_that_of_the_values_attended_to() -> None:
    q, v = gaussian(2, 5, 4, variance=1e4), torch.randn(2, 7, 4, **DOUBLE)
    y = F.scaled_dot_product_attention(q, torch.randn(2, 7, 4, **DOUBLE), v)
    assert (y.variance <= (v.amax(-2) - v.amin(-2)).square()[:, None] / 4).all()


@pytest.mark.parametrize("additive", [False, True])
def test_keys_that_no_query_attends_to_do_not_count(additive: bool) -> None:
    q, k, v = (gaussian(2, n, 4, variance=0.3, seed=i) for i, n in enumerate((5, 7, 7)))
    mask: Any = (torch.arange(7) < 4).expand(5, 7)
    if additive:
        mask = torch.zeros(5, 7, **DOUBLE).masked_fill(~mask, -torch.inf)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    z = F.scaled_dot_product_attention(q, k[:, :4], v[:, :4])
    torch.testing.assert_close(y.loc, z.loc)
    torch.testing.assert_close(y.variance, z.variance)


def test_dropout_adds_its_variance_and_leaves_the_mean() -> None:
    q, k = (gaussian(2, 6, 4, variance=1e-8, seed=i) for i in (0, 1))
    v = gaussian(2, 6, 4, variance=0.5, seed=2)
    y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
    mean, deviation = sampled(lambda *t: F.scaled_dot_product_attention(*t, dropout_p=0.3), q, k, v)
    torch.testing.assert_close(y.variance.sqrt(), deviation, rtol=0.08, atol=0)
    assert ((y.loc - mean) / deviation).abs().max() < 4.5 / 4000**0.5


def test_grouped_queries_repeat_keys() -> None:
    q, k, v = (
        gaussian(2, 4, 5, 3, variance=0.1),
        torch.randn(2, 2, 6, 3, **DOUBLE),
        torch.randn(2, 2, 6, 3, **DOUBLE),
    )
    y = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    torch.testing.assert_close(
        y.loc, F.scaled_dot_product_attention(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)).loc
    )


def test_gradients_reach_every_input() -> None:
    leaves = [torch.rand(2, 4, 3, **DOUBLE).requires_grad_() for _ in range(6)]

    def moments(*t: Tensor) -> tuple[Tensor, Tensor]:
        y = F.scaled_dot_product_attention(*(GaussianMoments(t[i], t[i + 3]) for i in range(3)))
        return y.loc, y.variance

    assert torch.autograd.gradcheck(moments, leaves)


# --- multi-head attention ------------------------------------------------------------------------------------


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(8, 2, **DOUBLE, **options)


X = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(4), **DOUBLE)
MASK = torch.ones(5, 5, dtype=torch.bool).triu(1)
PADDING = torch.tensor([[False] * 5, [False] * 4 + [True], [False] * 3 + [True] * 2])
CALLS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"batch_first": True}, {}),
    ({"batch_first": True}, {"attn_mask": MASK, "is_causal": True, "need_weights": False}),
    ({"batch_first": True}, {"attn_mask": MASK, "key_padding_mask": PADDING}),
    ({"batch_first": True}, {"attn_mask": torch.randn(6, 5, 5, **DOUBLE), "average_attn_weights": False}),
    ({"batch_first": True}, {"key_padding_mask": PADDING, "need_weights": False}),
    ({"batch_first": True, "bias": False}, {}),
    ({"batch_first": False}, {}),
    ({"kdim": 8, "vdim": 8, "batch_first": True}, {}),
]


@pytest.mark.every(3)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("number", range(len(CALLS)))
@pytest.mark.parametrize("names", ["", "in_proj_weight", "out_proj", "input"])
def test_multi_head_attention_in_the_certain_limit(number: int, names: str, training: bool) -> None:
    """Weights or inputs without variance give what torch gives."""
    options, call = CALLS[number]
    plain = attention(**options).train(training)
    expected, weights = plain(X, X, X, **call)
    x: Any = X
    if names == "input":
        module, x = plain, GaussianMoments(X, torch.zeros_like(X))
    else:
        module = uncertain(attention(**options).train(training), multiplicative(0.0), names)
    y, attended = module(x, x, x, **call)
    torch.testing.assert_close(loc_of(y), expected)
    if isinstance(y, GaussianMoments):
        assert y.variance.abs().max() < 1e-25
    if weights is not None:
        torch.testing.assert_close(loc_of(attended), weights)


def test_unbatched_attention() -> None:
    module = uncertain(attention(), multiplicative(0.1))
    y, weights = module(X[0], X[0], X[0])
    z, _ = module(X[:1].transpose(0, 1), X[:1].transpose(0, 1), X[:1].transpose(0, 1))
    torch.testing.assert_close(y.variance, z.variance[:, 0])
    assert y.shape == (5, 8) and weights.shape == (5, 5)


@pytest.mark.every(3)
@pytest.mark.parametrize("noise", ["row", "elements", "gaussian"])
def test_multi_head_attention_against_samples_of_its_weights(noise: str) -> None:
    torch.manual_seed(2)
    plain = nn.MultiheadAttention(16, 4, batch_first=True, **DOUBLE)
    plain.in_proj_bias.data.normal_()
    x = torch.randn(2, 8, 16, **DOUBLE) + 0.7 * torch.randn(16, **DOUBLE)  # tokens are alike, as in real nets
    w, out = plain.in_proj_weight.detach(), plain.out_proj.weight.detach()
    alpha = {"row": torch.full((1, 16), 0.05), "elements": torch.rand(48, 16) / 10}.get(noise)

    def moments(loc: Tensor) -> GaussianMoments:
        if alpha is None:
            return GaussianMoments(loc, torch.full_like(loc, 1e-3))
        return MultiplicativeMoments(loc, alpha[: len(loc)].to(loc))

    def call(weight: Any, out: Any) -> Any:
        return F.multi_head_attention_forward(
            *(x.transpose(0, 1),) * 3, 16, 4, weight, plain.in_proj_bias.detach(), None, None, False, 0.0, out,
            plain.out_proj.bias.detach(), need_weights=False,
        )[0]  # fmt: skip

    y = call(moments(w), moments(out))
    mean, deviation = sampled(call, moments(w), moments(out), samples=2000)
    ratio = y.variance.sqrt() / deviation
    assert abs(ratio.median() - 1) < 0.02
    assert 0.9 < ratio.quantile(0.05) and ratio.quantile(0.95) < 1.1
    assert ((y.loc - mean) / deviation).square().mean().sqrt() < 0.06


@pytest.mark.parametrize("additive", [False, True])
def test_padding_has_no_effect_on_the_attention_of_the_rest(additive: bool) -> None:
    module = uncertain(attention(batch_first=True), multiplicative(0.1))
    padding = (
        torch.zeros_like(PADDING, dtype=X.dtype).masked_fill(PADDING, -torch.inf) if additive else PADDING
    )
    padded = X.masked_fill(PADDING[..., None], 7.0)
    y, _ = module(padded, padded, padded, key_padding_mask=padding)
    for row, kept in enumerate(~PADDING):
        z, _ = module(*(X[row, kept],) * 3)
        torch.testing.assert_close(y.loc[row, kept], z.loc)
        torch.testing.assert_close(y.variance[row, kept], z.variance)


@pytest.mark.parametrize("options", [{"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_unsupported_options_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(options))):
        attention(**options)(*(GaussianMoments(X, X.square()),) * 3)


# --- transformer modules -------------------------------------------------------------------------------------


def encoder(layers: int = 2, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, **DOUBLE, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not options.get("norm_first", False))


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_transformer_encoders_meet_torch_in_the_certain_limit(
    norm_first: bool, training: bool, grad: bool
) -> None:
    """Also where torch would take its fast path, which knows no moments: evaluation without gradients."""
    options = {"dropout": 0.0, "norm_first": norm_first}
    with torch.set_grad_enabled(grad):
        expected = encoder(**options).train(training)(X, mask=MASK)
        y = uncertain(encoder(**options).train(training), multiplicative(0.0))(X, mask=MASK)
        torch.testing.assert_close(y.loc, expected)
        # A rectifier at variance 0 sees the floor.
        assert y.variance.max() < 1e-10
        z = encoder(**options).train(training)(GaussianMoments(X, torch.zeros_like(X)), mask=MASK)
        torch.testing.assert_close(z.loc, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_in_evaluation_mode() -> None:
    with torch.no_grad():
        expected = encoder(dropout=0.1).eval()(X, src_key_padding_mask=PADDING)
        y = uncertain(encoder(dropout=0.1).eval(), multiplicative(0.0))(X, src_key_padding_mask=PADDING)
    torch.testing.assert_close(y.loc[~PADDING], expected[~PADDING])


def test_dropout_acts_in_training_only() -> None:
    net = uncertain(encoder(dropout=0.5), multiplicative(1e-4))
    assert net.train()(X).variance.mean() > 10 * net.eval()(X).variance.mean()


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("norm_first", [True, False])
def test_a_whole_transformer(norm_first: bool) -> None:
    """Encoder and decoder, with attention of one to the other."""
    torch.manual_seed(0)
    net = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True, norm_first=norm_first, **DOUBLE).eval()
    with torch.no_grad():
        expected = net(X, X[:, :4])
        y = uncertain(net, multiplicative(0.0))(X, X[:, :4])
    torch.testing.assert_close(y.loc, expected)
