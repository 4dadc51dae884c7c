# SPDX-License-Identifier: Apache-2.0
"""Predictive covariance of a ResNet-18 with 11 million weights: memory, and cost in gradients of all data.

Images and labels are random: neither memory nor the cost of an iteration depends on them. The number of iterations
does, and grows with the images and with what the prior leaves open; the prior N(0, 0.1^2) has the precision 100. No
matrix of the size of the weights, and none of weights by outputs, is formed: S draws of the weights are all that is
kept. An iteration costs two gradients of all data for each draw.
"""

import resource
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings, device
from benchmarks.shared.networks import num_weights, resnet18_cifar
from benchmarks.shared.tables import provenance, table
from pyro_dvi import classifier, to_bayesian_
from pyro_dvi.laplace import LaplaceGuide, PosteriorSamples
from pyro_dvi.laplace.energy.query import Query

BATCH_SIZE, PRIOR_SCALE, TOLERANCE, NUM_QUERIES = 32, 0.1, 0.05, 256


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """One fit; more images and draws on a GPU."""
    return [{"images": 64, "draws": 8} if budget == "small" else {"images": 2048, "draws": 64}]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Fit and predict at random weights: cost and memory are the same at any."""
    net = resnet18_cifar().eval()
    weights = num_weights(net)
    model = classifier(to_bayesian_(net, prior_scale=PRIOR_SCALE), num_data=settings["images"]).to(device())
    x, y = torch.randn(settings["images"], 3, 32, 32), torch.randint(10, (settings["images"],))
    batches = list(zip(x.to(device()).split(BATCH_SIZE), y.to(device()).split(BATCH_SIZE), strict=True))
    guide = LaplaceGuide(model)
    guide.initialize(*batches[0])

    energy = guide.energy(batches)
    local = energy.at(energy.start)
    start = time.perf_counter()
    local.gradient.sum().item()
    gradient = time.perf_counter() - start

    before = energy.work.done
    start = time.perf_counter()
    posterior = PosteriorSamples(settings["draws"], tolerance=TOLERANCE).fit(local, seed=0)
    fitted = time.perf_counter() - start
    work = energy.work.done - before

    start = time.perf_counter()
    queries = torch.randn(NUM_QUERIES, 3, 32, 32).to(device()).split(BATCH_SIZE)
    mode = guide.unconstrained_mode()
    found = [posterior.covariance(Query(energy.model, (part,), mode, energy.layout)) for part in queries]
    covariance = torch.cat([part.cpu() for part in found])
    return {
        "weights": weights,
        "gradient_seconds": gradient,
        "fit_seconds": fitted,
        "work": round(work),
        "predict_seconds": time.perf_counter() - start,
        "shape": str(list(covariance.shape)),
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def report(rows: list[Row], folder: Path) -> str:
    """A column for each run."""

    def line(label: str, value: Any) -> list[str]:
        return [label, *map(value, rows)]

    def relative(row: Row) -> str:
        return f"{(row['fit_seconds'] + row['predict_seconds']) / row['gradient_seconds']:.0f}"

    head = f"{rows[0]['weights']:,} weights"
    lines = [
        line("one full-data gradient", lambda row: f"{row['gradient_seconds']:.1f} s"),
        line("fit", lambda row: f"{row['fit_seconds']:.1f} s, {row['work']} full-data gradients"),
        line(f"covariance {rows[0]['shape']}", lambda row: f"{row['predict_seconds']:.1f} s"),
        line("total time, in full-data gradients", relative),
        line("peak memory of the process", lambda row: f"{row['peak_gib']:.1f} GiB"),
    ]
    return (
        f"# ResNet-18: posterior samples\n\n{provenance('laplace_scale', rows)} Torchvision's ResNet-18 with a 3 x 3 "
        f"stem, random images in batches of {BATCH_SIZE}, N(0, {PRIOR_SCALE}²) priors, tolerance {TOLERANCE}; the "
        f"covariance is computed for the 10 logits of each of {NUM_QUERIES} inputs.\n\n"
        + table([head, *(f"{row['images']} images, {row['draws']} posterior samples" for row in rows)], lines)
    )


BENCHMARK = Benchmark(
    "laplace_scale",
    "How much memory and how many gradients do posterior samples of 11 million weights need?",
    plan,
    run,
    report,
    timed=True,
)
