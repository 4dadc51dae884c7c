# SPDX-License-Identifier: Apache-2.0
"""Predictive covariance of a ResNet-18 with 11 million weights: memory, and cost in gradients of all data.

    python -m benchmarks.laplace_scale                                    # some ten minutes on two cores
    python -m benchmarks.laplace_scale --output benchmarks/results/laplace_scale.md

Images and labels are random: neither memory nor the cost of an iteration depends on them. The number of iterations
does, and grows with the images and with what the prior leaves open; the default prior, N(0, 0.1^2), has the precision
100. No matrix of the size of the weights, and none of weights by outputs, is formed: S draws of the weights are all
that is kept. An iteration costs two gradients of all data for each draw.
"""

import argparse
import resource
import time
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor
from torchvision.models import resnet18

from benchmarks.shared.networks import num_weights, resnet18_cifar
from pyro_dvi import to_bayesian_
from pyro_dvi.laplace import Accept, LaplaceGuide, PosteriorSamples
from pyro_dvi.laplace.energy.energy import Energy

STEMS = {"cifar": resnet18_cifar, "imagenet": lambda: resnet18(num_classes=10)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=int, default=256, help="inputs whose 10 logits are predicted")
    parser.add_argument("--images", type=int, default=64, help="images of training")
    parser.add_argument("--samples", type=int, default=8, help="draws of the weights")
    parser.add_argument("--prior-scale", type=float, default=0.1)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--tolerance", type=float, default=0.05, help="of the solves")
    parser.add_argument("--stem", choices=STEMS, default="cifar")
    parser.add_argument("--output", type=Path, help="write the table here as well")
    options = parser.parse_args()

    torch.manual_seed(0)
    net = STEMS[options.stem]().eval()
    weights = num_weights(net)
    to_bayesian_(net, prior_scale=options.prior_scale)

    def model(x: Tensor, y: Tensor | None = None) -> Any:
        logits = net(x)
        with pyro.plate("data", options.images, subsample_size=len(x)):
            return pyro.sample("y", dist.Categorical(logits=logits), obs=y)

    x, y = torch.randn(options.images, 3, 32, 32), torch.randint(10, (options.images,))
    batches = list(zip(x.split(options.batch_size), y.split(options.batch_size), strict=True))
    guide = LaplaceGuide(model)
    guide.initialize(*batches[0])

    energy = guide.energy(batches)
    start = time.perf_counter()
    energy.at(energy.start).gradient  # noqa: B018
    gradient = time.perf_counter() - start
    del energy
    print(f"one gradient of {options.images} images: {gradient:.1f} s", flush=True)

    counted: list[Energy] = []
    original = guide.energy

    def counting(*args: Any, **kwargs: Any) -> Energy:
        counted.append(original(*args, **kwargs))
        return counted[-1]

    guide.energy = counting  # type: ignore[method-assign]
    start = time.perf_counter()
    method = PosteriorSamples(options.samples, tolerance=options.tolerance)
    guide.fit(batches, method, unconverged=Accept())  # cost and memory are the same at any weights
    fitted = time.perf_counter() - start
    work = sum(energy.evaluations for energy in counted)
    counted.clear()
    print(f"fit: {fitted:.1f} s, {work:.0f} gradients of all data", flush=True)

    start = time.perf_counter()
    queries = torch.randn(options.inputs, 3, 32, 32).split(options.batch_size)
    covariance = torch.cat([guide.predictive(part).covariance for part in queries])
    predicted = time.perf_counter() - start
    lines = [
        f"{weights:,} weights, {options.stem} stem, {options.images} images of training in batches of "
        f"{options.batch_size}, {options.samples} draws, N(0, {options.prior_scale}^2) priors, tolerance "
        f"{options.tolerance}, "
        f"{torch.get_num_threads()} threads.",
        "",
        "| | |",
        "|---|---|",
        f"| one gradient of all data | {gradient:.1f} s |",
        f"| fit | {fitted:.1f} s, {work:.0f} gradients of all data |",
        f"| covariance {list(covariance.shape)} of {options.inputs} inputs | {predicted:.1f} s |",
        f"| all of it, in gradients of all data by time | {(fitted + predicted) / gradient:.0f} |",
    ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    lines.append(f"| peak memory of the process | {peak:.1f} GiB |")
    print("\n".join(lines))
    if options.output is not None:
        options.output.write_text("# ResNet-18: posterior samples\n\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
