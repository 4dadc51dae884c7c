# SPDX-License-Identifier: Apache-2.0
"""How far propagated deviations are off after a norm, where the elements of a layer share the noise of its weights."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import provenance, table
from pyro_dvi.curvature.reverse_delta import ReverseDeltaRecorder
from pyro_dvi.moments import GaussianMoments
from pyro_dvi.moments.dispatch import observed_by

SEEDS, DRAWS = 20, 4000
SCALES = (0.05, 0.1, 0.2)
Function = Callable[..., Tensor]


def convolution(seed: int, mean: float) -> tuple[Tensor, Tensor, Function, Function]:
    """A 3 x 3 kernel over 6 x 6 pixels of deviation 0.1, then instance norm over its 16 positions."""
    generator = torch.Generator().manual_seed(seed)
    x = mean + 0.1 * torch.randn(1, 1, 6, 6, generator=generator)
    weight = (2 * torch.rand(1, 1, 3, 3, generator=generator) - 1) / 3
    return x, weight, F.conv2d, F.instance_norm


def linear(seed: int, mean: float) -> tuple[Tensor, Tensor, Function, Function]:
    """A linear layer of 36 inputs and 16 units, then layer norm."""
    generator = torch.Generator().manual_seed(seed)
    x = mean + 0.1 * torch.randn(1, 36, generator=generator)
    weight = (2 * torch.rand(16, 36, generator=generator) - 1) / 6
    return x, weight, F.linear, lambda h: F.layer_norm(h, h.shape[-1:])


def ratios(make: Callable, seed: int, mean: float, scale: float) -> tuple[Tensor, Tensor]:
    """Standard deviations over those of draws: of independent elements, and of the reverse delta method."""
    x, loc, layer, norm = make(seed, mean)
    generator = torch.Generator().manual_seed(1000 + seed)
    noise = scale * torch.randn(DRAWS, *loc.shape, generator=generator)
    sampled = torch.cat([norm(layer(x, loc + e)) for e in noise]).std(0).flatten()
    weight = GaussianMoments(loc, torch.full_like(loc, scale**2))
    independent = norm(layer(x, weight)).variance.sqrt().flatten()
    recorder = ReverseDeltaRecorder({"weight": weight})
    with torch.enable_grad(), observed_by(recorder):
        y = norm(layer(x, weight))
    reverse = recorder.variance(y, 0).sqrt().flatten()
    return independent / sampled, reverse / sampled


LAYERS = {"3 × 3 convolution, instance norm": convolution, "linear, layer norm": linear}


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for both layers, at two means of their inputs and three deviations of their weights."""
    return [
        {"layer": layer, "mean": mean, "scale": scale}
        for layer, mean, scale in product(LAYERS, (1.0, 0.0), SCALES)
    ]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Median and largest ratio over elements and seeds."""
    torch.set_default_dtype(torch.float64)
    make, mean, scale = LAYERS[settings["layer"]], settings["mean"], settings["scale"]
    found = zip(*(ratios(make, seed, mean, scale) for seed in range(SEEDS)), strict=True)
    independent, reverse = (torch.cat(part) for part in found)
    return {
        "independent": [independent.median().item(), independent.max().item()],
        "reverse_delta": [reverse.median().item(), reverse.max().item()],
    }


def report(rows: list[Row], folder: Path) -> str:
    """One table."""
    about = (
        "Propagated standard deviation after the normalisation layer, divided by the Monte Carlo estimate from "
        f"{DRAWS:,} weight samples: median (largest) over elements, {SEEDS} seeds."
    )
    header = ["layer and norm", "inputs", "sd of the weights", "`Independent()`", "`ReverseDelta()`"]
    lines = []
    for row in sorted(rows, key=lambda row: (list(LAYERS).index(row["layer"]), -row["mean"], row["scale"])):
        shown = ["{:.2f} ({:.2f})".format(*row[key]) for key in ("independent", "reverse_delta")]
        lines.append([row["layer"], f"{row['mean']:g} ± 0.1", f"{row['scale']:g}", *shown])
    return "\n\n".join([provenance("shared_noise", rows), about, table(header, lines)])


BENCHMARK = Benchmark(
    "shared_noise",
    "How wrong are standard deviations after a normalisation layer whose elements share noise?",
    plan,
    run,
    report,
)
