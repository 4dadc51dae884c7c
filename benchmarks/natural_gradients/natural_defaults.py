# SPDX-License-Identifier: Apache-2.0
"""How far do the default options of natural-gradient optimizers get in 1,000 and 4,000 steps of a small regression?

A hundred points of sin 3x with a gap in the middle, noise 0.1, one layer of 50 softplus units, all points in each step.
No KL weight is tuned: the question is what training finds without a choice, so all have the weight 1.
"""

from pathlib import Path

import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import mean_sd, provenance, table
from pyro_dvi.bayesian import init_to_module
from pyro_dvi.objectives.sampled import SampledELBO

METHODS = {"MAP": None, "VOGN": dvi.VOGN, "IVON": dvi.IVON, "OGN": dvi.OGN}
METHODS |= {f"{name}, longer steps": METHODS[name] for name in ("VOGN", "IVON", "OGN")}
LONGER = {"max_step": 0.03}
STEPS, SEEDS = (1000, 4000), (0, 1, 2, 3, 4)
NUM_DATA, NOISE, GAP, END = 100, 0.1, 0.5, 2.0


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for every method, length and seed."""
    return [
        {"method": method, "steps": steps, "seed": seed}
        for method in METHODS
        for steps in STEPS
        for seed in SEEDS
    ]


def training_data() -> tuple[Tensor, Tensor]:
    """Points on both sides of the gap."""
    place = 2 * torch.rand(NUM_DATA) - 1
    x = place.sign() * GAP + place * (END - GAP)
    return x[:, None], torch.sin(3 * x) + NOISE * torch.randn(NUM_DATA)


def options(method: str) -> dict[str, float]:
    """Return what a method is given beyond its defaults."""
    return LONGER if method.endswith("longer steps") else {}


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train once; return the root-mean-square error of the mean prediction where there are data."""
    x, y = training_data()
    net = dvi.to_bayesian_(nn.Sequential(nn.Linear(1, 50), nn.Softplus(), nn.Linear(50, 1)))
    model = dvi.regressor(net, NUM_DATA, noise_scale=NOISE)
    natural = METHODS[settings["method"]]
    if natural is None:
        guide = AutoDelta(model, init_loc_fn=init_to_module)
        svi = SVI(model, guide, dvi.optim.Adam({"lr": 0.03}), loss=SampledELBO())
    else:
        guide = dvi.NaturalGradientGuide(model)
        svi = SVI(model, guide, natural(options(settings["method"])), loss=dvi.NaturalGradientELBO())
    history = dvi.fit(svi, [(x, y)], settings["steps"], progress=False)
    right = torch.linspace(GAP, END, 100)
    places = torch.cat([-right, right])
    rule = dvi.AtMean() if natural is None else dvi.Samples(100)
    prediction = dvi.predict(model, guide, places[:, None], rule, seed=0)
    error = prediction.mean.reshape(-1) - torch.sin(3 * places)
    pyro.clear_param_store()
    return {"error": float(error.square().mean().sqrt()), "loss": history["loss"][-1]}


def report(rows: list[Row], folder: Path) -> str:
    """Write one table."""
    lines = []
    for method in METHODS:
        cells: list[object] = [
            f"`{method.split(',')[0]}({options(method)})`" if METHODS[method] else "MAP by Adam, lr 0.03"
        ]
        for steps in STEPS:
            errors = [row["error"] for row in rows if (row["method"], row["steps"]) == (method, steps)]
            cells.append(mean_sd(errors) if errors else None)
        lines.append(cells)
    return "\n".join(
        [
            provenance(BENCHMARK.name, rows),
            "",
            "Root-mean-square error of the mean prediction (of 100 samples; MAP: at the mode) where there are data, "
            f"mean ± standard deviation over seeds. A hundred points of sin 3x, noise {NOISE:g}, 50 softplus units, KL "
            "weight 1.",
            "",
            table(["method", *(f"error after {steps:,} steps" for steps in STEPS)], lines),
        ]
    )


BENCHMARK = Benchmark(
    name="natural_defaults",
    question="How far do the default options of natural-gradient optimizers get in 1,000 steps?",
    plan=plan,
    run=run,
    report=report,
)
