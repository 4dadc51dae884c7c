# SPDX-License-Identifier: Apache-2.0
"""Train VOGN on augmented images, with a chosen effective number of images.

With random crops and flips, a network sees different images in every epoch. The precision of the posterior is the
prior's precision plus N times the curvature of one image. Augmented images carry more information than N images, but
less than as many independent ones. A factor rho, set by hand, gives the effective number:

  N -> rho N        dvi.VOGN({"data_augmentation": rho})

The precision of a weight is rho N s / beta + delta, with the average squared gradient s, the KL weight beta and the
prior precision delta: a larger rho narrows the posterior and weakens the prior. Only the ratio rho / beta matters.
There are two options because they describe different things: rho sets the effective number of images, and beta sets how
cold the posterior given these images is.

One small convolutional network with batch normalisation is trained on images of Fashion-MNIST several times,

  plain                  without augmentation
  augmented              random crops and flips with torchvision's transforms
  augmented, rho = 5     the same, with each image counted five times (--rho)

with the same KL weight. A table shows the scores and the width of the posterior. This example needs torchvision.
"""

import argparse
import importlib.util
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyro
import torch
from idx_images import idx_images
from pyro.infer import SVI
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import pyro_dvi as dvi

MEAN, STD = [0.286], [0.353]


class Images(Dataset):
    """Images that are transformed each time they are read."""

    def __init__(self, images: Tensor, labels: Tensor, transform: Any) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        """Return the number of images, not counting augmented copies."""
        return len(self.images)

    def __getitem__(self, k: int) -> tuple[Tensor, Tensor]:
        """Return an image and its label."""
        return self.transform(self.images[k]), self.labels[k]


@dataclass
class Result:
    """Result of one training run; ``scale`` is the median ratio of posterior to prior standard deviation."""

    name: str
    scores: dict[str, float]
    train_accuracy: float
    scale: float


def make_transforms() -> tuple[Any, Any]:
    """Return transforms without and with augmentation."""
    from torchvision.transforms import v2

    numbers = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    random = [v2.RandomCrop(28, padding=2), v2.RandomHorizontalFlip()]
    return v2.Compose(numbers), v2.Compose([*random, *numbers])


def make_network(width: int) -> nn.Sequential:
    """Three convolutions with batch normalisation."""

    def block(inputs: int, outputs: int, stride: int) -> list[nn.Module]:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        return [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]

    return nn.Sequential(
        *block(1, width, 2),
        *block(width, 2 * width, 2),
        *block(2 * width, 4 * width, 1),
        nn.AvgPool2d(7),
        nn.Flatten(),
        nn.Linear(4 * width, 10),
    )


def train(name: str, dataset: Images, rho: float, test: Images, options: argparse.Namespace) -> Result:
    """Train one network and score it."""
    pyro.clear_param_store()  # the networks share parameter names
    pyro.set_rng_seed(options.seed)
    net = dvi.to_bayesian_(make_network(options.width), prior_scale=dvi.bayesian.fan_in)
    model = dvi.classifier(
        net, num_data=len(dataset)
    )  # N without augmentation; the optimizer multiplies it by rho
    guide = dvi.NaturalGradientGuide(model)
    vogn = dvi.VOGN({"data_augmentation": rho})
    svi = SVI(model, guide, vogn, loss=dvi.NaturalGradientELBO(kl_weight=options.kl_weight))
    loader = DataLoader(
        dataset, batch_size=min(options.batch_size, len(dataset)), shuffle=True, drop_last=True
    )
    dvi.fit(svi, loader, options.epochs, device=options.device)
    plain = Images(dataset.images, dataset.labels, test.transform)
    on_test, on_train = (
        dvi.predict(model, guide, DataLoader(part, 500), seed=options.seed).metrics()
        for part in (test, plain)
    )
    return Result(name, on_test, on_train["accuracy"], median_scale(guide))


def median_scale(guide: Any) -> float:
    """Return the median over weights of the ratio of posterior to prior standard deviation."""
    ratios = []
    for name, (_, scale) in guide.as_prior().gaussians.items():
        if name.endswith("weight"):
            ratios.append(
                scale.flatten() / (2 / scale[0].numel()) ** 0.5
            )  # fan_in: two over the number of inputs
    return torch.cat(ratios).median().item()


def print_table(results: list[Result]) -> None:
    """Print scores and widths."""
    print(
        f"\n{'':22} {'test NLL':>9} {'accuracy':>9} {'ECE':>7} {'on training images':>19} {'posterior/prior sd':>19}"
    )
    for r in results:
        print(
            f"{r.name:22} {r.scores['nll']:>9.3f} {r.scores['accuracy']:>9.1%} {r.scores['ece']:>7.2%} "
            f"{r.train_accuracy:>19.1%} {r.scale:>19.3f}"
        )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(os.environ.get("PYRO_DVI_DATA", "data")),
        help="folder with FashionMNIST/raw/*-ubyte.gz, or where torchvision downloads them (default: the "
        "environment variable PYRO_DVI_DATA, or data)",
    )
    parser.add_argument("--num-train", type=int, default=2000, help="training images (default: 2000)")
    parser.add_argument("--num-test", type=int, default=5000, help="test images (default: 5000)")
    parser.add_argument("--epochs", type=int, default=40, help="passes over the images (default: 40)")
    parser.add_argument("--batch-size", type=int, default=100, help="images in a minibatch (default: 100)")
    parser.add_argument("--width", type=int, default=16, help="channels of the first layer (default: 16)")
    parser.add_argument(
        "--rho",
        type=float,
        nargs="+",
        default=[1.0, 5.0],
        help="factors rho: the posterior counts N images as rho N (default: 1 5)",
    )
    parser.add_argument("--kl-weight", type=float, default=0.03, help="KL weight beta (default: 0.03)")
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed for images, weights and batches (default: 0)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    options = parser.parse_args(arguments)
    for name in ("num_train", "num_test", "epochs", "batch_size", "width", "kl_weight"):
        if not 0 < getattr(options, name) < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {getattr(options, name)}")
    if not all(0 < rho < math.inf for rho in options.rho):
        parser.error(f"--rho must be positive, got {options.rho}")
    if importlib.util.find_spec("torchvision") is None:
        parser.error('this example needs torchvision for its transforms: pip install "pyro-dvi[examples]"')
    return options


def main(arguments: list[str] | None = None) -> list[Result]:
    """Train all variants and print the table."""
    options = parse(arguments)
    plain, augmented = make_transforms()
    images, labels = idx_images("FashionMNIST", options.data_dir, train=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed))
    images, labels = (part[order[: options.num_train]] for part in (images, labels))
    test_images, test_labels = idx_images("FashionMNIST", options.data_dir, train=False)
    test = Images(test_images[: options.num_test], test_labels[: options.num_test], plain)
    print(f"{len(images)} training and {len(test)} test images; KL weight {options.kl_weight}")
    runs = [("plain", plain, 1.0)]
    runs += [
        (f"augmented, rho = {rho:g}" if rho != 1 else "augmented", augmented, rho) for rho in options.rho
    ]
    results = [
        train(name, Images(images, labels, transform), rho, test, options) for name, transform, rho in runs
    ]
    print_table(results)
    return results


if __name__ == "__main__":
    main()
