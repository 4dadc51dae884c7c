# SPDX-License-Identifier: Apache-2.0
"""Train odd models twice from the same seed, as they are and captured, and compare everything that is left."""

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoDiagonalNormal
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi import natural_gradients as ng
from pyro_dvi.bayesian import init_to_module
from pyro_dvi.curvature import EmpiricalFisher, Fisher, GGNDiagonal
from pyro_dvi.objectives import Captured, SampledELBO
from pyro_dvi.objectives.recordings import Recording

NUM_DATA = 60
CAPTURED, READS = "captured", "Python reads a value"


def _mode(model: Callable) -> Any:
    return AutoDelta(model, init_loc_fn=init_to_module)


OBJECTIVES: dict[str, tuple[Callable, Callable, Callable]] = {
    "taylor": (dvi.MeanFieldGuide, dvi.TaylorELBO, dvi.optim.Adam),
    "ggn": (dvi.MeanFieldGuide, lambda: dvi.TaylorELBO(curvature=GGNDiagonal()), dvi.optim.Adam),
    "empirical": (dvi.MeanFieldGuide, lambda: dvi.TaylorELBO(curvature=EmpiricalFisher()), dvi.optim.Adam),
    "every": (dvi.MeanFieldGuide, lambda: dvi.TaylorELBO(curvature=Fisher(every=3)), dvi.optim.Adam),
    "sampled": (dvi.MeanFieldGuide, lambda: SampledELBO(num_particles=2), dvi.optim.Adam),
    "diagonal": (AutoDiagonalNormal, SampledELBO, dvi.optim.Adam),
    "map": (_mode, SampledELBO, dvi.optim.Adam),
    "vogn": (dvi.NaturalGradientGuide, lambda: dvi.NaturalGradientELBO(kl_weight=0.1), ng.VOGN),
    "ivon": (dvi.NaturalGradientGuide, lambda: dvi.NaturalGradientELBO(kl_weight=0.1), ng.IVON),
    "moments": (dvi.MeanFieldGuide, dvi.MomentPropagationELBO, dvi.optim.Adam),
}


@dataclass
class Odd:
    """A model with its data, and what its author does in the loop.

    Attributes:
        model: for Pyro.
        batches: arguments of a step; a dictionary gives them by name.
        net: with the buffers to compare; by default the model.
        between: called after each step with its number, the objective and the loss.
        left: returns more state to compare.
        guide: made in place of the objective's.
        optimizer: in place of the objective's.
        steps: to take, if more than others.
        step: in place of ``SVI.step``; gets the SVI and the objective, too.
    """

    model: Callable
    batches: list[Any]
    net: Any = None
    between: Callable[[int, Any, float], None] | None = None
    left: Callable[[], Any] = tuple
    guide: Callable | None = None
    optimizer: Any = None
    steps: int = 0
    step: Callable[..., float] | None = None


@dataclass
class Case:
    """An entry of the table.

    Attributes:
        make: builds it, after seeding.
        expected: CAPTURED, UNSEEN, or part of the reason for which steps stay ordinary.
        objectives: to train it with.
    """

    name: str
    make: Callable[[], Odd]
    expected: str
    objectives: tuple[str, ...]
    otherwise: dict[str, str] = field(default_factory=dict)


TABLE: dict[str, Case] = {}


def odd(expected: str = CAPTURED, objectives: str = "taylor", **otherwise: str) -> Callable:
    """Enter a model into the table; the expectation may be another for some objective."""

    def enter(make: Callable[[], Odd]) -> Callable[[], Odd]:
        TABLE[make.__name__] = Case(make.__name__, make, expected, tuple(objectives.split()), otherwise)
        return make

    return enter


@dataclass
class Trained:
    """All that a training leaves."""

    losses: list[float]
    state: list[Any]
    elbo: Any
    warned: list[str]


def train(case: Case, objective: str, capture: bool, steps: int = 34, alone: int = 0) -> Trained:
    """Train from a fixed seed; ``alone`` steps on the first batch only, before the others take turns."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    make_guide, make_elbo, make_optimizer = OBJECTIVES[objective]
    # Whether a replay is faster depends on what else the machine does.
    with (
        patch.object(Recording, "is_slower", lambda _: False),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        one = case.make()
        guide = (one.guide or make_guide)(one.model)
        elbo: Any = make_elbo()
        if capture:
            elbo = Captured(elbo)
        optimizer = one.optimizer or make_optimizer({"lr": 0.01})
        svi = SVI(one.model, guide, optimizer, loss=elbo)
        losses = []
        for k in range(max(steps, one.steps)):
            batch = one.batches[0 if k < alone else k % len(one.batches)]
            if callable(batch):
                batch = batch(k)
            args, kwargs = ((), batch) if isinstance(batch, dict) else (batch, {})
            losses.append(one.step(svi, elbo, *args, **kwargs) if one.step else svi.step(*args, **kwargs))
            if one.between is not None:
                one.between(k, elbo, losses[-1])
    net = one.model if one.net is None else one.net
    owners = [part for part in (net, guide) if isinstance(part, nn.Module)]
    state: list[Any] = [dict(pyro.get_param_store()._params)]
    state += [dict(owner.named_buffers()) | dict(owner.named_parameters()) for owner in owners]
    state += [torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), one.left()]
    state += [{name: term for name, term in elbo.terms.items()}, elbo.step]
    said = [str(w.message) for w in caught if "not captured" in str(w.message)]
    return Trained(losses, state, elbo, said)


def same(one: Any, other: Any) -> bool:
    """Return whether two results are equal to the last bit."""
    if isinstance(one, Tensor):
        return (
            isinstance(other, Tensor)
            and one.shape == other.shape
            and torch.equal(one.detach().to_dense(), other.detach().to_dense())
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def verdict(plain: Trained, captured: Trained) -> str:
    """Say what became of a model that was trained twice."""
    if plain.losses != captured.losses:
        step = next(k for k, (a, b) in enumerate(zip(plain.losses, captured.losses, strict=True)) if a != b)
        return f"WRONG: losses from step {step}"
    for k, (a, b) in enumerate(zip(plain.state, captured.state, strict=True)):
        if not same(a, b):
            what = [name for name in a if not same(a[name], b.get(name))] if isinstance(a, dict) else ""
            return f"WRONG: state {k} {what}"
    if captured.elbo._given_up and len(captured.warned) == 1:
        return captured.warned[0].partition("taken instead: ")[2]
    if captured.warned:
        return f"WRONG: warnings {captured.warned}"
    replays = sum(r.uses for r in captured.elbo._recordings)
    return f"{CAPTURED}" if replays > 8 else f"SILENT: {replays} replays, failures {captured.elbo._failures}"


# What the models are made of ---------------------------------------------------------------------------------------


def rows(*shape: int, count: int = 4, classes: int = 3, size: int = 8, target: str = "label") -> list[Any]:
    """Return batches of inputs and labels or numbers."""
    made = torch.Generator().manual_seed(3)
    batches = []
    for _ in range(count):
        x = torch.randn(size, *shape, generator=made)
        label = torch.randint(classes, (size,), generator=made)
        batches.append((x, label if target == "label" else torch.randn(size, generator=made)))
    return batches


class Labels(pyro.nn.PyroModule):
    """A network of labels."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Any, y: Tensor | None = None, **others: Any) -> Tensor:
        logits = self.net(x, **others)
        with pyro.plate("data", NUM_DATA, subsample_size=len(logits)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)


def labels(net: nn.Module, *shape: int, bayesian: Any = None, batches: Any = None, **others: Any) -> Odd:
    """Return a Bayesian network of labels."""
    dvi.to_bayesian_(net if bayesian is None else bayesian)
    return Odd(Labels(net), batches or rows(*(shape or (4,))), **others)


def mlp(*inside: nn.Module, width: int = 6) -> nn.Sequential:
    """Return a small network."""
    return nn.Sequential(nn.Linear(4, width), *inside, nn.SiLU(), nn.Linear(width, 3))


class Calls(nn.Module):
    """A network that calls a function of its input and itself, with whatever else it keeps."""

    calls: Any
    log: Any
    mean: Any
    made: Any
    factor: Any
    factors: Any
    act: Any
    inner: Any

    def __init__(self, function: Callable, width: int = 4, out: int = 3) -> None:
        super().__init__()
        self.function = function
        self.first, self.last = nn.Linear(4, width), nn.Linear(width, out)

    def forward(self, x: Tensor, **others: Any) -> Tensor:
        return self.last(self.function(self, x, **others))
