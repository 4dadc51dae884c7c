# SPDX-License-Identifier: Apache-2.0
"""Who takes part in step_speed.py, and the process in which each takes its steps."""

import json
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import pyro_dvi as dvi
from benchmarks.shared.networks import lenet, mlp, resnet18_cifar
from pyro_dvi.bayesian import classifier, init_to_module
from pyro_dvi.curvature import Fisher
from pyro_dvi.optim import learning_rates

__all__ = ["BEFORE", "CASES", "SMOOTH", "TWICE", "UNIT", "contestants"]

NUM_DATA, LR = 50_000, 1e-4
Net = Callable[[], nn.Module]
Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Case:
    """A network with the shape of its inputs."""

    make: Net
    shape: tuple[int, ...]
    batch: int
    rounds: int
    turn: int  # steps that a contestant takes when it is its turn: in training, too, caches are warm
    at_once: int = 99  # processes beside the units' that fit into memory

    def data(self, device: str, batch: int | None = None) -> tuple[Tensor, Tensor]:
        """One minibatch."""
        torch.manual_seed(0)
        x = torch.randn(batch or self.batch, *self.shape, device=device)
        return x, torch.randint(10, (len(x),), device=device)


CASES = {
    "MLP 784-200-200-10, batch 128": Case(lambda: mlp((784, 200, 200, 10), nn.ReLU), (784,), 128, 30, 8),
    "LeNet, batch 128": Case(lambda: lenet(activation=nn.ReLU), (1, 28, 28), 128, 15, 4),
    "ResNet-18 with CIFAR stem, batch 32": Case(resnet18_cifar, (3, 32, 32), 32, 5, 1, 4),
}


def bare(net: nn.Module, **options: Any) -> Step:
    """A step in torch alone."""
    return steps_of(net, torch.optim.Adam(net.parameters(), LR, **options), nullcontext)


def steps_of(net: nn.Module, optimizer: Any, around: Callable[[], Any]) -> Step:
    """A training loop in torch; the loss and its gradients are computed within a context."""

    def step(x: Tensor, y: Tensor) -> object:
        with around():
            optimizer.zero_grad()
            loss = cross_entropy(net(x), y)
            loss.backward()
        optimizer.step()
        return loss.item()

    return step


def svi(guide_of: Callable, loss: Callable, optimizer: Callable) -> Callable[[nn.Module], Step]:
    """A step of SVI."""

    def make(net: nn.Module) -> Step:
        model = classifier(dvi.to_bayesian_(net, prior_scale=1.0), num_data=NUM_DATA)
        return SVI(model, guide_of(model), optimizer(), loss()).step

    return make


def delta(model: Any) -> Any:
    return AutoDelta(model, init_loc_fn=init_to_module)


def normal(model: Any) -> Any:
    return AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)


def pyro_adam() -> Any:
    return pyro.optim.Adam(learning_rates(LR))


def adam() -> Any:
    """Ours; Pyro's in versions of this library that have none."""
    return getattr(dvi.optim, "Adam", pyro.optim.Adam)(learning_rates(LR))


def natural(optimizer: str) -> Callable[[nn.Module], Step]:
    return svi(
        dvi.NaturalGradientGuide,
        lambda: dvi.NaturalGradientELBO(kl_weight=0.1),
        lambda: getattr(dvi.optim, optimizer)({"lr": LR}),
    )


def ivon_package(net: nn.Module) -> Step:
    """The authors' package."""
    from ivon import IVON

    optimizer = IVON(net.parameters(), lr=LR, ess=NUM_DATA, weight_decay=1 / NUM_DATA)
    return steps_of(net, optimizer, partial(optimizer.sampled_params, train=True))


def vmap_vogn(net: nn.Module) -> Step:
    """Squared gradients of examples by ``vmap(grad)``, with the update of VOGN written out."""
    means = {name: p.detach().clone() for name, p in net.named_parameters()}
    state = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in means.items()}

    def loss_of(weights: dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = cross_entropy(functional_call(net, weights, (x[None],)), y[None])
        return loss, loss.detach()

    of_examples = vmap(grad(loss_of, has_aux=True), in_dims=(None, 0, 0))

    def step(x: Tensor, y: Tensor) -> object:
        scales = {name: (NUM_DATA * (s + 1 / NUM_DATA)).rsqrt_() for name, (_, s) in state.items()}
        drawn = {name: mean + scales[name] * torch.randn_like(mean) for name, mean in means.items()}
        gradients, losses = of_examples(drawn, x, y)
        for name, each in gradients.items():
            m, s = state[name]
            m.lerp_(each.mean(0) + means[name] / NUM_DATA, 0.1)
            s.lerp_(each.square().mean(0), 0.001)
            means[name].addcdiv_(m, s + 1 / NUM_DATA, value=-LR)
        return losses.mean().item()

    return step


UNIT, SMOOTH = "torch, Adam", "torch, Adam, softplus"
OURS = {
    "VL": svi(dvi.MeanFieldGuide, dvi.TaylorELBO, adam),
    "MNVI": svi(dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO, adam),
    "mean-field moments": svi(dvi.MeanFieldGuide, dvi.MomentPropagationELBO, adam),
    "VOGN": natural("VOGN"),
    "IVON": natural("IVON"),
}
BEFORE = ", before"
CONTESTANTS: dict[str, Callable[[nn.Module], Step]] = {
    UNIT: bare,
    SMOOTH: bare,
    "torch, fused Adam": lambda net: bare(net, fused=True),
    "MAP (AutoDelta, Trace_ELBO), Pyro's Adam": svi(delta, Trace_ELBO, pyro_adam),
    "MAP (AutoDelta, Trace_ELBO), dvi.optim.Adam": svi(delta, Trace_ELBO, adam),
    "AutoNormal, Trace_ELBO, Pyro's Adam": svi(normal, Trace_ELBO, pyro_adam),
    "AutoNormal, Trace_ELBO, dvi.optim.Adam": svi(normal, Trace_ELBO, adam),
    **{name + before: make for name, make in OURS.items() for before in (BEFORE, "")},
    "VL, penalty in every 4th step": svi(
        dvi.MeanFieldGuide, lambda: dvi.TaylorELBO(curvature=Fisher(every=4)), adam
    ),
    "VOGN by vmap(grad), torch alone": vmap_vogn,
    "IVON, the package ivon-opt": ivon_package,
}
CYCLE = {"VL, penalty in every 4th step": 4}  # steps that are counted together
TWICE = ("VL", SMOOTH)  # on smooth networks


def contestants(case: str, before: bool) -> list[str]:
    """Those that take part."""
    left_out = set()
    if not before:
        left_out |= {name for name in CONTESTANTS if name.endswith(BEFORE)}
    if "ResNet" in case:  # batch normalisation couples examples, and each would need 11 million gradients
        left_out.add("VOGN by vmap(grad), torch alone")
    if find_spec("ivon") is None:
        left_out.add("IVON, the package ivon-opt")
    return [name for name in CONTESTANTS if name not in left_out]


def made(case: str, contestant: str, device: str) -> Step:
    torch.manual_seed(0)
    net = CASES[case].make().to(device)
    if contestant.startswith(TWICE):
        dvi.bayesian.smooth_activations_(net)
    return CONTESTANTS[contestant](net)


# A contestant's process ------------------------------------------------------------------------------------------


def take_steps(case: str, contestant: str, device: str) -> None:
    """Report counts and memory, then take and time a step for each line that comes in."""
    warnings.simplefilter("ignore")
    x, y = CASES[case].data(device)
    before = _memory(device, reset=True)
    step = made(case, contestant, device)
    for _ in range(3):
        step(x, y)
    found = {"mebibytes": (_memory(device, peak=True) - before) / 2**20, **_counts(case, contestant, device)}
    pyro.clear_param_store()
    step, turn = made(case, contestant, device), max(CASES[case].turn, CYCLE.get(contestant, 1))
    for _ in range(4):
        step(x, y)
    print(json.dumps(found), flush=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        for _ in range(turn):
            step(x, y)  # ends with the loss as a number, which waits for the device
        print((time.perf_counter() - start) / turn, flush=True)


def _counts(case: str, contestant: str, device: str) -> dict[str, float]:
    """Operations and dispatched calls, as a mean over a cycle that begins with the fifth step."""
    pyro.clear_param_store()
    step, cycle = made(case, contestant, device), CYCLE.get(contestant, 1)
    x, y = CASES[case].data(device, batch=4)
    for _ in range(4):
        step(x, y)
    with _Dispatched() as calls:
        for _ in range(cycle):
            step(x, y)
    with FlopCounterMode(display=False) as operations:
        for _ in range(cycle):
            step(x, y)
    return {"calls": calls.number / cycle, "operations": operations.get_total_flops() / cycle}


class _Dispatched(TorchDispatchMode):
    """Count what torch dispatches."""

    number = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.number += 1
        return function(*args, **(kwargs or {}))


def _memory(device: str, reset: bool = False, peak: bool = False) -> int:
    """Bytes that are held, or were at the peak since the last reset."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()
    if reset:
        Path("/proc/self/clear_refs").write_text("5")  # Linux
    entry = "VmHWM" if peak else "VmRSS"
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(entry)).split()[1])


if __name__ == "__main__":
    case, contestant, device, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    take_steps(case, contestant, device)
