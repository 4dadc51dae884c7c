# SPDX-License-Identifier: Apache-2.0
"""How far propagated deviations are off after a norm, where the elements of a layer share the noise of its weights.

    python benchmarks/shared_noise.py

writes results/shared_noise.md.
"""

import platform
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from pyro_dvi.moments import GaussianMoments, observed_by
from pyro_dvi.reverse_delta import ReverseDeltaRecorder

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


def main() -> None:
    """Write the table."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    lines = [
        f"`python benchmarks/shared_noise.py`, torch {torch.__version__}, {platform.machine()}.",
        f"Standard deviation after the norm over that of {DRAWS:,} draws of the weights: median (largest)",
        f"over elements, {SEEDS} seeds.",
        "",
        "| layer and norm | inputs | deviation of the weights | `Independent()` | `ReverseDelta()` |",
        "|---|---|---|---|---|",
    ]
    for make, name, means in (
        (convolution, "3 × 3 convolution, instance norm", (1.0, 0.0)),
        (linear, "linear, layer norm", (1.0, 0.0)),
    ):
        for mean in means:
            for scale in SCALES:
                found = zip(*(ratios(make, seed, mean, scale) for seed in range(SEEDS)), strict=True)
                cells = [torch.cat(part) for part in found]
                shown = " | ".join(f"{c.median():.2f} ({c.max():.2f})" for c in cells)
                lines.append(f"| {name} | {mean:g} ± 0.1 | {scale:g} | {shown} |")
    text = "\n".join(lines) + "\n"
    print(text)
    (Path(__file__).parent / "results" / "shared_noise.md").write_text(text)


if __name__ == "__main__":
    main()
