# SPDX-License-Identifier: Apache-2.0
"""How good are the defaults: each method untouched, beside a plain torch loop at two step sizes.

Networks are trained for 40 epochs in batches of 64. The plain loop has neither weight decay nor a schedule; its
regressions get the noise of the training residuals. Our methods get the network and the loader, and nothing else.
"""

import math
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import mean

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.laplace.first_call import REGRESSIONS, Pair, data, network
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import provenance, table
from pyro_dvi.errors import DviWarning

EPOCHS, BATCH_SIZE, SEEDS, STEP_SIZES = 40, 64, 3, (1e-3, 1e-2)
TASKS = (
    "wine", "cancer", "digits", "digits, conv", "diabetes", "boston", "MNIST, 500", "moons", "tokens",
)  # fmt: skip
METHODS: dict[str, Callable[[], dvi.methods.Method]] = {
    "MAP": dvi.MAP,
    "VL": dvi.VariationalLaplace,
    "MNVI": dvi.MomentPropagation,
    "VOGN": dvi.NaturalGradients,
    "IVON": partial(dvi.NaturalGradients, by=dvi.IVON),
    "noisy K-FAC": partial(dvi.NaturalGradients, by=dvi.NoisyKFAC),
}
COLUMNS = (*(f"torch, {lr:g}" for lr in STEP_SIZES), *METHODS)


class Transformer(nn.Module):
    """One layer of attention over twelve tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 16)
        self.positions = nn.Parameter(0.1 * torch.randn(12, 16))
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.classes = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits."""
        logits: Tensor = self.classes(self.encoder(self.embedding(x) + self.positions).mean(1))
        return logits


def tokens(seed: int) -> tuple[Pair, Pair]:
    """Sequences of tokens, and whether token 3 occurs more often than token 5."""
    x = torch.randint(0, 8, (1600, 12), generator=torch.Generator().manual_seed(seed))
    y = ((x == 3).sum(1) > (x == 5).sum(1)).long()
    return (x[:1200], y[:1200]), (x[1200:], y[1200:])


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Each task, method and seed."""
    return [{"task": t, "method": m, "seed": s} for t in TASKS for m in COLUMNS for s in range(SEEDS)]


def run(settings: Settings, data_dir: str | None) -> Row:
    """The mean negative log density of the test data."""
    warnings.simplefilter("ignore", DviWarning)
    task, seed = settings["task"], settings["seed"]
    (x, y), test = tokens(seed) if task == "tokens" else data(task, seed, data_dir)
    torch.manual_seed(seed)
    net = Transformer() if task == "tokens" else network(task, x, y)
    loader = DataLoader(TensorDataset(x, y), BATCH_SIZE, shuffle=True, drop_last=len(x) % BATCH_SIZE == 1)
    if settings["method"] in METHODS:
        posterior = METHODS[settings["method"]]().fit(net, loader, EPOCHS, seed=seed, progress=False)
        return {"nll": posterior.predict(test).metrics()["nll"]}
    loss = nn.functional.mse_loss if task in REGRESSIONS else nn.functional.cross_entropy
    adam = torch.optim.Adam(net.parameters(), float(settings["method"].split(", ")[1]))
    for _ in range(EPOCHS):
        for inputs, targets in loader:
            adam.zero_grad()
            loss(net(inputs), targets).backward()
            adam.step()
    with torch.no_grad():
        net.eval()
        nll = loss(net(test[0]), test[1])
        if task in REGRESSIONS:
            noise = loss(net(x), y)
            nll = 0.5 * (math.log(2 * math.pi) + noise.log() + nll / noise)
    return {"nll": float(nll)}


def report(rows: list[Row], folder: Path) -> str:
    """A line for each task; scores that are clearly worse than the better plain loop are bold."""

    def line(task: str) -> list[str]:
        scores = {
            m: mean(row["nll"] for row in rows if (row["task"], row["method"]) == (task, m)) for m in COLUMNS
        }
        plain = min(scores[name] for name in COLUMNS[:2])
        bound = plain + max(0.03, 0.1 * abs(plain))
        return [task, *(f"**{s:.3f}**" if s > bound else f"{s:.3f}" for s in scores.values())]

    return (
        f"# Defaults beside a plain loop\n\n{provenance('defaults', rows)} Mean negative log density of test data "
        f"(nats, lower is better), {SEEDS} seeds, {EPOCHS} epochs, no validation data. Bold: worse than the better "
        "of the two plain loops by more than 0.03 nats and more than 10 percent. Wine to moons: perceptrons with two "
        "layers of 50, or a convolutional network with batch normalisation; tokens: a transformer.\n\n"
        + table(
            ["task", *COLUMNS], [line(task) for task in TASKS if any(row["task"] == task for row in rows)]
        )
    )


BENCHMARK = Benchmark(
    "defaults", "Are the methods' defaults as good as a plain torch loop?", plan, run, report
)
