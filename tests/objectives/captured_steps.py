# SPDX-License-Identifier: Apache-2.0
"""A small network trained with and without recorded steps."""

from collections import UserList
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.objectives import Captured

NUM_DATA = 27


class Net(pyro.nn.PyroModule):
    """A classifier with batch normalisation and dropout, which notes its runs where no recording looks."""

    def __init__(self, dtype: torch.dtype = torch.float32, prior_scale: Any = 1.0) -> None:
        super().__init__()
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.SiLU(), nn.Dropout(0.2), nn.Linear(6, 3))
        self.net = dvi.to_bayesian_(net.to(dtype), exclude="0.*", prior_scale=prior_scale)
        self.runs: UserList[int] = UserList()
        self.temperature = 1.0

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        self.runs.append(len(x))
        logits = self.net(x) / self.temperature
        with pyro.plate("data", NUM_DATA, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)


def batches(dtype: torch.dtype = torch.float32) -> list[tuple[Tensor, Tensor]]:
    """Minibatches, of which the last is shorter."""
    generator = torch.Generator().manual_seed(1)
    sizes = (8, 8, 8, 3)
    return [
        (torch.randn(m, 4, generator=generator).to(dtype), torch.randint(3, (m,), generator=generator))
        for m in sizes
    ]


@dataclass
class Training:
    """A model in training; ``svi.step`` and the like do the work."""

    model: Any
    guide: Any
    elbo: Any
    svi: Any
    losses: list[float] = field(default_factory=list)

    def state(self) -> dict[str, Tensor]:
        """Return what training moves."""
        named = {f"store {k}": v.detach() for k, v in pyro.get_param_store().named_parameters()}
        for role in ("model", "guide"):
            part = getattr(self, role)
            for name, value in part.state_dict().items() if isinstance(part, nn.Module) else ():
                if isinstance(value, Tensor):
                    named[f"{role} {name}"] = value
        return {name: value.clone() for name, value in named.items()} | {"random": torch.get_rng_state()}


def start(
    capture: bool,
    guide: Callable = dvi.MeanFieldGuide,
    elbo: Callable = dvi.TaylorELBO,
    optimizer: Any = None,
    *,
    model: Any = None,
    dtype: torch.dtype = torch.float32,
    after: int = 2,
) -> Training:
    """Begin a training, always from the same state."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    model = Net(dtype) if model is None else model()
    made, objective = guide(model), elbo()
    optimizer = dvi.optim.Adam({"lr": 0.01}) if optimizer is None else optimizer({"lr": 0.01})
    objective.prepare(made, optimizer)
    if capture:
        objective = Captured(objective, after=after)
    return Training(model, made, objective, SVI(model, made, optimizer, loss=objective))


def steps(training: Training, number: int, data: Any = None) -> None:
    """Take steps of SVI through the minibatches, again and again."""
    data = batches() if data is None else data
    for k in range(number):
        training.losses.append(training.svi.step(*data[k % len(data)]))


def assert_same(capture: Training, ordinary: Training) -> None:
    """Compare losses and states to the last bit."""
    assert capture.losses == ordinary.losses
    assert_same_states(capture.state(), ordinary.state())


def assert_same_states(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Compare states to the last bit."""
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def both(run: Callable[[Training], None], **options: Any) -> Training:
    """Run a training twice, compare, and return the one with recorded steps."""
    results = []
    for capture in (False, True):
        training = start(capture, **options)
        run(training)
        results.append((training, training.state()))
    (ordinary, expected), (captured, found) = results
    assert captured.losses == ordinary.losses
    assert_same_states(found, expected)
    return captured


def replays(training: Training) -> int:
    """Count steps without a run of the model, of all whose losses were noted."""
    return len(training.losses) - len(training.model.runs)
