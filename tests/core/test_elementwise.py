# SPDX-License-Identifier: Apache-2.0
"""Kernels for a GPU: the C++ code with the compiler of this machine, gradients, and what a recording sees."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pyro
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

import pyro_dvi as dvi
from pyro_dvi.core import batch_norm, elementwise
from pyro_dvi.core.elementwise import Elementwise, fuses
from pyro_dvi.curvature import MinibatchGradient
from pyro_dvi.errors import DviWarning
from pyro_dvi.moments import GaussianMoments, piecewise
from pyro_dvi.moments.value import tiny_variance
from pyro_dvi.objectives import Captured
from tests.core.kernels import FUNCTIONS, kernels_on_cpu

DTYPES = [torch.float32, torch.float64]


def arguments(name: str) -> list[str]:
    return [argument.name for argument in FUNCTIONS[name].operator._schema.arguments]


def drawn(name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Random arguments of a function; variances are positive."""
    generator = torch.Generator().manual_seed(3)
    draws = [torch.randn(shape, dtype=torch.float64, generator=generator) for _ in arguments(name)]
    return [
        (t.exp() if n in ("variance", "alpha") else t).to(dtype)
        for n, t in zip(arguments(name), draws, strict=True)
    ]


def several(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


# The code in C++ ----------------------------------------------------------------------------------------------------

PRELUDE = """
#include <cmath>
using std::exp; using std::erfc; using std::log1p;
template <typename T> T rsqrt(T x) { return 1 / std::sqrt(x); }
"""


def loop(name: str, kind: str) -> str:
    """C code that applies a function to arrays."""
    given, found = len(arguments(name)), len(FUNCTIONS[name].operator._schema.returns)
    pointers = [f"const {kind}* a{k}" for k in range(given)] + [f"{kind}* r{k}" for k in range(found)]
    values = [f"a{k}[i]" for k in range(given)] + [f"r{k}[i]" for k in range(found)]
    return f"""extern "C" void {name}_{kind}(long n, {", ".join(pointers)}) {{
        for (long i = 0; i < n; i++) {name}<{kind}>({", ".join(values)}); }}\n"""


@pytest.fixture(scope="module")
def in_cpp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[Tensor]], tuple[Tensor, ...]]:
    """A function that applies the C++ code of a kernel to tensors."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("kernels")
    loops = [loop(name, kind) for name in FUNCTIONS for kind in ("float", "double")]
    (folder / "kernels.cpp").write_text(PRELUDE + "\n".join([f.code for f in FUNCTIONS.values()] + loops))
    command = [compiler, "-O1", "-std=c++17", "-shared", "-fPIC", "kernels.cpp", "-o", "kernels.so"]
    subprocess.run(command, cwd=folder, check=True)
    library = ctypes.CDLL(str(folder / "kernels.so"))

    def run(name: str, given: list[Tensor]) -> tuple[Tensor, ...]:
        kind = "double" if given[0].dtype is torch.float64 else "float"
        given = [t.contiguous() for t in given]
        found = tuple(torch.empty_like(given[0]) for _ in FUNCTIONS[name].operator._schema.returns)
        pointers = [ctypes.c_void_p(t.data_ptr()) for t in (*given, *found)]
        getattr(library, f"{name}_{kind}")(ctypes.c_long(given[0].numel()), *pointers)
        return found

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_code_computes_the_function_in_torch(name, dtype, in_cpp):
    given = drawn(name, (1000,), dtype)
    expected = several(FUNCTIONS[name].plain(*given))
    for value, right in zip(in_cpp(name, given), expected, strict=True):
        assert (value - right).abs().max() <= 64 * torch.finfo(dtype).eps * right.abs().max()


def wide_range(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Means up to ±1e4, and variances from 0 to 1e30."""
    sizes = torch.cat([torch.zeros(1), torch.logspace(-6, 4, 41)]).to(dtype)
    variances = torch.cat([torch.zeros(1), torch.logspace(-30, 30, 61)]).to(dtype)
    mu, variance = torch.meshgrid(torch.cat([sizes, -sizes]), variances, indexing="ij")
    return mu.reshape(-1), variance.reshape(-1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_moments_of_relu_far_from_the_kink(dtype, in_cpp):
    mu, variance = wide_range(dtype)
    mean, p, slope, _ = piecewise._rectified(mu, variance)
    g_mean, g_spread = torch.ones_like(mu), torch.full_like(mu, -0.5)
    # Of each result, the sum of the sizes of its terms. An error of z² eps is unavoidable in exp(-z²).
    size = mu.abs() * p + variance * slope
    sizes = [size, (mu - mean).abs() * size + variance * p, p + size, (0.5 + 0.5 * size) * slope + 0.5 * p]
    found = [
        *in_cpp("rectify", [mu, variance]),
        *in_cpp("rectify_backward", [g_mean, g_spread, mu, variance]),
    ]
    expected = [
        *FUNCTIONS["rectify"].plain(mu, variance),
        *FUNCTIONS["rectify_backward"].plain(g_mean, g_spread, mu, variance),
    ]
    for value, right, size in zip(found, expected, sizes, strict=True):
        assert value.isfinite().all()
        assert ((value - right).abs() <= 256 * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name.startswith("moments_of")])
def test_moments_of_smooth_functions_at_any_scale(name, dtype, in_cpp):
    mu, variance = wide_range(dtype)
    mu, variance = mu[variance < 1e12], variance[variance < 1e12].clamp_min(tiny_variance(dtype))
    sigma, one = variance.sqrt(), torch.ones_like(mu)
    sizes = [sigma, variance, one, 1 / sigma, sigma, one]
    expected = FUNCTIONS[name].plain(mu, variance)
    for value, right, size in zip(in_cpp(name, [mu, variance]), expected, sizes, strict=True):
        assert ((value - right).abs() <= 256 * torch.finfo(dtype).eps * size).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["rectify", "softplus", "softplus_backward", "softplus_double_backward"])
def test_infinities_and_nan_are_those_of_torch(name, dtype, in_cpp):
    values = torch.tensor(
        [-torch.inf, -1e30, -300.0, -1.0, 0.0, 1.0, 20.0, 21.0, 300.0, torch.inf, torch.nan]
    )
    given = drawn(name, (len(values) ** 2,), dtype)
    grid = torch.cartesian_prod(values, values).to(dtype)
    given[-1] = grid[:, 0].abs() if name == "rectify" else grid[:, 0]
    given[-2:-1] = [grid[:, 1]] if name == "rectify" else given[-2:-1]
    for value, right in zip(in_cpp(name, given), several(FUNCTIONS[name].plain(*given)), strict=True):
        torch.testing.assert_close(value, right, equal_nan=True, rtol=1e-4, atol=1e-9)


# Gradients ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["rectify", "noisy", "second_moment", "softplus"])
def test_gradients(name):
    shapes = [(1, 3, 1) if n == "alpha" else (2, 3, 2) for n in arguments(name)]
    given = [
        t[tuple(slice(size) for size in shape)].clone().requires_grad_()
        for t, shape in zip(drawn(name, (2, 3, 2)), shapes, strict=True)
    ]
    function = FUNCTIONS[name]
    with kernels_on_cpu():
        results = several(function(*given))
        assert all(type(result.grad_fn).__name__ == "_NodeBackward" for result in results)
        assert gradcheck(function, given)
        if name != "rectify":
            assert gradgradcheck(function, given)
    for value, right in zip(results[function.unchanged :], several(function.plain(*given)), strict=True):
        torch.testing.assert_close(value, right)


def test_every_operator_is_tested():
    assert {f"pyro_dvi::{name}" for name in FUNCTIONS} == elementwise._LIBRARY._op_defs


def test_arguments_without_a_gradient():
    x, variance, alpha = (t.requires_grad_() for t in drawn("noisy", (4, 3)))
    with kernels_on_cpu():
        _, y = FUNCTIONS["noisy"](x.detach(), variance, alpha.detach())
    y.sum().backward()
    torch.testing.assert_close(variance.grad, alpha.detach() + 1)


@pytest.mark.parametrize("function", [torch.sigmoid, torch.tanh, torch.erf, F.softplus, F.silu])
def test_moments_of_activations(function, double):
    x = GaussianMoments(3 * torch.randn(200), torch.randn(200).exp())

    def results() -> list[Tensor]:
        given = GaussianMoments(x.loc.requires_grad_(), x.variance.requires_grad_())
        y = function(given)
        return [y.loc, y.variance, *torch.autograd.grad((y.loc - y.variance).sum(), (x.loc, x.variance))]

    expected = results()
    with kernels_on_cpu():
        found = results()
    torch.testing.assert_close(found, expected)


# Layers and objectives ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("shape", [(6, 3, 4, 4), (8, 3, 4), (64, 3)])
def test_batch_norm_in_parts_of_the_batch(shape, latent, double):
    x, g, a = (torch.randn(shape).requires_grad_() for _ in range(3))
    gamma, beta = (torch.randn(shape[1]).requires_grad_() for _ in range(2))

    def derivatives() -> list[Tensor]:
        y, inverse = batch_norm.BatchNorm.apply(x, gamma, beta, None, None, 0.1, 1e-5)
        first = torch.autograd.grad(y, (x, gamma, beta), g, create_graph=True)
        value = (first[0] * a).sum() + (sum(f.square().sum() for f in first[1:]) if latent else 0)
        return [y, inverse, *first, *torch.autograd.grad(value, (x, gamma, g))]

    expected = derivatives()
    with kernels_on_cpu():
        assert batch_norm._parts(g, x) > 1
        found = derivatives()
    torch.testing.assert_close(found, expected)


def network(activation: type[nn.Module]) -> nn.Module:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
            self.norm, self.norm2 = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
            self.activation, self.last = activation(), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = self.activation(self.norm(self.first(x)))
            h = self.activation(h + self.norm2(self.second(h)))
            return self.last(h.mean((2, 3)))

    return Residual()


METHODS = {
    "MNVI": (dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO, nn.ReLU),
    "mean field": (dvi.MeanFieldGuide, dvi.MomentPropagationELBO, nn.ReLU),
    # With the given labels, because other devices draw other ones.
    "Variational Laplace": (
        dvi.MeanFieldGuide,
        lambda: dvi.TaylorELBO(curvature=MinibatchGradient()),
        nn.Softplus,
    ),
}
EXPECTED = {
    "MNVI": {"rectify", "rectify_backward", "noisy", "noisy_backward", "input_gradient"},
    "mean field": {
        "rectify",
        "rectify_backward",
        "second_moment",
        "second_moment_backward",
        "input_gradient",
    },
    "Variational Laplace": {
        "softplus",
        "softplus_backward",
        "softplus_double_backward",
        "combined",
        "input_gradient",
    },
}


def steps(method: str, device: torch.device | str, number: int = 3) -> tuple[list[list[Tensor]], Captured]:
    """Gradients of some steps with the same parameters, the last of which are recorded."""
    guide_of, elbo_of, activation = METHODS[method]
    pyro.clear_param_store()
    torch.manual_seed(0)
    model = dvi.classifier(dvi.to_bayesian_(network(activation)), num_data=100).to(device)
    x, y = torch.randn(8, 1, 4, 4).to(device), torch.randint(3, (8,)).to(device)
    guide, elbo = guide_of(model), Captured(elbo_of(), after=1)
    guide.initialize(x, y)
    parameters = [p for module in (model, guide) for p in module.parameters()]
    found = []
    for _ in range(number):
        torch.manual_seed(1)
        for p in parameters:
            p.grad = None
        elbo.loss_and_grads(model, guide, x, y)
        found.append([p.grad.cpu() for p in parameters if p.grad is not None])
    return found, elbo


@pytest.mark.every(3)
@pytest.mark.parametrize("method", METHODS)
def test_objectives_with_kernels(method, double):
    (expected, *_), _ = steps(method, "cpu", 1)
    with kernels_on_cpu():
        found, elbo = steps(method, "cpu")
    for gradients in found:
        torch.testing.assert_close(gradients, expected)
    (recorded,) = elbo.recordings
    names = [str(node.target).split(".") for node in recorded.operators.graph.nodes]
    assert {name[1] for name in names if name[0] == "pyro_dvi"} == EXPECTED[method]


# Where kernels run --------------------------------------------------------------------------------------------------


def on_gpu(*shape: int, **options: Any) -> Tensor:
    return torch.empty(shape, device="cuda", **options)


def test_only_float32_and_float64_on_one_gpu(monkeypatch):
    with FakeTensorMode():
        x, scale = on_gpu(2, 3), on_gpu(3)
        assert fuses(x) and fuses(x, scale) and fuses(x.double(), scale.double())
        assert not fuses(x.half()) and not fuses(x.to(torch.complex64)) and not fuses(x.int())
        assert not fuses(x, scale.double()) and not fuses(x, torch.empty(3)) and not fuses(torch.empty(3))
        for module, name in (
            (torch.compiler, "is_compiling"),
            (torch._C, "_are_functorch_transforms_active"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, lambda: True)
                assert not fuses(x)


def test_a_gradient_without_a_kernel_goes_through_torch():
    x, a, g, *rest = drawn("combined", (2, 3))
    with kernels_on_cpu():
        assert FUNCTIONS["combined"](x.requires_grad_(), a, g, *rest).grad_fn is not None
        with torch.no_grad():
            assert FUNCTIONS["combined"](x, a, g, *rest).grad_fn is None


LAYOUTS = {
    "contiguous": (on_gpu, on_gpu),
    "channels last": (
        lambda *shape: on_gpu(*shape, memory_format=torch.channels_last),
        lambda *shape: on_gpu(*shape, memory_format=torch.channels_last),
    ),
    "the first decides": (lambda *shape: on_gpu(*shape, memory_format=torch.channels_last), on_gpu),
    "broadcast": (
        lambda *shape: on_gpu(shape[1], 1, 1),
        lambda *shape: on_gpu(*shape, memory_format=torch.channels_last),
    ),
    "expanded": (lambda *shape: on_gpu(*shape[:2], 1, 1).expand(shape), on_gpu),
    "transposed": (lambda *shape: on_gpu(*shape[::-1]).permute(3, 2, 1, 0), lambda *shape: on_gpu(1)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_without_values_are_those_of_torch(layout):
    with FakeTensorMode():
        mu, variance = (make(2, 3, 4, 5) for make in LAYOUTS[layout])
        for result in FUNCTIONS["rectify"].operator(mu, variance):
            assert (result.stride(), result.dtype, result.device) == (
                (mu + variance).stride(),
                mu.dtype,
                mu.device,
            )


def test_torch_functions_stand_in_where_nothing_compiles(monkeypatch):
    def refuse(*arguments: Any) -> None:
        raise RuntimeError("NVRTC is missing")

    monkeypatch.setattr(Elementwise, "_compiles", True)
    monkeypatch.setattr(torch.cuda.jiterator, "_create_multi_output_jit_fn", refuse)
    given = drawn("combined", (2, 3))
    function = FUNCTIONS["combined"]
    with pytest.warns(DviWarning, match="NVRTC is missing"):
        first = function._run(*given)
    torch.testing.assert_close([first, function._run(*given)], [function.plain(*given)] * 2)


def test_torch_functions_stand_in_where_a_kernel_is_wrong(monkeypatch):
    function, given = FUNCTIONS["combined"], drawn("combined", (2, 3))
    monkeypatch.setattr(Elementwise, "_compiles", True)
    monkeypatch.setattr(function, "_checked", set())
    monkeypatch.setitem(vars(function), "_kernel", lambda *tensors: 1.1 * function.plain(*tensors))
    with pytest.warns(DviWarning, match="a kernel gives wrong results"):
        first = function._run(*given)
    torch.testing.assert_close([first, function._run(*given)], [function.plain(*given)] * 2)


def test_a_lack_of_memory_is_reported(monkeypatch):
    def fail(*tensors: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    function = FUNCTIONS["combined"]
    monkeypatch.setitem(vars(function), "_kernel", fail)
    with pytest.raises(torch.OutOfMemoryError):
        function._run(*drawn("combined", (2, 3)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_a_device(name, layout, dtype, device):
    given = [t.contiguous(memory_format=layout) for t in drawn(name, (2, 3, 4, 5), dtype)]
    if name.startswith("moments_of"):
        given = [t.reshape(-1) for t in given]
    elif "rectify" not in name:
        given[-1] = given[-1][:1, :, :1, :1]  # broadcast
    function, moved = FUNCTIONS[name], [t.to(device) for t in given]
    found, expected = several(function(*moved)), several(function.plain(*given))
    for value, right in zip(found[len(found) - len(expected) :], expected, strict=True):
        assert value.device == device and value.stride() == right.stride()
        torch.testing.assert_close(
            value.cpu(), right, rtol=1e-4 if dtype is torch.float32 else 1e-10, atol=1e-6
        )


@pytest.mark.parametrize("method", METHODS)
def test_objectives_on_a_device(method, device, monkeypatch, double):
    monkeypatch.setattr(batch_norm, "_LARGEST_BLOCK", 32)
    (expected, *_), _ = steps(method, "cpu", 1)
    (found, *_), _ = steps(method, device, 1)
    torch.testing.assert_close(found, expected)
