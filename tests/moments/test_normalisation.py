# SPDX-License-Identifier: Apache-2.0
"""Normalisation: exact parts against dense derivatives, approximate ones against their limit and sampling."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.func import jacrev

from pyro_dvi.errors import UnsupportedError
from pyro_dvi.moments import GaussianMoments
from tests.moments import multilinear
from tests.moments.multilinear import FLOAT64, exact

C = 4
RUNNING = {
    "running_mean": torch.linspace(-1, 1, C, dtype=FLOAT64),
    "running_var": torch.linspace(0.5, 2, C, dtype=FLOAT64),
}


@dataclass(frozen=True)
class Case(multilinear.Case):
    """A normalisation, whose first argument is uncertain and then, by name, weight and bias."""

    def __call__(self, x: Any, weight: Any = None, bias: Any = None) -> Any:
        affine = {"weight": weight, "bias": bias}
        if isinstance(x, Tensor | GaussianMoments) and x.dtype is torch.float32:
            tensors = {k: v.float() if isinstance(v, Tensor) else v for k, v in self.kwargs.items()}
        else:
            tensors = dict(self.kwargs)
        given = {k: v for k, v in affine.items() if v is not None}
        return self.func(x, *self.first, **tensors, **given)


SHAPE = (3, C, 2)
RUNNING_CASES = [  # exact: linear in the input, the weight and the bias
    Case(F.batch_norm, (SHAPE, (C,), (C,)), RUNNING),
    Case(F.batch_norm, ((3, C), (C,), (C,)), {**RUNNING, "eps": 0.1}),
    Case(F.batch_norm, ((2, C, 2, 1),), RUNNING),
    Case(F.instance_norm, (SHAPE, (C,), (C,)), {**RUNNING, "use_input_stats": False}),
]
EXAMPLE_CASES = [  # by the statistics of each example
    Case(F.layer_norm, ((3, 5), (5,), (5,)), first=((5,),)),
    Case(F.layer_norm, ((2, 2, 3), (2, 3), (2, 3)), {"eps": 0.1}, first=((2, 3),)),
    Case(F.layer_norm, ((3, 5),), first=((5,),)),
    Case(torch.layer_norm, ((3, 5), (5,), (5,)), first=((5,),)),
    Case(F.group_norm, (SHAPE, (C,), (C,)), first=(2,)),
    Case(F.group_norm, ((2, C, 2, 2), (C,), (C,)), first=(1,)),
    Case(torch.group_norm, (SHAPE, (C,), (C,)), first=(2,)),
    Case(F.instance_norm, ((2, C, 3), (C,), (C,))),
    Case(F.rms_norm, ((3, 5), (5,)), first=((5,),)),
    Case(torch.rms_norm, ((3, 5), (5,)), first=((5,),)),
    Case(F.normalize, ((3, 5),)),
    Case(F.normalize, ((3, 2, 2),), {"dim": 0}),
]
WEIGHT_NORM = Case(torch._weight_norm, ((3, 5),), {"g": torch.linspace(0.5, 2, 3, dtype=FLOAT64)[:, None]})
CASES = [*RUNNING_CASES, *EXAMPLE_CASES, WEIGHT_NORM]


@pytest.mark.parametrize("check", multilinear.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
@pytest.mark.parametrize("case", RUNNING_CASES, ids=str)
def test_running_statistics(case: Case, check: Callable) -> None:
    check(case)


@pytest.mark.parametrize("certain_weight", [True, False])
def test_batch_statistics(certain_weight: bool) -> None:
    """Those of the means, constant in the variance; running statistics move as those of the module."""
    x = GaussianMoments(torch.randn(6, C, 3, dtype=FLOAT64), torch.rand(6, C, 3, dtype=FLOAT64))
    weight: Any
    bias: Any
    weight, bias = (
        GaussianMoments(torch.randn(C, dtype=FLOAT64), torch.rand(C, dtype=FLOAT64)) for _ in range(2)
    )
    if certain_weight:
        weight, bias = weight.loc, bias.loc
    moved, reference = ({k: v.clone() for k, v in RUNNING.items()} for _ in range(2))
    y = F.batch_norm(x, **moved, weight=weight, bias=bias, training=True)
    F.batch_norm(x.loc, **reference, training=True)
    for name in RUNNING:
        torch.testing.assert_close(moved[name], reference[name], rtol=1e-12, atol=0)
    batch = {"running_mean": x.loc.mean((0, 2)), "running_var": x.loc.var((0, 2), correction=0)}
    expected = F.batch_norm(x, **batch, weight=weight, bias=bias)
    torch.testing.assert_close(y.loc, expected.loc, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(y.variance, expected.variance, rtol=1e-12, atol=0)


def test_batch_norm_gradients() -> None:
    """All but what would flow from the variance through the statistics."""
    x, v = torch.randn(6, C, dtype=FLOAT64), torch.rand(6, C, dtype=FLOAT64)
    weight, bias = torch.randn(C, dtype=FLOAT64), torch.randn(C, dtype=FLOAT64)

    def mean(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.batch_norm(GaussianMoments(x, v), None, None, weight, bias, training=True).loc

    def variance(v: Tensor, weight: Tensor) -> Tensor:
        return F.batch_norm(GaussianMoments(x, v), None, None, weight, bias, training=True).variance

    assert gradcheck(mean, tuple(t.requires_grad_() for t in (x, weight, bias)))
    x.requires_grad_(False)
    assert gradcheck(variance, (v.requires_grad_(), weight))
    x.requires_grad_()
    y = F.batch_norm(
        GaussianMoments(x, v.detach()), None, None, weight.detach(), bias.detach(), training=True
    )
    assert not y.variance.requires_grad


def test_batch_norm_of_certain_input() -> None:
    x = torch.randn(5, C, dtype=FLOAT64)
    weight = GaussianMoments(torch.ones(C, dtype=FLOAT64), torch.full((C,), 0.1, dtype=FLOAT64))
    y = F.batch_norm(x, None, None, weight, torch.zeros(C, dtype=FLOAT64), training=True)
    torch.testing.assert_close(y.loc, F.batch_norm(x, None, None, training=True))
    torch.testing.assert_close(y.variance, 0.1 * y.loc.square())


@pytest.mark.parametrize("case", EXAMPLE_CASES, ids=str)
def test_weights_are_exact_for_certain_inputs(case: Case) -> None:
    arguments = case.arguments()
    for uncertain in ((1,), (2,), (1, 2)):
        if max(uncertain) < len(arguments):
            mixed = [a if k in uncertain else a.loc for k, a in enumerate(arguments)]
            y = case(*mixed)
            loc, variance = exact(case, arguments, uncertain)
            torch.testing.assert_close(y.loc, loc, rtol=1e-10, atol=1e-12)
            torch.testing.assert_close(y.variance, variance, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", [c for c in EXAMPLE_CASES if len(c.shapes) > 1], ids=str)
def test_weights_are_exact_for_independent_normalised_inputs(case: Case) -> None:
    arguments = case.arguments()
    h = case(arguments[0])
    channels = case.func in (F.group_norm, torch.group_norm, F.instance_norm)
    shape = (-1, *[1] * (h.dim() - 2)) if channels else case.shapes[1]

    def affine(h: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y = h * weight.reshape(shape)
        return y if bias is None else y + bias.reshape(shape)

    loc, variance = exact(affine, [h, *arguments[1:]], tuple(range(len(arguments))))
    y = case(*arguments)
    torch.testing.assert_close(y.loc, loc, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(y.variance, variance, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", EXAMPLE_CASES, ids=str)
def test_small_noise_is_the_first_order(case: Case) -> None:
    x, *_ = case.arguments()
    small = 1e-9 * x.variance
    y = case(GaussianMoments(x.loc, small))
    jacobian = jacrev(case)(x.loc)
    torch.testing.assert_close(y.loc, case(x.loc), rtol=1e-6, atol=1e-8)
    expected = torch.tensordot(jacobian.square(), small, dims=x.dim())
    torch.testing.assert_close(y.variance, expected, rtol=1e-5, atol=1e-15)


@pytest.mark.parametrize(
    "check", multilinear.CHECKS[1:], ids=lambda check: check.__name__.removeprefix("check_")
)
@pytest.mark.parametrize("case", EXAMPLE_CASES, ids=str)
def test_statistics_of_examples(case: Case, check: Callable) -> None:
    check(case)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("layer", lambda x: F.layer_norm(x, (64,))),
        ("group", lambda x: F.group_norm(x.reshape(-1, 4, 16), 1).reshape(-1, 64)),
        ("rms", lambda x: F.rms_norm(x, (64,))),
        ("normalize", lambda x: 8 * F.normalize(x)),
    ],
)
@pytest.mark.parametrize("noise", [0.2, 1.0, 2.0])
def test_against_sampling(name: str, function: Callable, noise: float) -> None:
    """Noise up to the size of the signal: means within 0.02, deviations within 5 % (root mean square over elements).

    The sampling error of 20,000 draws is 0.007 and 0.5 %.
    """
    generator = torch.manual_seed(1)
    loc = torch.randn(1, 64, generator=generator, dtype=FLOAT64)
    scale = noise * torch.rand(1, 64, generator=generator, dtype=FLOAT64)
    samples = function(loc + scale * torch.randn(20_000, 64, generator=generator, dtype=FLOAT64))
    y = function(GaussianMoments(loc, scale.square()))
    shift = (y.loc - samples.mean(0)).square().mean().sqrt()
    ratio = (y.variance.sqrt() / samples.std(0)).log().square().mean().sqrt()
    assert shift < 0.02
    assert ratio < 0.05


@pytest.mark.parametrize(("pixels", "low", "high"), [(1.0, 3.0, 4.5), (0.0, 0.95, 1.2)])
def test_noise_that_elements_share_is_divided_out_which_independent_elements_cannot_know(pixels, low, high):
    """A kernel with noise of 0.05 over 6 x 6 pixels, of 1 +- 0.1 or +- 0.1: 16 positions; 2,000 kernels."""
    ratios = []
    for seed in range(4):
        generator = torch.Generator().manual_seed(seed)
        x = pixels + 0.1 * torch.randn(1, 1, 6, 6, generator=generator, dtype=FLOAT64)
        kernel = (2 * torch.rand(1, 1, 3, 3, generator=generator, dtype=FLOAT64) - 1) / 3
        noise = 0.05 * torch.randn(2000, 1, 3, 3, generator=generator, dtype=FLOAT64)
        ours = F.instance_norm(F.conv2d(x, GaussianMoments(kernel, torch.full_like(kernel, 0.05**2))))
        sampled = F.instance_norm(F.conv2d(x, kernel + noise))
        ratios.append(ours.variance.sqrt().flatten() / sampled.std(1).flatten())
    assert low < torch.cat(ratios).median() < high


@pytest.mark.parametrize(
    "module",
    [nn.BatchNorm1d(C), nn.GroupNorm(2, C), nn.InstanceNorm1d(C, affine=True, track_running_stats=True)],
    ids=str,
)
def test_modules_with_and_without_training(module: nn.Module) -> None:
    x = torch.randn(5, C, 6)
    for mode in (True, False):
        module.train(mode)
        before = {k: v.clone() for k, v in module.state_dict().items()}
        expected = module(x)
        after = {k: v.clone() for k, v in module.state_dict().items()}
        module.load_state_dict(before)
        y = module(GaussianMoments(x, torch.zeros_like(x)))
        torch.testing.assert_close(y.loc, expected)
        torch.testing.assert_close(dict(module.state_dict()), after)


def test_refusals() -> None:
    x = GaussianMoments(torch.randn(2, C, 3), torch.rand(2, C, 3))
    for call in (lambda: F.normalize(x, p=1.0), lambda: F.normalize(x, dim=(1, 2))):
        with pytest.raises(UnsupportedError, match="p=2 over one dimension"):
            call()
    with pytest.raises(UnsupportedError, match="local_response_norm"):
        F.local_response_norm(x, 2)


# --- weight norm ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "dim"), [((3, 5), 0), ((3, 5), 1), ((4, 3, 2, 2), 0), ((3, 2, 4), -1)])
def test_weight_norm_of_certain_tensors(shape: tuple[int, ...], dim: int) -> None:
    v = torch.randn(shape, dtype=FLOAT64)
    g = torch.rand_like(torch.norm_except_dim(v, 2, dim))
    expected = torch._weight_norm(v, g, dim)
    certain = torch.zeros(())
    weight = torch._weight_norm(GaussianMoments(v, certain.to(v)), GaussianMoments(g, certain.to(g)), dim)
    torch.testing.assert_close(weight.loc, expected)
    assert weight.variance.max() == 0
    # Lengths that alone are uncertain: exact.
    weight = torch._weight_norm(v, GaussianMoments(g, g.square()), dim)
    torch.testing.assert_close(weight.variance, expected.square())


def test_weight_norm_against_sampling() -> None:
    generator = torch.Generator().manual_seed(0)
    v = torch.randn(3, 64, generator=generator, dtype=FLOAT64)
    g = torch.tensor([[1.0], [2.0], [0.5]], dtype=FLOAT64)
    moments = GaussianMoments(v, 0.2 * torch.ones_like(v)), GaussianMoments(g, 0.04 * g.square())
    weight = torch._weight_norm(*moments, 0)
    draws = [
        m.loc + m.variance.sqrt() * torch.randn(20_000, *m.shape, generator=generator, dtype=FLOAT64)
        for m in moments
    ]
    samples = draws[1] * draws[0] / draws[0].norm(dim=-1, keepdim=True)
    torch.testing.assert_close(weight.loc, samples.mean(0), rtol=0, atol=0.01)
    torch.testing.assert_close(weight.variance.sqrt(), samples.std(0), rtol=0.05, atol=0)


def test_a_parametrised_module_is_normalised() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3, dtype=FLOAT64))
    originals = layer.parametrizations.weight
    g, v = (
        GaussianMoments(t.detach(), 0.1 * t.detach().square())
        for t in (originals.original0, originals.original1)
    )
    weight = originals[0](g, v)
    expected = torch._weight_norm(v, g, 0)
    assert weight.variance.equal(expected.variance)
    torch.testing.assert_close(
        F.linear(torch.ones(2, 4, dtype=FLOAT64), weight).variance[0], weight.variance.sum(1)
    )
