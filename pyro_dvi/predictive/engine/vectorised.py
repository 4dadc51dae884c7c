# SPDX-License-Identifier: Apache-2.0
"""Run a model with many draws at a time: the same results as a loop over the draws, in less time.

With the first draw, the model runs with all checks. For the other draws, only the statistics that a reader asks for are
computed, which saves time in two ways:

- a run ends at the sites that are read, and neither records nor draws anything there;
- one run computes a chunk of draws with ``torch.vmap``, if the model allows it.

Convolutions with drawn kernels do not use ``vmap`` on a CPU: it turns them into one convolution with many groups, which
a CPU computes more slowly than one kernel after the other.

The model runs in a plain loop if it draws random numbers, stores values in its modules, branches on values, or returns
infinite results or invalid distributions; errors in the plain loop name the mistake. The first two cases are detected
by running the model with the first draw once more.
"""

import pickle
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import pyro
import torch
from torch import Tensor, distributions as td, nn
from torch.distributions import constraints
from torch.utils._pytree import tree_leaves

from pyro_dvi.core.recorder import Watch
from pyro_dvi.core.undisturbed import modules_met, state_of
from pyro_dvi.predictive.engine.model_runs import Latents

_UNCHECKED = (constraints.real, constraints.real_vector, constraints.positive_definite)


def possible(fn: Any) -> Tensor:
    """Return a tensor that is True if the parameters of a distribution are in their domains; works inside ``vmap``.

    Two cases are detected elsewhere: NaN by the caller, and matrices that are not positive definite by the Cholesky
    factorisation.
    """
    found = torch.ones((), dtype=torch.bool)
    if isinstance(fn, td.Uniform):
        found = (fn.low < fn.high).all()
    for name, constraint in getattr(fn, "arg_constraints", {}).items():
        value, is_dependent = vars(fn).get(name), constraints.is_dependent(constraint)
        if isinstance(value, Tensor) and not is_dependent and constraint not in _UNCHECKED:
            found = found & constraint.check(value).all()
    for name in ("base_dist", "component_distribution", "mixture_distribution"):
        if (inner := getattr(fn, name, None)) is not None:
            found = found & possible(inner)
    return found


class _Largest(Watch):
    """Records the number of elements of the largest tensor that is computed inside the context."""

    size = 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):  # an expanded view stores fewer elements than its shape suggests
                held = leaf.untyped_storage().nbytes() // leaf.element_size()
                self.size = max(self.size, min(held, leaf.numel()))
        return result


def agrees(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    """Return True if statistics are equal up to rounding."""
    for name, value in expected.items():
        if not value.is_floating_point():
            continue
        tolerance = 10 * torch.finfo(value.dtype).eps ** 0.5
        size = float(value.nan_to_num(0, 0, 0).abs().max()) if value.numel() else 0.0
        if not torch.allclose(found[name], value, rtol=tolerance, atol=tolerance * size, equal_nan=True):
            return False
    return True


def _state(module: nn.Module) -> list[Any]:
    """Return everything that a module stores directly, and how often each tensor was changed in place."""
    leaves = tree_leaves(vars(module))
    return leaves + [x._version for x in leaves if isinstance(x, Tensor) and not x.is_inference()]


def _same(first: list[Any], second: list[Any]) -> bool:
    # Objects are compared by identity, because comparing tensors with == does not give a single truth value.
    return len(first) == len(second) and all(
        a is b or (isinstance(a, (int, float, str)) and type(a) is type(b) and a == b)
        for a, b in zip(first, second, strict=True)
    )


def _generators(device: torch.device) -> tuple[Any, ...]:
    return state_of(device)[0]().numpy().tobytes(), pickle.dumps(np.random.get_state()), random.getstate()


Read = Callable[[Latents], dict[str, Tensor]]
Way = Callable[[Read, Sequence[Latents]], dict[str, Tensor]]

MAX_CHUNK = 64  # draws that share one run
# Elements of the largest tensor of a vectorised run: 16 MiB of float32, which fit into caches.
CHUNK_OUTPUT = 2**22
CHUNK_LATENTS = 2**24  # elements of the draws of a chunk
# An entry of the statistics: True if the parameters of the distribution are in their domains.
POSSIBLE = "possible"


class ManyDraws:
    """Chooses, at the first draw, the fastest way to run a model with many draws, and runs it that way."""

    def __init__(self) -> None:
        self._way: Way | None = None  # None: the plain loop
        self._chunk = 0  # number of draws per run; 0: not chosen yet
        # The first draw and the tensors read for it, which the first chunk must reproduce.
        self._untried: tuple[Latents, dict[str, Tensor]] | None = None

    @property
    def is_plain(self) -> bool:
        """True if it is already known that the model needs the plain loop."""
        return self._chunk > 0 and self._way is None

    def chunks(
        self, first: Latents, draws: Iterator[Latents], read: Read
    ) -> Iterator[tuple[Sequence[Latents], dict[str, Tensor] | None]]:
        """Yield the draws in chunks, together with the tensors that are read for them.

        Args:
            first: a draw with which the model has already been run; a second run with it decides how the others run.
            draws: the other draws.
            read: runs the model with the latent values of a draw and returns tensors, possibly with an entry
                ``POSSIBLE``. It checks nothing, so that ``vmap`` can run it.

        Returns:
            Pairs of a chunk of draws and its tensors, which are stacked along the first dimension. If the plain loop
            must compute the tensors, None stands in their place.
        """
        if self._chunk == 0:
            self._choose(first, read)
        while chunk := list(islice(draws, self._chunk)):
            yield chunk, None if self._way is None else self._found(chunk, read)

    def run(self, draws: Sequence[Latents], read: Read) -> dict[str, Tensor]:
        """Return the tensors for all draws at once, without checks; call it only after :meth:`chunks` has run."""
        assert self._way is not None, "chunks() has not run"
        return self._way(read, draws)

    def _choose(self, first: Latents, read: Read) -> None:
        """Run the model with the first draw once more, and choose how to run it with the others."""
        self._chunk = 1
        device = next((value.device for value in first.values()), torch.device("cpu"))
        seen: dict[int, tuple[nn.Module, list[Any]]] = {}

        def look(module: nn.Module) -> None:
            for inner in module.modules():
                if id(inner) not in seen:
                    seen[id(inner)] = (inner, _state(inner))

        generators = _generators(device)
        try:
            with modules_met(look), _Largest() as largest:
                plain = _one_by_one(read, [first])
        except Exception:  # any error that the model raises
            return
        keeps = any(not _same(_state(module), before) for module, before in seen.values())
        if keeps or _generators(device) != generators:
            return  # plain loop: the model stores values in a module or draws random numbers
        fitting = min(CHUNK_OUTPUT // largest.size, CHUNK_LATENTS // max(1, size_of(first)))
        self._chunk = min(MAX_CHUNK, max(1, fitting))
        has_kernels = device.type == "cpu" and any(value.dim() >= 3 for value in first.values())
        if has_kernels or self._chunk == 1:
            self._way = _one_by_one
        else:
            self._way, self._untried = _vmapped, (first, plain)

    def _found(self, chunk: Sequence[Latents], read: Read) -> dict[str, Tensor] | None:
        """Return the tensors for a chunk, or None if the plain loop must compute them."""
        try:
            found = self._tried(chunk, read) if self._untried else self.run(chunk, read)
        except Exception:  # any error that the model raises when its tensors are batched
            if self._way is not _vmapped:
                return None  # the plain loop raises the error again, for the right draw and after its checks
            self._way, self._untried = _one_by_one, None
            return self._found(chunk, read)
        fine = found.pop(POSSIBLE, torch.ones((), dtype=torch.bool)).all()
        for value in found.values():
            fine = fine & value.isfinite().all()
        return found if fine else None

    def _tried(self, chunk: Sequence[Latents], read: Read) -> dict[str, Tensor]:
        """Run the first chunk together with the first draw, and check the results of the first draw.

        Raises:
            RuntimeError: if they differ from the results of a run with the first draw alone. The draws of a chunk then
                share something that each draw should have for itself, such as random numbers.
        """
        assert self._untried is not None
        (first, plain), self._untried = self._untried, None
        found = _vmapped(read, [first, *chunk])
        if not agrees({name: value[:1] for name, value in found.items()}, plain):
            raise RuntimeError
        return {name: value[1:] for name, value in found.items()}


def size_of(latents: Latents) -> int:
    """Return the number of elements of a draw."""
    return sum(value.numel() for value in latents.values())


def _vmapped(read: Read, chunk: Sequence[Latents]) -> dict[str, Tensor]:
    """Run the model once for all draws of a chunk."""
    stacked = {name: torch.stack([latents[name] for latents in chunk]) for name in chunk[0]}
    with pyro.validation_enabled(False), warnings.catch_warnings():  # values cannot be read inside vmap
        warnings.filterwarnings("error", message="There is a performance drop")
        return torch.vmap(read, randomness="error")(stacked)


def _one_by_one(read: Read, chunk: Sequence[Latents]) -> dict[str, Tensor]:
    """Run the model once for each draw of a chunk."""
    with pyro.validation_enabled(False):
        found = [read(latents) for latents in chunk]
    return {name: torch.stack([one[name] for one in found]) for name in found[0]}
