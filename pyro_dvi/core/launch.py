# SPDX-License-Identifier: Apache-2.0
"""Functions with arguments and results at fixed addresses, which CUDA runs with a single launch.

For small networks, a GPU spends more time waiting for the launch of each operator than computing. A CUDA graph stores
all launches of a step together with the addresses that they read and write. Arguments that change must therefore be
copied to fixed buffers, and each launch overwrites the results of the last one.

Everything but the capture itself works on any device: :class:`Launch` separates what runs on the host, keeps the
buffers, and returns the same result tensors each time. :class:`FixedCall` captures a function of no arguments on CUDA
and calls it elsewhere.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pyro_dvi.core.graph_passes import called_quickly, has_effect
from pyro_dvi.core.undisturbed import accelerators, forked
from pyro_dvi.errors import UnsupportedError

Run = Callable[..., Sequence[Tensor]]
LAUNCHING = {"cuda"}  # types of devices on which recorded operators are launched together
_captures = {"failed": 0}  # captures that have failed since the start of the process


class FixedCall:
    """A function of no arguments that reads and writes tensors at fixed addresses, captured as a CUDA graph.

    On other devices, each call runs the function and copies its results to those of the first call, so that programs
    see what they would see on CUDA.

    Args:
        function: returns a list of tensors; it must not read values on the host.
        rehearse: runs the same operators on other memory, which initialises libraries; its results are discarded.
        device: the device of all tensors.
        pool: memory pool of the captured graph, shared with other graphs that never run at the same time.

    Attributes:
        results: the results, overwritten by each call.

    Raises:
        UnsupportedError: if an operator cannot be captured, for example because it waits for the device.
    """

    def __init__(
        self,
        function: Callable[[], list[Tensor]],
        rehearse: Callable[[], list[Tensor]],
        device: torch.device,
        pool: Any = None,
    ) -> None:
        self._function, self._epoch, self._graph = function, _captures["failed"], None
        if device.type == "cuda":
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.device(device):
                self.results = _captured(self._graph, function, rehearse, device, pool)
        else:
            self.results = rehearse()

    @property
    def is_valid(self) -> bool:
        """False if a later capture has failed, after which CUDA's generator is another one."""
        return self._epoch == _captures["failed"]

    def __call__(self) -> list[Tensor]:
        """Run the function, and return the results."""
        if self._graph is not None:
            self._graph.replay()
        else:
            for kept, result in zip(self.results, self._function(), strict=True):
                if kept is not result:
                    kept.copy_(result)
        return self.results


def _captured(
    graph: torch.cuda.CUDAGraph,
    function: Callable[[], list[Tensor]],
    rehearse: Callable[[], list[Tensor]],
    device: torch.device,
    pool: Any,
) -> list[Tensor]:
    stream, mode = torch.cuda.Stream(device), torch.cuda.get_sync_debug_mode()
    stream.wait_stream(torch.cuda.current_stream(device))
    try:
        with torch.cuda.stream(stream):
            rehearse()
            with warnings.catch_warnings():  # about a prototype
                warnings.simplefilter("ignore")
                torch.cuda.set_sync_debug_mode(
                    "error"
                )  # operators that wait for the device cannot be captured
            rehearse()
    except RuntimeError as error:
        raise UnsupportedError(f"an operator waits for the device: {error}") from error
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    torch.cuda.current_stream(device).wait_stream(stream)
    generator = torch.cuda.default_generators[device.index]
    state = generator.get_state()
    try:
        # Other threads, such as those of a loader that pins memory, may call CUDA meanwhile.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            return function()
    except Exception as error:
        # CUDA's generator would refuse to draw from now on, and graphs captured before would refuse to run.
        _captures["failed"] += 1
        fresh = torch.Generator(device)
        fresh.set_state(state)
        generator.graphsafe_set_state(fresh)
        raise UnsupportedError(f"operators cannot be captured as a CUDA graph: {error}") from error


class Launch:
    """A graph of operators on one device, with results at fixed addresses.

    Operators on the CPU, such as random numbers that are drawn there, run before each launch, and their results are
    copied to the device.

    Args:
        operators: a module from :class:`~pyro_dvi.core.recorder.Recorder`.
        inputs: its inputs.
        fed: positions of inputs that differ from launch to launch; they are copied to buffers. All other inputs are
            read, and perhaps written, where they are.
        written: positions of the inputs to which the operators write.
        device: the device of the results.
        pool: as for :class:`FixedCall`.

    Raises:
        UnsupportedError: if an operator cannot be part of a launch.
    """

    def __init__(
        self,
        operators: fx.GraphModule,
        inputs: Sequence[Tensor],
        fed: Sequence[int],
        written: set[int],
        device: torch.device,
        pool: Any = None,
    ) -> None:
        self._fixed = [k for k in range(len(inputs)) if k not in set(fed)]
        self._addresses = self._addresses_of(inputs)
        self._fed = {k: inputs[k].clone() for k in fed if inputs[k].device == device}
        on_host, on_device, once = _parts(operators, device)
        arguments = [self._fed.get(k, value) for k, value in enumerate(inputs)]

        def apart(values: Sequence[Tensor]) -> list[Tensor]:
            return [value.clone() if k in written else value for k, value in enumerate(values)]

        with forked(*accelerators()):
            values = [value.to(device) for value in on_host(*apart(inputs))]
            self._call = FixedCall(
                lambda: list(on_device(*arguments, *values)),
                lambda: list(on_device(*apart(arguments), *values)),
                device,
                pool,
            )
        self._received = [value for value, constant in zip(values, once, strict=True) if not constant]
        self._on_host = _without(on_host, once)
        self.results = self._call.results

    def _addresses_of(self, inputs: Sequence[Tensor]) -> list[int]:
        return [inputs[k].data_ptr() for k in self._fixed]

    def fits(self, inputs: Sequence[Tensor]) -> bool:
        """Return True if all inputs that are not fed are still where they were."""
        return self._call.is_valid and self._addresses_of(inputs) == self._addresses

    def __call__(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the operators, and return the results, which the next launch overwrites."""
        for k, buffer in self._fed.items():
            buffer.copy_(inputs[k], non_blocking=True)
        if self._on_host is not None:
            for buffer, value in zip(self._received, self._on_host(*inputs), strict=True):
                buffer.copy_(value, non_blocking=True)
        return self._call()


def _parts(operators: fx.GraphModule, device: torch.device) -> tuple[fx.GraphModule, Run, list[bool]]:
    """Separate the operators on the host, whose results the others take as further arguments.

    Returns:
        The operators on the host, those on the device, and for each result of the former whether it is constant.
    """
    if device.type == "cpu":  # nothing to separate
        none = fx.Graph()
        for node in operators.graph.find_nodes(op="placeholder"):
            none.placeholder(node.name)
        none.output([])
        return fx.GraphModule({}, none), called_quickly(operators), []
    host, main = fx.Graph(), fx.Graph()
    in_host: dict[fx.Node, fx.Node] = {}
    in_main: dict[fx.Node, fx.Node] = {}
    passed: dict[fx.Node, None] = {}
    varying: set[fx.Node] = set()

    def received(node: fx.Node) -> fx.Node:
        if node not in in_main:
            last = next(iter(reversed(main.find_nodes(op="placeholder"))))
            with main.inserting_after(last):
                in_main[node] = main.placeholder(f"from_host_{len(passed)}")
            passed[node] = None
        return in_main[node]

    def of_host(node: fx.Node) -> fx.Node:
        if node not in in_host:
            raise UnsupportedError("an operator on the CPU reads values of the device")
        return in_host[node]

    for node in operators.graph.nodes:
        if node.op == "placeholder":
            copy, other = host.node_copy(node), main.node_copy(node)
            if node.meta["on_host"]:
                in_host[node] = copy
                varying.add(node)
            else:
                in_main[node] = other
        elif node.op == "output":
            if any(given.meta["on_host"] for given in node.all_input_nodes):
                raise UnsupportedError("a result is on the CPU")
            main.node_copy(node, received)
        elif node.meta["on_host"]:
            in_host[node] = host.node_copy(node, of_host)
            if has_effect(node) or not varying.isdisjoint(node.all_input_nodes):
                varying.add(node)
        else:
            in_main[node] = main.node_copy(node, received)
    host.output([in_host[node] for node in passed])
    on_device = called_quickly(fx.GraphModule(operators, main))
    return fx.GraphModule(operators, host), on_device, [node not in varying for node in passed]


def _without(on_host: fx.GraphModule, constant: list[bool]) -> Run | None:
    """Return the operators on the host that have to run before each launch; None if there are none."""
    graph = fx.Graph()
    results: Any = graph.graph_copy(on_host.graph, {})
    graph.output([result for result, fixed in zip(results, constant, strict=True) if not fixed])
    graph.eliminate_dead_code(has_effect)
    runs = any(node.op == "call_function" for node in graph.nodes) or not all(constant)
    return called_quickly(fx.GraphModule(on_host, graph)) if runs else None
