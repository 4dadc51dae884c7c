# SPDX-License-Identifier: Apache-2.0
"""Give a trained network error bars, and compare Bayesian training with tuned baselines.

The first task is regression with a gap in the data. A torch network is trained as usual. LaplaceGuide then puts a
Gaussian around its weights, and Hamiltonian Monte Carlo samples the posterior of the same model for reference.

The second task is classification of scikit-learn's handwritten digits, with so much pixel noise that some digits cannot
be recognised. The methods are

  MAP                  the most probable weights: Pyro's AutoDelta
  MAP, scaled          MAP with logits divided by a temperature fitted on validation data
  ensemble of 5 MAP    five MAP networks, with averaged probabilities
  Laplace              LaplaceGuide: a Gaussian around the MAP weights; its width is chosen on validation data
  Variational Laplace  MeanFieldGuide and TaylorELBO: trained without sampling, predicts at the posterior mean
  VOGN                 NaturalGradientGuide and NaturalGradientELBO: one weight sample per step, predicts with samples

`python -m benchmarks run quickstart` chose the step size, prior scale and temperature of every method on validation
data, with a seed not used here, and repeats the tables for five seeds.
"""

import argparse
import warnings
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import pyro
import torch
from monte_carlo import monte_carlo
from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi

matplotlib.use("Agg")  # plots to a file; no display is needed
import matplotlib.pyplot as plt  # noqa: E402

Pair = tuple[Tensor, Tensor]
Row = dict[str, Any]

# Chosen on validation data. "prior" multiplies the prior scales: 2 and 0.5 for the two layers of the curve's network,
# He's scale for the digits. "max_step" is VOGN's step size.
SETTINGS: dict[str, dict[str, Any]] = {
    "curve": {"lr": 0.1, "prior": 1.0},
    "MAP": {"lr": 0.003, "prior": 3.0},
    "ensemble of 5 MAP": {"lr": 0.003, "prior": 3.0},
    "Laplace": {"lr": 0.003, "prior": 3.0, "weights": "last layer"},
    "Variational Laplace": {"lr": 0.01, "prior": 5.0, "temperature": 0.1},
    "VOGN": {"max_step": 0.15, "prior": 3.0, "temperature": 0.1},
}


@dataclass
class Data:
    """Inputs and observations for training, validation and testing, and named sets of other inputs."""

    train: Pair
    validation: Pair
    test: Pair
    others: dict[str, Tensor]


# --- a curve with a gap ----------------------------------------------------------------------------------

NOISE, HIDDEN, LAYERS = 0.1, 30, {"0": 2.0, "2": 0.5}  # prior scale of each layer


def curve(seed: int) -> Data:
    """Two hundred noisy points of a sine, none between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def points(count: int) -> Pair:
        x = 1 + 1.5 * torch.rand(count, 1, generator=generator)
        x[: count // 2] *= -1
        y = torch.sin(2 * x) + NOISE * torch.randn(count, 1, generator=generator)
        return x, y.squeeze(-1)

    others = {"gap": torch.linspace(-0.5, 0.5, 41)[:, None], "line": torch.linspace(-3.2, 3.2, 257)[:, None]}
    return Data(points(200), test=points(500), validation=points(200), others=others)


def train_network(data: Data, lr: float, prior: float, epochs: int = 1000) -> nn.Sequential:
    """Train a network with plain torch; the weight decay of each layer corresponds to its prior."""
    net, (x, y) = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1)), data.train
    decay = {name: 1 / (len(y) * (prior * scale) ** 2) for name, scale in LAYERS.items()}
    layers = [{"params": net.get_submodule(name).parameters(), "weight_decay": decay[name]} for name in decay]
    adam = torch.optim.Adam(layers, lr)
    schedule = CosineAnnealingLR(adam, epochs)
    for _ in range(epochs):
        adam.zero_grad()
        (0.5 * ((y - net(x).squeeze(-1)) / NOISE).square().mean()).backward()
        adam.step()
        schedule.step()
    return net


def with_error_bars(net: nn.Sequential, data: Data, prior: float) -> tuple[Any, Any]:
    """Put a Gaussian around the weights of a trained network."""
    scales = {f"{name}.*": prior * scale for name, scale in LAYERS.items()}
    model = dvi.regressor(dvi.to_bayesian_(deepcopy(net), prior_scale=scales), len(data.train[0]), NOISE)
    guide = dvi.LaplaceGuide(model)
    guide.polish([data.train], progress=False)  # moves the weights to the minimum
    guide.fit([data.train])
    return model, guide


def functions(u: Tensor, x: Tensor, prior: float) -> Tensor:
    """Return the network's outputs ``[*batch, inputs]``; u are weights divided by prior scales, ``[*batch, 91]``."""
    scales = prior * torch.tensor([LAYERS["0"]] * 2 * HIDDEN + [LAYERS["2"]] * (HIDDEN + 1))
    first, bias, last, shift = (u * scales).split((HIDDEN, HIDDEN, HIDDEN, 1), -1)
    hidden = torch.tanh(first.unsqueeze(-1) * x.squeeze(-1) + bias.unsqueeze(-1))
    return (last.unsqueeze(-2) @ hidden).squeeze(-2) + shift


def energy(u: Tensor, data: Data, prior: float) -> Tensor:
    """Return the negative log posterior density of each chain, up to a constant."""
    x, y = data.train
    return 0.5 * ((y - functions(u, x, prior)) / NOISE).square().sum(-1) + 0.5 * u.square().sum(-1)


Curve = Callable[[Tensor], dict[str, Tensor]]


def curves(seed: int, epochs: int | None = None, draws: int = 100) -> tuple[Data, dict[str, Curve], Tensor]:
    """Return the data, each method's mean and variances as functions of the input, and the Monte Carlo draws."""
    data, prior = curve(seed), SETTINGS["curve"]["prior"]
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    net = train_network(data, **SETTINGS["curve"], epochs=epochs or 1000)
    model, guide = with_error_bars(net, data, prior)
    weights = monte_carlo(partial(energy, data=data, prior=prior), torch.randn(12, 3 * HIDDEN + 1), draws)

    def of(values: Tensor) -> dict[str, Tensor]:
        variance = values.detach().var(0, correction=0)
        return {"mean": values.detach().mean(0), "epistemic": variance, "variance": variance + NOISE**2}

    def of_guide(x: Tensor) -> dict[str, Tensor]:
        found = dvi.predict(model, guide, x)
        return {name: getattr(found, name) for name in ("mean", "epistemic", "variance")}

    found: dict[str, Curve] = {
        "trained network": lambda x: of(net(x).mT),
        "the same with LaplaceGuide": of_guide,
        "Hamiltonian Monte Carlo": lambda x: of(functions(weights.flatten(0, 1), x, prior)),
    }
    return data, found, weights


def curve_scores(data: Data, predict: Curve) -> Row:
    """Return the test NLL, and the standard deviation of the function at the test inputs and in the gap."""
    (x, y), found = data.test, predict(data.test[0])
    density = torch.distributions.Normal(found["mean"], found["variance"].sqrt())
    row = {"nll": float(-density.log_prob(y).mean())}
    for place, inputs in (("data", x), ("gap", data.others["gap"])):
        row[f"sd {place}"] = float(predict(inputs)["epistemic"].mean().sqrt())
    return row


# --- noisy digits ----------------------------------------------------------------------------------------


def noisy_digits(seed: int) -> Data:
    """Return 600 of the 8 x 8 digits for training and 897 for testing, with noise on pixels in the range 0 to 1."""
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float(), torch.tensor(labels)
    fixed = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    chosen = fixed[300:][torch.randperm(len(x) - 300, generator=generator)]
    x = x + 0.4 * torch.randn(x.shape, generator=generator)
    rows = {"train": chosen[:600], "test": chosen[600:], "validation": fixed[:300]}
    parts = {name: (x[places], y[places]) for name, places in rows.items()}
    order = torch.rand(len(parts["test"][0]), 64, generator=generator).argsort(1)
    return Data(**parts, others={"shuffled": parts["test"][0].gather(1, order)})


@dataclass
class Training:
    """Data, number of epochs and device, with one training function for each compared method."""

    data: Data
    epochs: int = 120
    device: str = "cpu"

    def __post_init__(self) -> None:
        self.loader = DataLoader(TensorDataset(*self.data.train), batch_size=100, shuffle=True)

    def build(self, prior: float) -> Any:
        """Return the model with an untrained network."""
        net = nn.Sequential(nn.Linear(64, 100), nn.Softplus(), nn.Linear(100, 10))
        net = dvi.to_bayesian_(net, prior_scale=lambda *site: prior * dvi.bayesian.fan_in(*site))
        return dvi.classifier(net, num_data=600)

    def run(self, guide: Any, model: Any, elbo: Any, optimizer: Any) -> tuple[Any, Any]:
        """Train; a float as optimizer is Adam's initial learning rate, which decays to zero."""
        if isinstance(optimizer, float):
            schedule = partial(CosineAnnealingLR, T_max=self.epochs)
            optimizer = dvi.optim.Adam(optimizer, scheduler=schedule)
        posterior = guide(model)
        dvi.fit(SVI(model, posterior, optimizer, loss=elbo), self.loader, self.epochs, device=self.device)
        return model, posterior

    def point(self, lr: float, prior: float) -> tuple[Any, Any]:
        """Maximum a posteriori."""
        guide = partial(AutoDelta, init_loc_fn=dvi.bayesian.init_to_module)
        return self.run(guide, self.build(prior), dvi.SampledELBO(), lr)

    def ensemble(self, lr: float, prior: float) -> tuple[Any, Any]:
        """An ensemble of five MAP networks."""
        train = partial(self.point, lr, prior)
        return dvi.train_ensemble(train, 5, seed=torch.initial_seed(), progress=False)

    def laplace(self, lr: float, prior: float, weights: str) -> tuple[Any, Any]:
        """A Gaussian around the MAP weights: of the last layer or, with Kronecker factors, of all weights."""
        model, guide = self.run(dvi.LaplaceGuide, self.build(prior), dvi.SampledELBO(), lr)
        last = weights == "last layer"
        method = dvi.laplace.Dense() if last else dvi.laplace.KroneckerFactored()
        subset = "net.2.*" if last else None
        # The Gauss-Newton matrix does not require an exact minimum.
        guide.fit(self.loader, method, subset=subset, unconverged="accept")
        criterion = dvi.laplace.ByValidation([self.data.validation])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", dvi.errors.DviWarning)  # warns if the narrowest Gaussian is best
            guide.tune(self.loader, criterion=criterion, unconverged="accept", progress=False)
        return model, guide

    def variational_laplace(self, lr: float, prior: float, temperature: float) -> tuple[Any, Any]:
        """A factorised Gaussian, trained without sampling."""
        return self.run(dvi.MeanFieldGuide, self.build(prior), dvi.TaylorELBO(temperature=temperature), lr)

    def vogn(self, max_step: float, prior: float, temperature: float) -> tuple[Any, Any]:
        """A factorised Gaussian, trained with natural gradients."""
        elbo, optimizer = dvi.NaturalGradientELBO(temperature=temperature), dvi.VOGN({"max_step": max_step})
        return self.run(dvi.NaturalGradientGuide, self.build(prior), elbo, optimizer)


METHODS: dict[str, Callable[..., tuple[Any, Any]]] = {
    "MAP": Training.point,
    "ensemble of 5 MAP": Training.ensemble,
    "Laplace": Training.laplace,
    "Variational Laplace": Training.variational_laplace,
    "VOGN": Training.vogn,
}
RULES = {"VOGN": dvi.Samples(30)}
SCALED = "MAP, scaled"


def probabilities(name: str, model: Any, guide: Any, x: Tensor) -> Tensor:
    """Return class probabilities, predicted with the rule of the method."""
    return dvi.predict(model, guide, x, RULES.get(name), seed=0).probabilities.cpu()


def nll(p: Tensor, labels: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the negative log-likelihood of each label, with logits divided by a temperature."""
    return nn.functional.cross_entropy(p.clamp_min(1e-12).log() / temperature, labels, reduction="none")


def digit_scores(name: str, training: Training) -> tuple[dict[str, Row], Any, Any]:
    """Train with the chosen settings; return test scores (for MAP also after temperature scaling), model and guide."""
    data, (x, labels) = training.data, training.data.test
    model, guide = METHODS[name](training, **SETTINGS[name])
    predict = partial(probabilities, name, model, guide)
    p, strange, seen = map(predict, (x, data.others["shuffled"], data.validation[0]))

    def scores(temperature: float = 1.0) -> Row:
        of_test, of_strange = ((q.clamp_min(1e-12).log() / temperature).softmax(-1) for q in (p, strange))
        rows, entropies = nll(of_test, labels), [torch.special.entr(q).sum(-1) for q in (of_test, of_strange)]
        return {
            "nll": dvi.metrics.Estimate(float(rows.mean()), float(rows.std()) / len(rows) ** 0.5),
            "accuracy": float((of_test.argmax(-1) == labels).float().mean()),
            "ece": float(dvi.metrics.expected_calibration_error(of_test, labels)),
            "auroc": float(dvi.metrics.auroc(*entropies)),
        }

    found = {name: scores()}
    if name == "MAP":
        candidates = torch.logspace(-2, 2, 200, base=2.0).tolist()
        found[SCALED] = scores(min(candidates, key=lambda t: float(nll(seen, data.validation[1], t).mean())))
    return found, model, guide


# --- both ------------------------------------------------------------------------------------------------


def main(arguments: list[str] | None = None) -> dict[str, dict[str, Row]]:
    """Run everything and return the scores by task and method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--epochs", type=int, help="training epochs (default: 1000 for the curve, 120 for the digits)"
    )
    parser.add_argument("--draws", type=int, default=100, help="draws per Monte Carlo chain (default: 100)")
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed for data, weights and batches (default: 0)"
    )
    parser.add_argument(
        "--device", default="cpu", help="device for the digits; the curve stays on the CPU (default: cpu)"
    )
    parser.add_argument("--output-dir", type=Path, default=Path("quickstart_output"), help="output folder")
    options = parser.parse_args(arguments)
    try:
        torch.zeros((), device=options.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device {options.device} is not available here: {str(error).splitlines()[0]}")
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture, file = options.output_dir / "quickstart.png", options.output_dir / "posterior.nc"
    torch.set_num_threads(1)  # more threads slow down networks this small

    figure = plt.figure(figsize=(9, 6.4), layout="constrained")
    parts: Any = figure.subfigures(2, 1, height_ratios=(3, 2))
    axes = parts[0].subplots(1, 3, sharex=True, sharey=True)
    print("curve: training, Laplace, then Monte Carlo")
    data, predicted, _ = curves(options.seed, options.epochs, options.draws)
    scores: dict[str, dict[str, Row]] = {"curve": {}, "digits": {}}
    for (name, predict), ax in zip(predicted.items(), axes, strict=True):
        scores["curve"][name] = curve_scores(data, predict)
        line = data.others["line"]
        dvi.plots.regression_band(line, predict(line), data=data.train, ax=ax)
        ax.set(title=name, xlabel="", ylabel="", ylim=(-3, 3))
        ax.get_legend().remove()
    parts[0].legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    parts[0].suptitle("A curve with a gap: mean, posterior and noise (two standard deviations)")

    training = Training(noisy_digits(options.seed), options.epochs or 120, options.device)
    for name in METHODS:
        pyro.clear_param_store()  # the models share parameter names
        pyro.set_rng_seed(options.seed)
        print(f"digits: {name}")
        rows, model, guide = digit_scores(name, training)
        scores["digits"] |= rows
        if name == "Variational Laplace":
            dvi.to_arviz(model, guide, training.data.test, sites=["net.2.bias"]).to_netcdf(file)
    shown = {name: {"NLL": row["nll"], "AUROC": row["auroc"]} for name, row in scores["digits"].items()}
    dvi.plots.compare(shown, axes=parts[1].subplots(1, 2, sharey=True))
    parts[1].suptitle("Noisy digits")
    figure.savefig(picture, dpi=160)
    plt.close(figure)
    print_tables(scores)
    print(f"\nFigure: {picture}\nPosterior for ArviZ: az.from_netcdf({str(file)!r})")
    return scores


def print_tables(scores: dict[str, dict[str, Row]]) -> None:
    """Print a row for each method."""
    print(f"\n{'curve with a gap':27} | {'NLL':>6} {'sd, data':>9} {'sd, gap':>8}")
    for name, row in scores["curve"].items():
        print(f"{name:27} | {row['nll']:>6.2f} {row['sd data']:>9.3f} {row['sd gap']:>8.3f}")
    print(f"\n{'noisy digits':27} | {'NLL':>13} {'accuracy':>9} {'ECE':>6} {'AUROC':>6}")
    for name, row in scores["digits"].items():
        estimate = f"{row['nll'].value:.3f} ± {row['nll'].standard_error:.3f}"
        print(f"{name:27} | {estimate} {row['accuracy']:>9.1%} {row['ece']:>6.1%} {row['auroc']:>6.3f}")
    print(
        "\nNLL in nats ± standard error; lower is better. AUROC: detection of digits with shuffled pixels by entropy.\n"
        "sd: standard deviation of the function, on the data and in the gap. docs/benchmarks/index.md shows five seeds."
    )


if __name__ == "__main__":
    main()
