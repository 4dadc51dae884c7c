# SPDX-License-Identifier: Apache-2.0
"""Train one Bayesian network in six ways, and see what each of them knows.

  MAP                  the most probable weights, for comparison: Pyro's AutoDelta
  sampled VI           Pyro's AutoNormal, trained and predicted by draws of the weights, for comparison
  Variational Laplace  MeanFieldGuide and TaylorELBO: no draws, predicted at the posterior mean
  MNVI                 MultiplicativeNoiseGuide and MomentPropagationELBO: no draws, predicted in one pass
  VOGN                 NaturalGradientGuide and NaturalGradientELBO: one draw a step, predicted by draws
  Laplace              LaplaceGuide: a Gaussian around the most probable weights, after training

They do so on two small tasks. The first is a curve with a gap in the data, where a band of predictions can be looked
at. The second is classification: scikit-learn's handwritten digits under so much pixel noise that nobody gets all of
them right. It prints a table of test scores, draws a figure, and writes a posterior for ArviZ.

Every method has its own KL weight. `python -m benchmarks run quickstart` chose them on data that are not tested here,
and repeats the table for five seeds.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import pyro
import torch
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta, AutoNormal
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi

matplotlib.use("Agg")  # draws into a file: no display is needed
import matplotlib.pyplot as plt  # noqa: E402

Pair = tuple[Tensor, Tensor]


# --- two tasks -------------------------------------------------------------------------------------------


@dataclass
class Task:
    """Data with the network that is to learn them.

    Attributes:
        build: makes the Pyro model, with an untrained network.
        train: inputs and observations.
        test: the same of other examples.
        validation: the same of further ones, for the choice of the KL weight.
        epochs: of training.
        batch_size: of training.
        lr: step size of Adam.
        subset: the weights that Laplace's approximation is about.
        others: inputs without observations, by name.
    """

    build: Callable[[], Any]
    train: Pair
    test: Pair
    validation: Pair
    epochs: int
    batch_size: int
    lr: float
    subset: str
    others: dict[str, Tensor] = field(default_factory=dict)


def curve(seed: int) -> Task:
    """Two hundred noisy points of a sine, none between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def points(count: int) -> Pair:
        x = 1 + 1.5 * torch.rand(count, 1, generator=generator)
        x[: count // 2] *= -1
        y = torch.sin(2 * x) + 0.1 * torch.randn(count, 1, generator=generator)
        return x, y.squeeze(-1)

    def build() -> Any:
        net = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 1))
        dvi.to_bayesian_(net, prior_scale={"0.*": 2.0, "2.*": 0.5})
        return dvi.regressor(net, num_data=200, noise_scale=0.1)

    others = {"gap": torch.linspace(-0.5, 0.5, 41)[:, None], "line": torch.linspace(-3.2, 3.2, 257)[:, None]}
    return Task(build, points(200), points(500), points(200), 1000, 200, 0.05, "net.*", others)


def noisy_digits(seed: int) -> Task:
    """600 of the 8 x 8 digits for training and 897 for testing, with noise on each pixel of a range from 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
    fixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    chosen = fixed[300:][torch.randperm(len(x) - 300, generator=generator)]
    x = x + 0.4 * torch.randn(x.shape, generator=generator)
    rows = {"train": chosen[:600], "test": chosen[600:], "validation": fixed[:300]}
    parts = {name: (x[places], y[places]) for name, places in rows.items()}
    order = torch.rand(len(parts["test"][0]), 64, generator=generator).argsort(1)

    def build() -> Any:
        net = nn.Sequential(nn.Linear(64, 100), nn.Softplus(), nn.Linear(100, 10))
        return dvi.classifier(dvi.to_bayesian_(net, prior_scale=dvi.bayesian.fan_in), num_data=600)

    others = {"shuffled": parts["test"][0].gather(1, order)}
    return Task(build, **parts, epochs=120, batch_size=100, lr=0.01, subset="net.2.*", others=others)


TASKS = {"curve": curve, "digits": noisy_digits}


# --- six methods -----------------------------------------------------------------------------------------


def adam(task: Task) -> Any:
    """Adam, whose step size falls to zero; posterior scales have a larger one."""
    schedule = partial(CosineAnnealingLR, T_max=task.epochs)
    return dvi.optim.Adam(dvi.optim.learning_rates(task.lr), scheduler=schedule)


def vogn(task: Task) -> Any:
    """Natural gradients, with the default options."""
    return dvi.VOGN({})


@dataclass
class Method:
    """A guide, an objective, and how they are trained and predicted.

    Attributes:
        guide: of the model.
        objective: of guide and model.
        rule: of prediction; None for the one that the guide was trained for.
        optimizer: given the task.
        fits: whether the guide is fitted after training.
    """

    guide: Callable[[Any], Any]
    objective: Callable[..., Any]
    rule: Any = None
    optimizer: Callable[[Task], Any] = adam
    fits: bool = False


from_module = dvi.bayesian.init_to_module  # begin where torch's layers do
METHODS = {
    "MAP": Method(partial(AutoDelta, init_loc_fn=from_module), dvi.SampledELBO),
    "sampled VI": Method(
        partial(AutoNormal, init_loc_fn=from_module, init_scale=0.01), dvi.SampledELBO, dvi.Samples(30)
    ),
    "Variational Laplace": Method(dvi.MeanFieldGuide, dvi.TaylorELBO),
    "MNVI": Method(dvi.MultiplicativeNoiseGuide, dvi.MomentPropagationELBO),
    "VOGN": Method(dvi.NaturalGradientGuide, dvi.NaturalGradientELBO, dvi.Samples(30), optimizer=vogn),
    "Laplace": Method(dvi.LaplaceGuide, dvi.SampledELBO, fits=True),
}

# Weight of the prior: 1 is Bayes' rule, less fits the data closer. Chosen for the NLL on validation data.
KL_WEIGHTS = {
    "curve": {
        "MAP": 0.001,
        "sampled VI": 0.3,
        "Variational Laplace": 0.03,
        "MNVI": 0.001,
        "VOGN": 0.01,
        "Laplace": 3.0,
    },
    "digits": {
        "MAP": 0.1,
        "sampled VI": 0.1,
        "Variational Laplace": 0.1,
        "MNVI": 0.03,
        "VOGN": 0.1,
        "Laplace": 0.1,
    },
}


def train(method: Method, task: Task, kl_weight: float, device: str = "cpu") -> tuple[Any, Any]:
    """Build a model and train its posterior."""
    model, weight = task.build(), {"kl_weight": kl_weight}
    guide = method.guide(model, **weight) if method.fits else method.guide(model)
    loader = DataLoader(TensorDataset(*task.train), batch_size=task.batch_size, shuffle=True)
    svi = SVI(model, guide, method.optimizer(task), loss=method.objective(**weight))
    dvi.fit(svi, loader, task.epochs, device=device)
    if method.fits:
        guide.polish(loader, subset=task.subset)  # to the very minimum
        guide.fit(loader, subset=task.subset)
    return model, guide


# --- what each of them knows -----------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run everything and return the scores by method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, help="of training (default: 1000 and 120)")
    parser.add_argument("--seed", type=int, default=0, help="of data, weights and batches (default: 0)")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, ... (default: cpu)")
    parser.add_argument("--output-dir", type=Path, default=Path("quickstart_output"), help="for the files")
    options = parser.parse_args(arguments)
    try:
        torch.zeros((), device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {options.device} is not available here: {str(error).splitlines()[0]}")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)  # networks as small as these are slower with more

    figure = plt.figure(figsize=(13, 6), layout="constrained")
    parts: Any = figure.subfigures(1, 2, width_ratios=(3, 1.25))
    bands, panels = parts
    axes = bands.subplots(2, 3, sharex=True, sharey=True)
    scores: dict[str, dict[str, Any]] = {}
    for (name, method), ax in zip(METHODS.items(), axes.flat, strict=True):
        scores[name] = {}
        for task_name, make in TASKS.items():
            task = make(options.seed)
            task.epochs = options.epochs or task.epochs
            pyro.clear_param_store()  # the models have parameters of the same names
            pyro.set_rng_seed(options.seed)
            print(f"{task_name}: {name}")
            model, guide = train(method, task, KL_WEIGHTS[task_name][name], options.device)
            scores[name] |= score(task_name, task, method, model, guide)
            if task_name == "curve":
                line = dvi.predict(model, guide, task.others["line"], method.rule, seed=0)
                dvi.plots.regression_band(task.others["line"], line, data=task.train, ax=ax)
                ax.set(title=name, xlabel="", ylabel="", ylim=(-3, 3))
                ax.get_legend().remove()
            elif name == "MNVI":
                posterior = dvi.to_arviz(model, guide, task.test, sites=["net.2.bias"])
                posterior.to_netcdf(options.output_dir / "posterior.nc")
    print_table(scores)

    axes[0, 0].legend(loc="lower right", fontsize="x-small")
    bands.suptitle("A curve with a gap: mean, posterior and noise (two standard deviations)")
    panels.suptitle("Digits under noise")
    dvi.plots.compare(
        {name: {"nll": row["digits nll"], "auroc": row["digits auroc"]} for name, row in scores.items()},
        axes=panels.subplots(2, 1),
    )
    figure.savefig(options.output_dir / "quickstart.png", dpi=110)
    plt.close(figure)
    print(f"\nFigure: {options.output_dir / 'quickstart.png'}")
    print(f"Posterior for ArviZ: az.from_netcdf({str(options.output_dir / 'posterior.nc')!r})")
    return scores


def score(name: str, task: Task, method: Method, model: Any, guide: Any) -> dict[str, Any]:
    """Return test scores: likelihood, and how well a method knows what it has not seen."""
    prediction = dvi.predict(model, guide, task.test, method.rule, seed=0)
    metrics = prediction.metrics()
    found: dict[str, Any] = {
        f"{name} nll": dvi.metrics.Estimate(metrics["nll"], metrics["nll_standard_error"])
    }
    if name == "curve":
        gap = dvi.predict(model, guide, task.others["gap"], method.rule, seed=0)
        for place, there in (("data", prediction), ("gap", gap)):
            found[f"curve sd {place}"] = float(there.epistemic.mean().sqrt())
    else:
        strange = dvi.predict(model, guide, task.others["shuffled"], method.rule, seed=0)
        found |= {"digits accuracy": metrics["accuracy"], "digits ece": metrics["ece"]}
        found["digits auroc"] = float(dvi.metrics.auroc(prediction.entropy, strange.entropy))
    return found


def print_table(scores: dict[str, dict[str, Any]]) -> None:
    """Print a row for each method."""
    print(f"\n{'':19} | {'digits under noise':^43} | {'curve with a gap':^25}")
    columns = (
        f"{'NLL':>13} {'accuracy':>10} {'ECE':>7} {'AUROC':>10} | {'NLL':>6} {'sd, data':>9} {'sd, gap':>8}"
    )
    print(f"{'':19} | {columns}")
    for name, row in scores.items():
        nll = f"{row['digits nll'].value:.3f} ± {row['digits nll'].standard_error:.3f}"
        digits = f"{row['digits accuracy']:>10.1%} {row['digits ece']:>7.1%} {row['digits auroc']:>10.3f}"
        curve = f"{row['curve nll'].value:>6.2f} {row['curve sd data']:>9.3f} {row['curve sd gap']:>8.3f}"
        print(f"{name:19} | {nll:>13} {digits} | {curve}")
    print(
        "NLL in nats, lower is better. AUROC: digits with shuffled pixels, told from others by the entropy.\n"
        "sd: of the posterior's curve, where data are and in the gap; what is predicted at one point has none.\n"
        "This is one seed: docs/benchmarks/index.md has five, and what each method costs."
    )


if __name__ == "__main__":
    main()
