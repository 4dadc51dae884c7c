# SPDX-License-Identifier: Apache-2.0
"""Train a Bayesian network on handwritten digits with Variational Laplace, and look at what it knows.

Trains one small convolutional network three times from the same weights, with the same priors, KL weight, optimizer,
learning rates and epochs:

  MAP                  the most probable weights: Pyro's AutoDelta and SampledELBO, which has nothing to draw then
  sampled VI           Pyro's AutoNormal and SampledELBO, predicted by an average over posterior samples
  Variational Laplace  MeanFieldGuide and TaylorELBO, which need no samples, predicted at the posterior mean

Then it prints a table of test scores and training times, draws a reliability diagram, and writes the posterior to
a file for ArviZ. The data are scikit-learn's 1,797 digits of 8 x 8 pixels, half for training and half for the test.
The settings are the same for all methods; the KL weight did best on average over the three on images split off the
training half. Digits are easy: expect scores within two standard errors of each other, and look at benchmarks/ for
data on which the methods differ.
"""

import argparse
import copy
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi

matplotlib.use("Agg")  # draws into files: no display is needed
import matplotlib.pyplot as plt  # noqa: E402

FINAL_LR = 0.03  # of the first learning rate; it falls by the same factor in every epoch


@dataclass
class Data:
    """Images ``[N, 1, 8, 8]`` between 0 and 1, and labels 0 to 9."""

    train_x: Tensor
    train_y: Tensor
    test_x: Tensor
    test_y: Tensor


@dataclass
class Result:
    """What one method gives."""

    name: str
    rule: Any
    model: Any
    guide: Any
    elbo: Any
    prediction: dvi.Prediction
    scores: dict[str, float]
    seconds: float


def load_data(seed: int) -> Data:
    """Split the digits in two halves, with equal shares of every digit."""
    images, labels = load_digits(return_X_y=True)
    split = train_test_split(images, labels, test_size=0.5, random_state=seed, stratify=labels)
    train_x, test_x = (torch.as_tensor(x, dtype=torch.float32).reshape(-1, 1, 8, 8) / 16 for x in split[:2])
    train_y, test_y = (torch.as_tensor(y) for y in split[2:])
    return Data(train_x, train_y, test_x, test_y)


def make_network() -> nn.Sequential:
    """About 29,000 weights, without biases before normalisation, which would cancel them.

    TaylorELBO needs second derivatives, so softplus instead of ReLU.
    """
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.Softplus(),
        nn.Conv2d(32, 64, 3, padding=1, stride=2, bias=False),
        nn.BatchNorm2d(64),
        nn.Softplus(),
        nn.Flatten(),
        nn.Linear(64 * 4 * 4, 10),
    )


def train(
    name: str,
    network: nn.Module,
    make_guide: Callable[[Any], Any],
    make_elbo: Callable[..., Any],
    rule: Any,
    data: Data,
    options: argparse.Namespace,
) -> Result:
    """Train a copy of ``network`` and predict the test images by ``rule``."""
    pyro.clear_param_store()  # the three models have parameters of the same names
    pyro.set_rng_seed(options.seed)
    net = dvi.to_bayesian_(copy.deepcopy(network), prior_scale=dvi.fan_in)
    model = dvi.classifier(net, num_data=len(data.train_x)).to(options.device)
    guide, elbo = make_guide(model), make_elbo(kl_weight=options.kl_weight)
    # The last minibatch may hold two images, whose batch normalisation would be noise: it is left out.
    images = TensorDataset(data.train_x, data.train_y)
    loader = DataLoader(images, batch_size=min(options.batch_size, len(images)), shuffle=True, drop_last=True)
    schedule = partial(ExponentialLR, gamma=FINAL_LR ** (1 / options.epochs))
    optimizer = dvi.optim.Adam(dvi.learning_rates(options.lr), scheduler=schedule)
    svi = SVI(model, guide, optimizer, loss=elbo)
    print(f"\n{name}: {type(guide).__name__}, {type(elbo).__name__}, predicted {describe(rule)}")
    history = dvi.fit(svi, loader, options.epochs, recompute_batch_norm=True)
    prediction = dvi.predict(model, guide, (data.test_x, data.test_y), rule, seed=options.seed)
    seconds = statistics.median(history["seconds"])
    return Result(name, rule, model, guide, elbo, prediction, prediction.metrics(), seconds)


def describe(rule: Any) -> str:
    """Say how a method is predicted."""
    return f"by {rule.num_samples} samples" if isinstance(rule, dvi.Samples) else "at the mean"


def print_table(results: list[Result]) -> None:
    """Print scores on the test images and training times; the first method is the unit of time."""
    print(
        f"\n{'':20} {'predicted':15} {'test NLL':>15} {'accuracy':>9} {'ECE':>7} {'s/epoch':>8} {'ratio':>6}"
    )
    for result in results:
        score = result.scores
        nll = f"{score['nll']:.3f} ± {score['nll_standard_error']:.3f}"
        print(
            f"{result.name:20} {describe(result.rule):15} {nll:>15} {score['accuracy']:>9.1%} {score['ece']:>7.2%} "
            f"{result.seconds:>8.2f} {result.seconds / results[0].seconds:>6.1f}"
        )
    print(
        "NLL in nats, with its standard error over test images (the same for all methods); ECE with 15 bins."
    )


def save_reliability(results: list[Result], labels: Tensor, path: Path) -> None:
    """Draw confidence against accuracy, one panel a method."""
    figure, axes = plt.subplots(1, len(results), figsize=(4 * len(results), 4.6), layout="constrained")
    for ax, result in zip(axes, results, strict=True):
        dvi.plots.reliability_diagram(result.prediction.probabilities.cpu(), labels, title=result.name, ax=ax)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def save_posterior(result: Result, data: Data, seed: int, path: Path) -> None:
    """Write posterior draws of the smaller layers, predictions and data."""
    posterior = dvi.to_arviz(
        result.model,
        result.guide,
        data=(data.test_x, data.test_y),
        num_samples=500,
        sites=["net.0.weight", "net.7.bias"],
        method=result.rule,
        elbo=result.elbo,
        seed=seed,
    )
    posterior.to_netcdf(path)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--epochs", type=positive(int), default=40, help="passes over the training data (default: 40)"
    )
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, ... (default: cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of the split, weights and batches (default: 0)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("quickstart_output"),
        help="for the files (default: %(default)s)",
    )
    parser.add_argument(
        "--kl-weight",
        type=positive(float),
        default=0.01,
        help="weight of the prior in all three methods; 1 is Bayes' rule, less fits the data closer (default: 0.01)",
    )
    parser.add_argument(
        "--lr", type=positive(float), default=3e-3, help="learning rate of means (default: 0.003)"
    )
    parser.add_argument(
        "--batch-size", type=positive(int), default=64, help="images in a minibatch (default: 64)"
    )
    parser.add_argument(
        "--samples", type=positive(int), default=30, help="that predict sampled VI (default: 30)"
    )
    options = parser.parse_args(arguments)
    try:
        torch.zeros((), device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {options.device} is not available here: {str(error).splitlines()[0]}")
    return options


def positive(kind: type) -> Callable[[str], Any]:
    """Make an argument type that refuses zero, negative and other text."""

    def read(text: str) -> Any:
        value = kind(text)
        if not 0 < value < float("inf"):
            raise ValueError
        return value

    read.__name__ = f"positive {kind.__name__}"  # argparse puts it into its message
    return read


def main(arguments: list[str] | None = None) -> list[Result]:
    """Run everything."""
    options = parse(arguments)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    data = load_data(options.seed)
    pyro.set_rng_seed(options.seed)
    network = make_network()
    print(f"{len(data.train_x)} training and {len(data.test_x)} test images; KL weight {options.kl_weight}")

    def sampled_guide(model: Any) -> AutoNormal:
        return AutoNormal(model, init_loc_fn=dvi.init_to_module, init_scale=0.01)

    def map_guide(model: Any) -> AutoDelta:
        return AutoDelta(model, init_loc_fn=dvi.init_to_module)

    at_mean, sampled = dvi.AtMean(), dvi.Samples(options.samples)
    results = [
        train("MAP", network, map_guide, dvi.SampledELBO, at_mean, data, options),
        train("sampled VI", network, sampled_guide, dvi.SampledELBO, sampled, data, options),
        train("Variational Laplace", network, dvi.MeanFieldGuide, dvi.TaylorELBO, at_mean, data, options),
    ]
    print_table(results)

    diagram, posterior = options.output_dir / "reliability.png", options.output_dir / "posterior.nc"
    save_reliability(results, data.test_y, diagram)
    save_posterior(results[-1], data, options.seed, posterior)
    print(f"\nReliability diagram: {diagram}")
    print(f"Posterior for ArviZ: {posterior}; open it in Python with\n")
    print("    import arviz as az")
    print(f"    posterior = az.from_netcdf({str(posterior)!r})")
    print("    print(az.summary(posterior, var_names=['net.7.bias']))")
    return results


if __name__ == "__main__":
    main()
