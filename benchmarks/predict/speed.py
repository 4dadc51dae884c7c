# SPDX-License-Identifier: Apache-2.0
"""How long and how much memory do predictions take? ``predict`` with ``Samples`` beside ``pyro.infer.Predictive``.

Both average the class probabilities (the mean, for numbers) of the same number of draws from the same guide, a
mean-field Gaussian, over the same test inputs; ``Predictive`` reads them from a deterministic site of the model. It is
called in two ways: once with all inputs, and batch by batch with the batches of ``predict``, where it draws the weights
anew for each batch. ``predictor`` serves the same batches with draws that were taken when it was prepared, which is not
timed.

Contestants take turns (A B C A B C ...), and medians of the paired ratios are taken over rounds, so that a drifting
machine hits all alike. Differences between the averaged outputs are reported in Monte-Carlo standard errors. Memory is
measured in a run for each contestant.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Predictive
from pyro.nn import PyroModule
from torch import Tensor, nn

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings, device
from benchmarks.shared.images import load_split
from benchmarks.shared.memory import peak_growth
from benchmarks.shared.networks import lenet, mlp
from benchmarks.shared.tables import provenance, table
from pyro_dvi import MeanFieldGuide, Samples, predict, predictor, to_bayesian_
from pyro_dvi.bayesian.priors import fan_in
from pyro_dvi.predictive.predictor import Predictor

OURS, PREPARED = "predict, Samples", "predictor, Samples"
WHOLE, BATCHED = "Predictive, all inputs", "Predictive, in batches"
BATCH, NUM_INPUTS, ROUNDS, MANY = 1000, 10_000, 3, 1000


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    classes: int  # 0: one real output
    features: int = 0  # 0: images of MNIST


SLOW = "LeNet with softplus, MNIST"
CASES = {
    "LeNet with ReLU, MNIST": Case(lambda: lenet(activation=nn.ReLU), 10),
    SLOW: Case(lenet, 10),
    "MLP 784-200-200-10, MNIST": Case(lambda: mlp((784, 200, 200, 10), nn.ReLU), 10),
    "MLP 13-50-1, numbers": Case(lambda: mlp((13, 50, 1), nn.ReLU), 0, features=13),
}


class Model(PyroModule):
    """A network with a likelihood, and its probabilities as a site that ``Predictive`` can return."""

    def __init__(self, net: nn.Module, classes: int) -> None:
        super().__init__()
        self.net, self.classes = net, classes

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        out = self.net(x)
        with pyro.plate("data", len(x)):
            if self.classes:
                pyro.deterministic("average", out.softmax(-1), event_dim=1)
                pyro.sample("obs", dist.Categorical(logits=out), obs=y)
            else:
                pyro.deterministic("average", out.squeeze(-1))
                pyro.sample("obs", dist.Normal(out.squeeze(-1), 0.5), obs=y)


@dataclass
class Setting:
    """What a contestant is given."""

    model: Model
    guide: MeanFieldGuide
    x: Tensor
    prepared: dict[tuple[int, int], Predictor] = field(default_factory=dict)


def setting(name: str, data_dir: str | None) -> Setting:
    """Return model, guide and inputs. The weights are not trained: it makes no difference to time and memory."""
    case = CASES[name]
    if case.features:
        x = torch.randn(NUM_INPUTS, case.features).to(device())
    else:
        x = load_split("MNIST", 1, 1, NUM_INPUTS, 0, data_dir).test[0]
    model = Model(to_bayesian_(case.make(), prior_scale=fan_in), case.classes).to(device()).eval()
    guide = MeanFieldGuide(model)
    guide(x[:2], torch.zeros(2, dtype=torch.long if case.classes else torch.float32, device=device()))
    return Setting(model, guide.to(device()), x)


def ours(s: Setting, num_samples: int, seed: int) -> Tensor:
    prediction = predict(s.model, s.guide, s.x, Samples(num_samples), batch_size=BATCH, seed=seed)
    return prediction.mean


def prepare(s: Setting, num_samples: int, seed: int) -> Predictor:
    key = num_samples, seed
    if key not in s.prepared:
        s.prepared[key] = predictor(s.model, s.guide, s.x[:2], Samples(num_samples), seed=seed)
    return s.prepared[key]


def served(s: Setting, num_samples: int, seed: int) -> Tensor:
    serve = prepare(s, num_samples, seed)
    return torch.cat([serve(x).mean for x in s.x.split(BATCH)])


@torch.no_grad()
def whole(s: Setting, num_samples: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    draws = Predictive(s.model, guide=s.guide, num_samples=num_samples, return_sites=["average"])
    return draws(s.x)["average"].mean(0)


@torch.no_grad()
def batched(s: Setting, num_samples: int, seed: int) -> Tensor:
    torch.manual_seed(seed)
    draws = Predictive(s.model, guide=s.guide, num_samples=num_samples, return_sites=["average"])
    return torch.cat([draws(x)["average"].mean(0) for x in s.x.split(BATCH)])


CONTESTANTS: dict[str, Callable[[Setting, int, int], Tensor]] = {
    OURS: ours,
    PREPARED: served,
    WHOLE: whole,
    BATCHED: batched,
}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Times of few draws; memory of many for ``predict``, and of as few for the others, which keep them all."""
    small = budget == "small"
    few = 10 if small else 30
    runs: list[Settings] = []
    for case in CASES:
        if not (small and case == SLOW):
            common = {"case": case, "threads": 2}
            runs.append({**common, "part": "time", "num_samples": few})
            for name in CONTESTANTS:
                draws = MANY if name == OURS else few
                runs.append({**common, "part": "memory", "contestant": name, "num_samples": draws})
    return runs


def run(settings: Settings, data_dir: str | None) -> Row:
    """Measure the time of all contestants, or the memory of one."""
    made, draws = setting(settings["case"], data_dir), settings["num_samples"]
    if settings["part"] == "time":
        return {"contestants": times(made, draws)}
    contestant = settings["contestant"]
    if contestant == PREPARED:
        prepare(made, draws, 0)
    with peak_growth() as memory:
        CONTESTANTS[contestant](made, draws, 0)
    return memory


def times(made: Setting, num_samples: int) -> dict[str, Row]:
    """Return seconds, ratios and differences by contestant."""
    seconds: dict[str, list[float]] = {kind: [] for kind in CONTESTANTS}
    outputs: dict[str, Tensor] = {}
    for contestant in CONTESTANTS.values():  # a first run loads kernels
        contestant(made, 2, 0)
    for round_number in range(ROUNDS):
        prepare(made, num_samples, round_number)
        for kind, contestant in CONTESTANTS.items():
            start = time.perf_counter()
            outputs[kind] = contestant(made, num_samples, round_number)
            outputs[kind].sum().item()  # waits for an accelerator
            seconds[kind].append(time.perf_counter() - start)
    spread = predict(made.model, made.guide, made.x, Samples(num_samples), batch_size=BATCH, seed=0).epistemic
    error = (2 * spread / num_samples).sqrt().clamp_min(1e-9)
    return {
        kind: {
            "seconds": median(values),
            "ratios": [t / base for t, base in zip(values, seconds[OURS], strict=True)],
            "difference": float(((outputs[kind] - outputs[OURS]) / error).square().mean().sqrt()),
        }
        for kind, values in seconds.items()
    }


def report(rows: list[Row], folder: Path) -> str:
    """A line for each case and contestant."""
    lines, draws = [], sorted({row["num_samples"] for row in rows if row["part"] == "time"})
    for row in rows:
        for name, found in row.get("contestants", {}).items():
            same = {"case": row["case"], "machine": row["machine"], "contestant": name}
            memory = [r["memory_mib"] for r in rows if same.items() <= r.items()]
            ratios = found["ratios"]
            extent = f"{min(ratios):.2f} to {max(ratios):.2f}"
            cells = [f"{found['seconds']:.2f}", f"{median(ratios):.2f}", extent, f"{found['difference']:.2f}"]
            lines.append([row["case"], name, *cells, f"{memory[0]:.0f}" if memory else ""])
    few = " and ".join(map(str, draws))
    return (
        f"`predict` with `Samples` compared with `pyro.infer.Predictive` for the same output: {NUM_INPUTS:,} inputs in "
        f"batches of {BATCH:,}; times for {few} posterior samples, {ROUNDS} rounds; memory for {MANY:,} samples (for "
        f"{few} with `Predictive`, which keeps them all). {provenance('predict_speed', rows)}\n\n"
        "Relative to predict: median over rounds of the ratio of times to `predict`, with its range; above 1, "
        "`predict` is faster. Difference: root mean squared difference of the averaged outputs from `predict`, in "
        "Monte Carlo standard errors (about 1 if both are right). Memory: peak in addition to a process that holds "
        "model, guide and inputs.\n\n"
        + table(["case", "call", "s", "relative to predict", "range", "difference", "MiB"], lines)
    )


BENCHMARK = Benchmark(
    "predict_speed",
    "How much time and memory do predictions with samples take, compared with pyro.infer.Predictive?",
    plan,
    run,
    report,
    timed=True,
)
