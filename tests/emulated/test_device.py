# SPDX-License-Identifier: Apache-2.0
"""The emulated device does what an accelerator does, and refuses what one refuses."""

import copy
import io
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from tests import emulated

pytestmark = pytest.mark.skipif(not emulated.AVAILABLE, reason="this torch cannot emulate a device")


@pytest.fixture
def device(request: pytest.FixtureRequest) -> Iterator[torch.device]:
    if request.config.getoption("--device") != "emulated":
        pytest.skip("the emulated device is left out")
    with emulated.in_use() as device:
        yield device


@pytest.mark.parametrize(
    "make",
    [
        lambda device: torch.arange(4, device=device),
        lambda device: torch.eye(3, device=device),
        lambda device: torch.tensor([1.0, 2.0], device=device),
        lambda device: torch.randn(3, device=device),
        lambda device: torch.empty(3, device=device).new_zeros(2),
        lambda device: torch.zeros(3).to(device),
        lambda device: torch.zeros(3).to(torch.ones(1, device=device)),
        lambda device: torch.ones(3, device=device)[1:].exp().sum(),
        lambda device: torch.ones(1, 2, device=device).squeeze_(0),
    ],
)
def test_results_are_on_the_device(make, device):
    found, expected = make(device), make("cpu")
    assert found.device == device and found.shape == expected.shape and found.stride() == expected.stride()
    if expected.dtype == torch.float32 and not isinstance(expected, nn.Parameter):
        assert found.cpu().device.type == "cpu"


MIXTURES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "sum": lambda near, far: near + far,
    "product of matrices": lambda near, far: near @ far,
    "one after the other": lambda near, far: torch.cat([near, far]),
    "numbers in a list": lambda near, far: torch.stack([near.sum(), far.sum()]),
    "result in place": lambda near, far: near.sum().add_(far.sum()),
    "rows of a tensor on the CPU": lambda near, far: near[far.long()],
    "choice of rows": lambda near, far: far.index_select(0, near.long()[0]),
    "where": lambda near, far: torch.where(far > 0, far, near),
}


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=list(MIXTURES))
def test_tensors_of_two_devices_do_not_mix(mixture, device):
    near = torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="same device"):
        mixture(near, near.to(device))


ALLOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "number on the CPU": lambda near, far: far * near.sum(),
    "copy": lambda near, far: far.clone().copy_(near),
    "rows": lambda near, far: far[near.long()],
    "where": lambda near, far: torch.where(far > 0, far, near.sum()),
}


@pytest.mark.parametrize("operation", ALLOWED.values(), ids=list(ALLOWED))
def test_what_a_gpu_allows_is_allowed(operation, device):
    near = torch.ones(2, 2)
    found = operation(near, near.to(device))
    assert found.device == device
    torch.testing.assert_close(found.cpu(), operation(near, near))


READS: dict[str, Callable[[Tensor], object]] = {
    "float": lambda x: float(x.sum()),
    "item": lambda x: x[0].item(),
    "truth": lambda x: bool((x > 0).all()),
    "list": lambda x: x.tolist(),
    "mask": lambda x: x[x > 0],
    "places": lambda x: x.nonzero(),
    "equality": lambda x: torch.equal(x, x),
    "closeness": lambda x: torch.allclose(x, x),
    "CPU": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu", torch.float64),
    "copy to the CPU": lambda x: torch.empty(3).copy_(x),
    "unique": lambda x: x.unique(),
    "Cholesky": lambda x: torch.linalg.cholesky(torch.diag(x)),
    "print": repr,
}


def test_sums_of_batch_norm_alone_need_a_weight(device):
    x, of_channel = torch.ones(2, 3, device=device), torch.ones(3, device=device)

    def sums(weight: Tensor | None, with_input: bool) -> None:
        statistics = (weight, None, None, of_channel, of_channel, True, 1e-5)
        torch.ops.aten.native_batch_norm_backward(x, x, *statistics, [with_input, True, True])

    sums(of_channel, False)
    sums(None, True)
    with pytest.raises(RuntimeError, match="weight"):
        sums(None, False)


@pytest.mark.parametrize("read", READS.values(), ids=list(READS))
def test_a_read_is_counted_once(read, device):
    x = torch.tensor([1.0, 2.0, 3.0], device=device)
    with emulated.counted_reads() as reads:
        read(x)
    assert reads.total() == 1, str(reads)
    assert "test_device.py" in str(reads)


def test_work_on_the_device_is_no_read(device):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3)).to(
        device
    )
    x, y = torch.randn(5, 1, 8, 8), torch.arange(5) % 3
    optimizer = torch.optim.Adam(net.parameters())
    with emulated.counted_reads() as reads:
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x.to(device)), y.to(device)).backward()
            optimizer.step()
        masked = x.to(device)
        masked[masked > 0] = 0.0  # a fill, whose size is known
    assert not reads, str(reads)


def test_training_gives_the_numbers_of_the_cpu(device):
    def trained(where: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(), nn.Linear(4, 1)).to(where)
        optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
        torch.manual_seed(1)
        for _ in range(3):
            optimizer.zero_grad()
            net(torch.ones(5, 3, device=where)).square().sum().backward()
            optimizer.step()
        return [p.detach().cpu() for p in net.parameters()]

    for found, expected in zip(trained(device), trained(torch.device("cpu")), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_a_module_keeps_its_parameters_when_it_moves(device):
    net = nn.Linear(2, 1)
    weight = net.weight
    weight.note = "kept"
    net.to(device)
    assert net.weight is weight and weight.note == "kept" and isinstance(weight, nn.Parameter)
    assert weight.device == device and weight.requires_grad
    net.cpu()
    assert net.weight is weight and weight.device.type == "cpu" and type(weight) is nn.Parameter


def test_copies_and_files(device):
    net = nn.Linear(2, 1).to(device)
    twin = copy.deepcopy(net)
    assert twin.weight.device == device and isinstance(twin.weight, nn.Parameter)
    with torch.no_grad():
        twin.weight.zero_()
    assert net.weight.cpu().all()
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    for where in (None, "cpu"):
        file.seek(0)
        found = torch.load(file, map_location=where)["weight"]
        assert found.device == (device if where is None else torch.device("cpu"))
        torch.testing.assert_close(found.cpu(), net.weight.detach().cpu())


def test_gradients_of_single_examples(device):
    net = nn.Linear(2, 1)
    x = torch.randn(4, 2)

    def gradients() -> Tensor:
        parameters = {k: p.detach() for k, p in net.named_parameters()}
        each = vmap(grad(lambda p, row: functional_call(net, p, (row,)).square().sum()), (None, 0))
        return each(parameters, x.to(net.weight.device))["weight"]

    expected = gradients()
    net.to(device)
    assert gradients().device == device
    torch.testing.assert_close(gradients().cpu(), expected)


def test_generators_belong_to_a_device(device):
    own = torch.Generator(device).manual_seed(3)
    expected = torch.randn(2, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(torch.randn(2, generator=own, device=device).cpu(), expected)
    assert own.device == device and isinstance(own, torch.Generator)
    with pytest.raises(RuntimeError, match="generator"):
        torch.randn(2, generator=torch.Generator(), device=device)


def test_the_device_draws_from_its_own_state(device):
    before = torch.get_rng_state()
    torch.randn(3, device=device)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    first = torch.randn(3, device=device)
    torch.manual_seed(0)
    assert torch.equal(torch.randn(3, device=device), first)


def test_it_may_refuse_double_precision(device):
    with emulated.no_float64():
        assert (torch.ones(2, device=device) * 0.1).dtype == torch.float32
        for double in (
            lambda: torch.ones(2, device=device).double(),
            lambda: torch.ones(2, dtype=torch.float64).to(device),
            lambda: torch.zeros(2, dtype=torch.float64, device=device),
        ):
            with pytest.raises(TypeError, match="no torch.float64"):
                double()
    assert torch.ones(2, device=device).double().dtype == torch.float64


def test_numpy_needs_a_copy(device):
    with pytest.raises(TypeError, match="cpu"):
        np.asarray(torch.ones(2, device=device))
