# SPDX-License-Identifier: Apache-2.0
"""Learn several tasks one after the other without the data of earlier tasks, and measure forgetting.

All tasks use the same images of digits, each task with its own permutation of the pixels. All tasks share one network
with one head, and the network is not told which task an image belongs to. Five learners are compared:

  VOGN           NaturalGradientGuide, NaturalGradientELBO, VOGN; the posterior of one task is the prior of the next
  VCL            variational continual learning: the same with MeanFieldGuide, SampledELBO and Adam
  EWC            elastic weight consolidation: maximum a posteriori with a quadratic penalty around the last solution
  fine-tuning    maximum a posteriori, task after task
  all data       maximum a posteriori with the data of all tasks so far: accuracy without forgetting

Turning the posterior into the next prior takes one line, `model = guide.as_prior()(model)`, and works with every
factorised guide and objective of the library. For each learner, the script prints the accuracy on each task after each
task, and plots these accuracies to a file.

The data are scikit-learn's digits of 8 x 8 pixels. With --data-dir, the script uses MNIST from a folder with
MNIST/raw/*-ubyte.gz; if the files are missing, torchvision downloads them there. The default KL weights and the
strength of EWC (on digits) were chosen on validation images by `python -m benchmarks run continual_learning`, which
repeats the comparison on both data sets with several seeds.
"""

import argparse
import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pyro
import torch
from continual_baselines import EWC, FINAL_LR, AllData, Budget, FineTuning, Learner, Pair
from idx_images import idx_images
from pyro.infer import SVI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR

import pyro_dvi as dvi

matplotlib.use("Agg")  # plots to files; no display is needed
import matplotlib.pyplot as plt  # noqa: E402

# Tasks ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """Images ``[n, pixels]`` and labels 0 to 9."""

    train: Pair
    validation: Pair
    test: Pair


def load_images(data_dir: Path | None, num_train: int, seed: int) -> Task:
    """Return training and validation images drawn by ``seed``, and test images that are the same for all seeds."""
    if data_dir is None:
        images, labels = load_digits(return_X_y=True)
        x, y = torch.as_tensor(images / 16 - 0.3).float(), torch.as_tensor(labels)
        is_test = torch.arange(len(x)) % 2 == 0
        (x, y), (test_x, test_y) = (x[~is_test], y[~is_test]), (x[is_test], y[is_test])
    else:
        (x, y), (test_x, test_y) = (mnist(data_dir, train) for train in (True, False))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    train, validation = order[:num_train], order[num_train:][:1000]
    return Task((x[train], y[train]), (x[validation], y[validation]), (test_x[:2000], test_y[:2000]))


def mnist(folder: Path, train: bool) -> Pair:
    """Standardise MNIST."""
    images, labels = idx_images("MNIST", folder, train)
    return (images.flatten(1) / 255 - 0.13) / 0.31, labels


def permuted(images: Task, count: int, seed: int) -> list[Task]:
    """Return the images themselves as the first task, and with permuted pixels as the other tasks."""
    generator = torch.Generator().manual_seed(seed)
    pixels = images.train[0].shape[1]
    orders = [torch.arange(pixels), *(torch.randperm(pixels, generator=generator) for _ in range(count - 1))]
    parts = (images.train, images.validation, images.test)
    return [Task(*((x[:, order], y) for x, y in parts)) for order in orders]


def make_network(pixels: int, hidden: int) -> nn.Sequential:
    """A perceptron with two hidden layers."""
    return nn.Sequential(
        nn.Linear(pixels, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 10)
    )


# Learners -------------------------------------------------------------------------------------------------------


class PosteriorAsPrior(Learner):
    """Bayes' rule task by task. ``strength`` is the KL weight."""

    def __init__(self, network: nn.Sequential, strength: float, budget: Budget) -> None:
        super().__init__(network, strength, budget)
        dvi.to_bayesian_(self.network, prior_scale=dvi.bayesian.fan_in)
        self.model: Any = None
        self.guide: Any = None

    @abstractmethod
    def inference(self, num_data: int) -> tuple[Any, SVI]:
        """Return a guide for the model, and the SVI object that trains it."""

    def learn(self, data: Pair) -> None:
        """Train a posterior, with the posterior of the last task as the prior."""
        if self.guide is None:
            self.model = dvi.classifier(self.network, num_data=len(data[0]))
        else:
            self.model = self.guide.as_prior()(self.model)
        pyro.clear_param_store()  # the new guide has parameters of the same names
        self.guide, svi = self.inference(len(data[0]))
        dvi.fit(svi, self.budget.loader(data), self.budget.epochs, progress=False)

    def probabilities(self, x: Tensor) -> Tensor:
        """Average over posterior samples."""
        return dvi.predict(self.model, self.guide, x, dvi.Samples(30), seed=0).probabilities


class NaturalGradient(PosteriorAsPrior):
    """Variational online Gauss-Newton."""

    def inference(self, num_data: int) -> tuple[Any, SVI]:
        """Means and precisions, updated by the optimizer."""
        guide = dvi.NaturalGradientGuide(self.model)
        elbo = dvi.NaturalGradientELBO(kl_weight=self.strength)
        return guide, SVI(self.model, guide, dvi.VOGN({}), loss=elbo)


class VCL(PosteriorAsPrior):
    """Mean-field variational inference with reparameterised samples, and the KL divergence in closed form.

    Source: Nguyen, Li, Bui & Turner (2018), "Variational continual learning", without coresets.
    """

    def inference(self, num_data: int) -> tuple[Any, SVI]:
        """Means and standard deviations, trained with Adam; from the second task on, they start at the prior."""
        scale = dvi.guides.PerWeight() if self.guide is None else dvi.guides.PerWeight(log_offset=0.0)
        guide = dvi.MeanFieldGuide(self.model, scale=scale)
        schedule = partial(ExponentialLR, gamma=FINAL_LR ** (1 / self.budget.epochs))
        adam = dvi.optim.Adam(self.budget.lr, scheduler=schedule)
        return guide, SVI(self.model, guide, adam, loss=dvi.SampledELBO(kl_weight=self.strength))


LEARNERS: dict[str, type[Learner]] = {
    "VOGN": NaturalGradient,
    "VCL": VCL,
    "EWC": EWC,
    "fine-tuning": FineTuning,
    "all data": AllData,
}


# The course of tasks --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A data set with its budget, and the strengths that scored best on validation images."""

    name: str
    num_train: int
    hidden: int
    budget: Budget
    strengths: dict[str, float]


DIGITS = Setting("digits", 600, 100, Budget(30, 50), {"VOGN": 0.03, "VCL": 0.01, "EWC": 30.0})
MNIST = Setting("MNIST", 5000, 100, Budget(6, 100), {"VOGN": 0.1, "VCL": 0.03, "EWC": 30.0})


def course(
    name: str,
    strength: float,
    setting: Setting,
    tasks: list[Task],
    seed: int,
    device: str,
    part: str = "test",
) -> np.ndarray:
    """Train a learner on all tasks in turn.

    Returns:
        Accuracies ``[tasks, tasks]``: row t and column k hold the accuracy on task k after task t; NaN above the
        diagonal.
    """
    pyro.set_rng_seed(seed)
    network = make_network(tasks[0].train[0].shape[1], setting.hidden).to(device)
    learner = LEARNERS[name](network, strength, setting.budget)
    accuracies = np.full((len(tasks), len(tasks)), np.nan)
    for t, task in enumerate(tasks):
        learner.learn((task.train[0].to(device), task.train[1].to(device)))
        for k, met in enumerate(tasks[: t + 1]):
            x, y = getattr(met, part)
            predicted = learner.probabilities(x.to(device)).argmax(1).cpu()
            accuracies[t, k] = (predicted == y).float().mean()
    return accuracies


def print_table(name: str, accuracies: np.ndarray) -> None:
    """Print accuracies ``[tasks, tasks]`` in per cent."""
    tasks = range(1, len(accuracies) + 1)
    print(f"\n{name:16}" + "".join(f" task {k:<2}" for k in tasks) + "    mean")
    for t, row in zip(tasks, accuracies, strict=True):
        shown = "".join("        " if np.isnan(value) else f"{value:8.1%}" for value in row)
        print(f"after task {t:<4} {shown}{np.nanmean(row):8.1%}")


# The colour-blind-safe palette of Okabe and Ito; markers repeat the distinction.
STYLES = {
    "VOGN": ("#0072B2", "o"),
    "VCL": ("#E69F00", "s"),
    "EWC": ("#009E73", "^"),
    "fine-tuning": ("#D55E00", "v"),
    "all data": ("#555555", "D"),
}


def draw(axes: Any, results: dict[str, np.ndarray], title: str) -> None:
    """Plot the mean accuracy on the tasks so far, and the accuracy on the first task, against the number of tasks.

    Args:
        axes: two axes.
        results: accuracies ``[seeds, tasks, tasks]`` by learner; the band is one standard deviation over seeds.
        title: name of the data.
    """
    panels = ("mean accuracy on the tasks so far", "accuracy on the first task")
    for ax, label in zip(axes, panels, strict=True):
        for name, accuracies in results.items():
            values = accuracies[:, :, 0] if ax is axes[1] else np.nanmean(accuracies, 2)
            number, middle, spread = range(1, values.shape[1] + 1), values.mean(0), values.std(0)
            colour, marker = STYLES[name]
            dashed = "--" if name == "all data" else "-"
            ax.plot(number, middle, color=colour, marker=marker, linestyle=dashed, label=name)
            ax.fill_between(number, middle - spread, middle + spread, color=colour, alpha=0.15, linewidth=0)
        ax.set(xlabel="tasks learned", ylabel=label, title=title, xticks=number, ylim=(0, 1.02))
        ax.grid(alpha=0.3)
    axes[0].legend(loc="lower left", frameon=False)


# Command line ---------------------------------------------------------------------------------------------------


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, help="folder with MNIST (default: scikit-learn's digits)")
    parser.add_argument(
        "--tasks", type=int, choices=range(2, 11), default=5, help="number of tasks (default: 5)"
    )
    parser.add_argument(
        "--learners", nargs="+", choices=LEARNERS, default=list(LEARNERS), help="default: all"
    )
    parser.add_argument("--epochs", type=int, help="passes over the data of each task")
    parser.add_argument(
        "--kl-weight", type=float, help="KL weight of VOGN and VCL (default: chosen on validation data)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="random seed for images, permutations, weights and batches (default: 0)",
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument(
        "--output-dir", type=Path, default=Path("outputs"), help="folder for the plot (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    for name in ("epochs", "kl_weight"):
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    return options


def main(arguments: list[str] | None = None) -> dict[str, np.ndarray]:
    """Run every learner; print and plot the accuracies."""
    options = parse(arguments)
    setting = DIGITS if options.data_dir is None else MNIST
    if options.epochs is not None:
        setting = replace(setting, budget=replace(setting.budget, epochs=options.epochs))
    images = load_images(options.data_dir, setting.num_train, options.seed)
    tasks = permuted(images, options.tasks, options.seed)
    print(f"{setting.name}: {len(tasks)} tasks with {len(images.train[0])} training images each")
    results = {}
    for name in options.learners:
        strength = setting.strengths.get(name, 0.0)
        if options.kl_weight is not None and issubclass(LEARNERS[name], PosteriorAsPrior):
            strength = options.kl_weight
        results[name] = course(name, strength, setting, tasks, options.seed, options.device)
        print_table(name, results[name])
    options.output_dir.mkdir(parents=True, exist_ok=True)
    path = options.output_dir / "continual_learning.png"
    figure, axes = plt.subplots(1, 2, figsize=(10, 4.2), layout="constrained")
    draw(axes, {name: accuracies[None] for name, accuracies in results.items()}, setting.name)
    figure.savefig(path, dpi=120)
    plt.close(figure)
    print(f"\nPlot: {path}")
    return results


if __name__ == "__main__":
    main()
