# SPDX-License-Identifier: Apache-2.0
"""Steps at moved parameters, in the process that moved them or in a process that has taken no step.

``python -m tests.whole_package.fresh_process FILE THREADS`` reads cells with their parameters from the file, and
replaces them by their losses, gradients and predictions.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from typing import Any

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn

import pyro_dvi as dvi
from pyro_dvi.objectives import Captured
from tests.whole_package import methods

METHODS = methods.METHODS | {
    "MAP": lambda model: SVI(model, AutoDelta(model), pyro.optim.Adam({"lr": 0.01}), dvi.SampledELBO())
}
NUM_DATA, STEPS = 12, 3
REGIMES = (
    "float32",
    "float64",
    "bfloat16 in one context",
    "bfloat16 in each step",
    "captured",
    "captured bfloat16",
)
Cell = tuple[str, str, str]  # method, network, regime


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.TransformerEncoderLayer(4, 2, 6, 0.0, nn.Softplus(), batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x.flatten(1).view(-1, 4, 4)).flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.read, self.head = nn.GRU(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.read(x.flatten(1).view(-1, 4, 4))[0][:, -1])


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = (
            nn.Sequential(nn.Linear(16, 8), nn.Softplus(), nn.Linear(8, 16)),
            nn.Linear(16, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.head(nn.functional.softplus(x + self.inner(x)))


def convolutions() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.Softplus(), nn.Flatten(), nn.Linear(12, 3))


def dense(width: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.Softplus(), nn.Linear(width, 3))


# Networks, and the weights that stay ordinary trained parameters, of which autocast keeps copies.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "dense, head not Bayesian": (lambda: dense(8), ["3.*"]),
    "convolution and batch norm": (convolutions, []),
    "attention, encoder not Bayesian": (Attention, ["encode.*"]),
    "recurrent, cell not Bayesian": (Recurrent, ["read.*"]),
    "residual, branch not Bayesian": (Residual, ["inner.*"]),
    "wide": (lambda: dense(256), []),
}


def batch(k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(k)
    return torch.randn(NUM_DATA, 1, 4, 4, generator=generator, dtype=dtype), torch.arange(NUM_DATA) % 3


@contextmanager
def trained_as(cell: Cell) -> Iterator[tuple[Any, Callable[[], Any], torch.dtype]]:
    """Yield an untrained SVI, and a context for each of its steps."""
    method, network, regime = cell
    dtype = torch.float64 if regime == "float64" else torch.float32
    pyro.clear_param_store()
    torch.manual_seed(0)
    make, exclude = NETWORKS[network]
    svi = METHODS[method](
        dvi.classifier(dvi.to_bayesian_(make(), exclude=exclude), num_data=NUM_DATA).to(dtype)
    )
    if regime.startswith("captured"):
        objective = Captured(svi.loss_and_grads.__self__, after=1)
        svi = type(svi)(svi.model, svi.guide, svi.optim, loss=objective)
    autocast = lambda: torch.autocast("cpu", torch.bfloat16, enabled="bfloat16" in regime)  # noqa: E731
    with nullcontext() if regime == "bfloat16 in each step" else autocast():
        yield svi, autocast if regime == "bfloat16 in each step" else nullcontext, dtype


def results(svi: Any, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return loss, gradients and probabilities."""
    for p in svi.guide.parameters():
        p.grad = None
    torch.manual_seed(1)
    found = {"loss": torch.as_tensor(svi.loss_and_grads(svi.model, svi.guide, *batch(0, dtype)))}
    for module in (svi.model, svi.guide):
        found |= {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    found["probabilities"] = dvi.predict(svi.model, svi.guide, batch(1, dtype), seed=0).probabilities
    return found


def moved(cell: Cell) -> tuple[dict[str, Tensor], Any]:
    """Train a little; return the results at the end, and the parameters."""
    with trained_as(cell) as (svi, each, dtype):
        for k in range(STEPS):
            with each():
                svi.step(*batch(k, dtype))
        state = [
            deepcopy(part) for part in (svi.model.state_dict(), svi.guide.state_dict(), svi.optim.get_state())
        ]
        with each():
            return results(svi, dtype), state


def fresh(cell: Cell, state: Any) -> dict[str, Tensor]:
    """Return the results of the first step of a process at the given parameters."""
    with trained_as(cell) as (svi, each, dtype):
        getattr(svi.guide, "initialize", svi.guide)(*batch(0, dtype))
        svi.model.load_state_dict(state[0])
        svi.guide.load_state_dict(state[1])
        svi.optim.set_state(state[2])
        if hasattr(svi.guide, "natural_step"):
            svi.loss_and_grads.__self__.prepare(svi.guide, svi.optim)
        with each():
            return results(svi, dtype)


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[2]))
    cells = torch.load(sys.argv[1], weights_only=False)
    torch.save([fresh(*cell) for cell in cells], sys.argv[1])
