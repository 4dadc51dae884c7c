# SPDX-License-Identifier: Apache-2.0
"""Who takes part in step_speed.py, and the process in which each takes its steps."""

import json
import resource
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro.infer import SVI, JitTrace_ELBO, Trace_ELBO
from pyro.infer.autoguide import AutoDelta, AutoNormal
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

import pyro_dvi as dvi
from benchmarks.shared.networks import lenet, mlp, resnet18_cifar
from benchmarks.shared.step_numpyro import numpyro_step
from pyro_dvi.bayesian import classifier, init_to_module
from pyro_dvi.optim import learning_rates

__all__ = ["BEFORE", "CASES", "PACKAGES", "WARM_UP", "contestants", "ordinary", "unit_of"]

NUM_DATA, LR = 50_000, 1e-4
WARM_UP = 12  # steps before the first turn; what is captured or compiled is so by then
IN_FIT = 8  # turns in an epoch of fit
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
    at_once: int  # processes beside the units' that fit into memory

    def data(self, device: str) -> tuple[Tensor, Tensor]:
        """One minibatch."""
        torch.manual_seed(0)
        x = torch.randn(self.batch, *self.shape, device=device)
        return x, torch.randint(10, (len(x),), device=device)


CASES = {
    "MLP 784-200-200-10, batch 128": Case(lambda: mlp((784, 200, 200, 10), nn.ReLU), (784,), 128, 30, 8, 9),
    "LeNet, batch 128": Case(lambda: lenet(activation=nn.ReLU), (1, 28, 28), 128, 15, 4, 9),
    "ResNet-18 with CIFAR stem, batch 32": Case(resnet18_cifar, (3, 32, 32), 32, 5, 1, 3),
}


def bare(net: nn.Module, **options: Any) -> Step:
    """A step in torch alone."""
    optimizer = torch.optim.Adam(net.parameters(), LR, **options)
    return steps_of(lambda x, y: cross_entropy(net(x), y), optimizer, nullcontext)


def bare_graph(net: nn.Module) -> Step:
    """A step in torch alone, captured as one CUDA graph with its optimizer."""
    optimizer = torch.optim.Adam(net.parameters(), LR, fused=True, capturable=True)
    captured: dict[str, Any] = {}

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        return loss

    def replay(x: Tensor, y: Tensor) -> object:
        if not captured:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step(x, y)
            torch.cuda.current_stream().wait_stream(stream)
            captured["graph"] = torch.cuda.CUDAGraph()
            with torch.cuda.graph(captured["graph"]):
                captured["loss"] = step(x, y)
        captured["graph"].replay()
        return captured["loss"].item()

    return replay


def steps_of(loss_of: Callable[[Tensor, Tensor], Tensor], optimizer: Any, around: Callable[[], Any]) -> Step:
    """A training loop in torch; the loss and its gradients are computed within a context."""

    def step(x: Tensor, y: Tensor) -> object:
        with around():
            optimizer.zero_grad()
            loss = loss_of(x, y)
            loss.backward()
        optimizer.step()
        return loss.item()

    return step


def training(net: nn.Module, guide_of: Callable, loss: Callable, optimizer: Callable) -> SVI:
    model = classifier(dvi.to_bayesian_(net, prior_scale=1.0), num_data=NUM_DATA)
    return SVI(model, guide_of(model), optimizer(), loss())


def svi(*parts: Callable) -> Callable[[nn.Module], Step]:
    """A step of SVI."""
    return lambda net: training(net, *parts).step


class InFit:
    """Steps inside ``fit``, whose losses are read once an epoch; an epoch begins when it is asked for."""

    def __init__(self, parts: tuple[Callable, ...], net: nn.Module) -> None:
        self._svi = training(net, *parts)

    def run(self, x: Tensor, y: Tensor, steps: int, turns: Iterator[Callable[[], object]]) -> None:
        """Take so many steps for each turn; its function is called at the end of the steps."""

        class Epochs:
            def __len__(self) -> int:
                return steps

            def __iter__(self) -> Iterator[Any]:
                end = next(turns, None)
                if end is None:
                    raise KeyboardInterrupt
                yield from [(x, y)] * steps
                if x.is_cuda:
                    torch.cuda.synchronize()
                end()

        dvi.fit(self._svi, Epochs(), 10**6, progress=False)


def delta(model: Any) -> Any:
    return AutoDelta(model, init_loc_fn=init_to_module)


def normal(model: Any) -> Any:
    return AutoNormal(model, init_loc_fn=init_to_module, init_scale=0.01)


def adam() -> Any:
    """Ours, which takes the fused kernel by itself."""
    return dvi.optim.Adam(learning_rates(LR))


def ivon_package(net: nn.Module) -> Step:
    """The authors' package."""
    from ivon import IVON

    optimizer = IVON(net.parameters(), lr=LR, ess=NUM_DATA, weight_decay=1 / NUM_DATA)
    return steps_of(
        lambda x, y: cross_entropy(net(x), y), optimizer, partial(optimizer.sampled_params, train=True)
    )


BEFORE, CAPTURED, FIT, JIT = ", before", ", captured", ", in fit", ", JitTrace_ELBO"
GRAPH = ", CUDA graph"
Makers = dict[str, Callable[[nn.Module], Any]]


def ours(name: str, guide_of: Callable, loss: Callable, optimizer: Callable = adam) -> Makers:
    """Our objectives: of another version of this library, as they come, captured, and inside ``fit``."""

    def captured() -> Any:
        return dvi.objectives.Captured(loss())

    losses = {BEFORE: loss, "": loss, CAPTURED: captured}
    made: Makers = {name + form: svi(guide_of, each, optimizer) for form, each in losses.items()}
    return {**made, name + FIT: partial(InFit, (guide_of, loss, optimizer))}


def natural(name: str) -> Makers:
    return ours(
        name,
        dvi.NaturalGradientGuide,
        lambda: dvi.NaturalGradientELBO(kl_weight=0.1),
        lambda: getattr(dvi.natural_gradients, name)({"lr": LR}),
    )


def pyros(guide_of: Callable) -> Makers:
    """Pyro's objectives with its own optimizer, and NumPyro's."""
    guide = {delta: "AutoDelta", normal: "AutoNormal"}[guide_of]
    losses = {"": Trace_ELBO, JIT: partial(JitTrace_ELBO, ignore_jit_warnings=True)}
    made = {
        f"Pyro, {guide}{form}": svi(guide_of, loss, lambda: pyro.optim.Adam(learning_rates(LR)))
        for form, loss in losses.items()
    }
    return {**made, f"NumPyro, {guide}": numpyro_step(guide, NUM_DATA, LR)}


UNIT, SMOOTH = "torch", "torch, softplus"
CONTESTANTS: Makers = {
    UNIT: partial(bare, fused=True),
    SMOOTH: partial(bare, fused=True),
    "torch, plain Adam": bare,
    UNIT + GRAPH: bare_graph,
    SMOOTH + GRAPH: bare_graph,
    **ours("MAP", delta, dvi.SampledELBO),
    **pyros(delta),
    **ours("sampled VI", dvi.MeanFieldGuide, dvi.SampledELBO),
    **pyros(normal),
    **ours("VL", dvi.MeanFieldGuide, dvi.TaylorELBO),
    **ours("MNVI", dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO),
    **ours("moments", dvi.MeanFieldGuide, dvi.MomentPropagationELBO),
    **natural("VOGN"),
    **natural("IVON"),
    "ivon-opt, IVON": ivon_package,
}
TWICE = ("VL", SMOOTH)  # on smooth networks
PACKAGES = {
    "NumPyro": "numpyro",
    "ivon-opt": "ivon",
}  # of other authors, by the beginning of a contestant's name


def unit_of(contestant: str) -> str:
    """The bare step on the same network."""
    return SMOOTH if contestant.startswith(TWICE) else UNIT


def ordinary(contestant: str) -> str:
    """The contestant that is neither captured nor traced; itself, if it is none of these."""
    for form in (CAPTURED, FIT, GRAPH, JIT):
        contestant = contestant.removesuffix(form)
    return contestant


def contestants(case: str, device: str, before: bool) -> list[str]:
    """Those that take part."""
    absent = tuple(name for name, package in PACKAGES.items() if find_spec(package) is None)
    if "ResNet" in case:  # written for sequential networks
        absent += ("NumPyro",)
    forms = (*(() if before else (BEFORE,)), *(() if device == "cuda" else (GRAPH,)))
    return [name for name in CONTESTANTS if not name.startswith(absent) and not name.endswith(forms)]


def made(case: str, contestant: str, device: str) -> Step:
    torch.manual_seed(0)
    net = CASES[case].make().to(device)
    if contestant.startswith(TWICE):
        dvi.bayesian.smooth_activations_(net)
    return CONTESTANTS[contestant](net)


# A contestant's process ------------------------------------------------------------------------------------------


def take_steps(case: str, contestant: str, device: str) -> None:
    """Report the first steps, then take and time a turn for each line that comes in."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("error", "training steps are not captured")  # and are no captured ones
    # What is measured begins with the network. The first optimizer of torch imports its compiler's front end.
    for package in ["torch._dynamo", *(PACKAGES[name] for name in PACKAGES if contestant.startswith(name))]:
        import_module(package)
    x, y = CASES[case].data(device)
    held = _memory(device, reset=True)
    start = _seconds(device)
    step, turn = made(case, contestant, device), CASES[case].turn

    def tell(first_steps: int, calls: int | None) -> None:
        found = {
            "first_seconds": _seconds(device) - start,
            "first_steps": first_steps,
            "mebibytes": (_memory(device, peak=True) - held) / 2**20,
            "calls": calls,
        }
        print(json.dumps(found), flush=True)

    def turns(steps: int) -> Iterator[Callable[[], None]]:
        yield lambda: tell(steps, None)  # the first epochs, in which steps are captured
        for _ in sys.stdin:
            began = _seconds(device)
            yield lambda began=began: print((_seconds(device) - began) / steps, flush=True)  # type: ignore[misc]

    if isinstance(step, InFit):
        step.run(x, y, IN_FIT * turn, turns(IN_FIT * turn))
        return
    for _ in range(WARM_UP):
        step(x, y)  # ends with the loss as a number, which waits for the device
    tell(WARM_UP, _calls(contestant, lambda: step(x, y)))
    for _ in sys.stdin:
        began = _seconds(device)
        for _ in range(turn):
            step(x, y)
        print((_seconds(device) - began) / turn, flush=True)


def _seconds(device: str) -> float:
    """Time of the processor, that of a compiler's processes included; on a GPU, time."""
    if device == "cuda":
        return time.perf_counter()
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _calls(contestant: str, step: Callable[[], object]) -> int | None:
    """Operators that torch dispatches in a step; None where a graph or a compiler launches them together."""
    if contestant.endswith(GRAPH) or contestant.startswith("NumPyro"):
        return None
    numbers = []
    for _ in range(
        2
    ):  # one of which may be compared with an ordinary step, as captured ones are now and then
        with _Dispatched() as calls:
            step()
        numbers.append(calls.number)
    return min(numbers)


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
    torch.set_num_threads(1)
    take_steps(*sys.argv[1:])
