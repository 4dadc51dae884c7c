# SPDX-License-Identifier: Apache-2.0
"""The Triton kernel for squares of convolutions against a loop over examples, on a GPU and in Triton's interpreter."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.core.elementwise import triton_kernel
from pyro_dvi.core.recorder import Recorder
from pyro_dvi.curvature.per_example import convolution
from pyro_dvi.curvature.squared_gradients import SquaredGradients

NAME = "pyro_dvi.curvature.per_example.convolution_kernel"
CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}
# Shapes of inputs and weights, with the options of the convolution.
LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "one example": ((1, 3, 9, 7), (5, 3, 3, 3), {}),
    "padding and stride": ((3, 3, 9, 7), (5, 3, 3, 2), {"padding": (1, 2), "stride": (2, 1)}),
    "one position": ((3, 4, 3, 3), (6, 4, 3, 3), {}),
    "dilation and groups": ((2, 4, 9, 8), (6, 2, 2, 3), {"dilation": (2, 1), "groups": 2}),
    "depthwise": ((2, 3, 6, 6), (3, 1, 3, 3), {"padding": 1, "groups": 3}),
    "same padding": ((2, 2, 7, 6), (3, 2, 4, 3), {"padding": "same"}),
    "one dimension": ((3, 4, 11), (6, 4, 3), {"stride": 2}),
    "three dimensions": ((2, 2, 4, 5, 6), (3, 2, 2, 3, 2), {"padding": (0, 1, 1)}),
    "several tiles, whole chunks": ((3, 15, 8, 8), (130, 15, 3, 3), {"padding": 1}),
    "chunks that are not full": ((2, 6, 14, 14), (16, 6, 5, 5), {}),
    "more examples than programs": ((270, 1, 4, 4), (2, 1, 3, 3), {}),
}


def layer(name: str) -> tuple[Tensor, Tensor, dict[str, Any]]:
    shape, weight, options = LAYERS[name]
    generator = torch.Generator().manual_seed(2)
    return torch.randn(shape, generator=generator), torch.randn(weight, generator=generator), options


def loop(x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """The sum of squares in float64, with a gradient for each example."""
    x, weight = x.double(), weight.double().requires_grad_()
    losses = CONVOLUTIONS[x.dim()](x, weight, None, **options).square().flatten(1).sum(1)
    return sum(torch.autograd.grad(one, weight, retain_graph=True)[0].square() for one in losses)


def squares(x: Tensor, weight: Tensor, options: dict[str, Any]) -> Tensor:
    """The sum of squares from the rule."""
    weight = weight.requires_grad_()
    recorder = SquaredGradients([weight])
    found: dict[int, Tensor] = {}
    with recorder:
        losses = CONVOLUTIONS[x.dim()](x, weight, None, **options).square().flatten(1).sum(1)
    recorder.watch(recorder.served(len(x)), found.__setitem__)
    losses.sum().backward()
    return found[0]


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.cpu().double() - exact).norm() / exact.norm())


@pytest.mark.filterwarnings("ignore:Using padding=.same.:UserWarning")
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_squares_on_a_device(name, channels_last, device):
    x, weight, options = layer(name)
    exact = loop(x, weight, options)
    if channels_last and x.dim() == 4:
        x = x.to(memory_format=torch.channels_last)
    for tf32, tolerance in ((False, 1e-5), (True, 5e-3)):
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
            assert error(squares(x.to(device), weight.to(device), options), exact) < tolerance


def test_squares_in_a_cuda_graph(device):
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    x, weight, options = layer("padding and stride")
    inputs, weight = x.to(device), weight.to(device)
    squares(inputs, weight, options)  # compiles the kernel
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = squares(inputs, weight, options)
    inputs.copy_(2 * inputs)
    graph.replay()
    assert error(found, loop(2 * x, weight.detach().cpu(), options)) < 5e-3


def test_squares_in_the_interpreter():
    pytest.importorskip("triton", minversion="3.7")  # the interpreter of earlier ones needs an earlier NumPy
    command = [sys.executable, "-W", "ignore", "-m", "tests.curvature.test_convolution_kernel"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=environment)
    assert done.returncode == 0, done.stderr


def check_in_the_interpreter() -> None:
    """Compare the kernel with the loop; in a process of its own, because Triton reads the variable when imported."""
    device = torch.device("cpu")
    kernel = triton_kernel(convolution.KERNEL, device, lambda found: convolution._checked(found, device))
    assert kernel is not None

    def by_kernel(self: Any, x: Tensor, delta: Tensor) -> Tensor:
        return kernel(self._windows(x, delta.shape[2:]), delta, self.groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(convolution._Layer, "squares", by_kernel)
        patch.setattr(sys.modules[NAME], "_PROGRAMS", 4)  # several examples each
        for name in [name for name, (shape, _, _) in LAYERS.items() if shape[0] < 100]:
            x, weight, options = layer(name)
            with Recorder([x]) as recorder:
                found = squares(x, weight, options)
            nodes = recorder.graph([found]).nodes
            assert sum("convolution_squares" in str(node.target) for node in nodes) == 1, name
            assert error(found, loop(x, weight, options)) < 1e-6, name
    shapes = kernel(torch.empty(2, 4, 3, 5, device="meta"), torch.empty(2, 6, 5, device="meta"), 2)
    assert (shapes.shape, shapes.dtype) == ((6, 2, 3), torch.float32)


if __name__ == "__main__":
    check_in_the_interpreter()
