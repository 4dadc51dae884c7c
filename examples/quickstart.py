# SPDX-License-Identifier: Apache-2.0
"""Give a trained network error bars.

A network is trained as usual on points of a curve with a gap. In the gap, it is as confident as anywhere else.
`dvi.Laplace` puts a Gaussian around its weights. For reference, Hamiltonian Monte Carlo samples the posterior of the
same model. `python -m benchmarks run quickstart` repeats the table for five seeds.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from monte_carlo import monte_carlo
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import pyro_dvi as dvi

matplotlib.use("Agg")  # plots to a file; no display is needed
import matplotlib.pyplot as plt  # noqa: E402

NOISE, HIDDEN = 0.1, 30
PRIOR_SCALES = {"0.*": 2.0, "2.*": 0.5}  # of the weights and biases of the two layers
GAP, LINE = torch.linspace(-0.5, 0.5, 41)[:, None], torch.linspace(-3.2, 3.2, 257)[:, None]


class Pair(NamedTuple):
    """Inputs and observations."""

    x: Tensor
    y: Tensor


class Band(NamedTuple):
    """Mean, variance of the function, and variance of observations, at each input."""

    mean: Tensor
    epistemic: Tensor
    variance: Tensor


def curve(seed: int) -> tuple[Pair, Pair]:
    """Return noisy points of a sine, 200 to train and 500 to test, none of them between -1 and 1."""
    generator = torch.Generator().manual_seed(seed)

    def points(count: int) -> Pair:
        x = 1 + 1.5 * torch.rand(count, 1, generator=generator)
        x[: count // 2] *= -1
        y = torch.sin(2 * x) + NOISE * torch.randn(count, 1, generator=generator)
        return Pair(x, y.squeeze(-1))

    return points(200), points(500)


def train_network(data: Pair, epochs: int = 1000) -> nn.Sequential:
    """Train a network with plain torch; the weight decay of each layer corresponds to its prior."""
    net = nn.Sequential(nn.Linear(1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, 1))
    decays = [1 / (len(data.y) * scale**2) for scale in PRIOR_SCALES.values()]
    layers = [
        {"params": net[i].parameters(), "weight_decay": decay}
        for i, decay in zip((0, 2), decays, strict=True)
    ]
    adam = torch.optim.Adam(layers, lr=0.1)
    schedule = CosineAnnealingLR(adam, epochs)
    for _ in range(epochs):
        adam.zero_grad()
        (0.5 * ((data.y - net(data.x).squeeze(-1)) / NOISE).square().mean()).backward()
        adam.step()
        schedule.step()
    return net


def with_error_bars(net: nn.Module, data: Pair, polish: bool = True) -> Any:
    """Put a Gaussian around all weights of a trained network, at the minimum to which ``polish`` moves them."""
    method = dvi.Laplace(layers=None, prior_scale=PRIOR_SCALES, noise_scale=NOISE, polish=polish)
    return method.fit(net, [data], progress=False)


def functions(u: Tensor, x: Tensor) -> Tensor:
    """Return the network's outputs ``[*batch, inputs]``; u are weights divided by prior scales, ``[*batch, 91]``."""
    first, bias, last, shift = u.split((HIDDEN, HIDDEN, HIDDEN, 1), -1)
    inner, outer = PRIOR_SCALES.values()
    hidden = torch.tanh(inner * (first.unsqueeze(-1) * x.squeeze(-1) + bias.unsqueeze(-1)))
    return outer * ((last.unsqueeze(-2) @ hidden).squeeze(-2) + shift)


def energy(u: Tensor, data: Pair) -> Tensor:
    """Return the negative log posterior density of each chain, up to a constant."""
    return 0.5 * ((data.y - functions(u, data.x)) / NOISE).square().sum(-1) + 0.5 * u.square().sum(-1)


def sample(data: Pair, draws: int = 100) -> Tensor:
    """Sample the posterior with twelve chains of Hamiltonian Monte Carlo; return u, ``[draws, chains, 91]``."""
    return monte_carlo(lambda u: energy(u, data), torch.randn(12, 3 * HIDDEN + 1), draws)


def band(outputs: Tensor) -> Band:
    """Summarise the outputs of several functions, ``[functions, inputs]``."""
    mean, variance = outputs.detach().mean(0), outputs.detach().var(0, correction=0)
    return Band(mean, variance, variance + NOISE**2)


def predictors(net: nn.Module, posterior: Any, weights: Tensor) -> dict[str, Callable[[Tensor], Any]]:
    """Return what predicts before and after, and the reference."""
    return {
        "trained network": lambda x: band(net(x).mT),
        "with dvi.Laplace": posterior.predict,
        "Hamiltonian Monte Carlo": lambda x: band(functions(weights.flatten(0, 1), x)),
    }


def scores(predict: Callable[[Tensor], Any], test: Pair) -> dict[str, float]:
    """Return the test NLL, and the standard deviation of the function at the test inputs and in the gap."""
    found = predict(test.x)
    density = torch.distributions.Normal(found.mean, found.variance.sqrt())
    sd = {place: float(predict(x).epistemic.mean().sqrt()) for place, x in (("data", test.x), ("gap", GAP))}
    return {"nll": -float(density.log_prob(test.y).mean()), "sd data": sd["data"], "sd gap": sd["gap"]}


def main(arguments: list[str] | None = None) -> dict[str, dict[str, float]]:
    """Train, draw the figure, save the posterior, and print and return the scores of each method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=1000, help="training epochs (default: 1000)")
    parser.add_argument("--draws", type=int, default=100, help="draws per Monte Carlo chain (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="random seed for data and weights (default: 0)")
    parser.add_argument("--output-dir", type=Path, default=Path("quickstart_output"), help="output folder")
    options = parser.parse_args(arguments)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    picture, file = options.output_dir / "quickstart.png", options.output_dir / "posterior.nc"
    torch.set_num_threads(1)  # more threads slow down a network this small

    print("training, Laplace, then Monte Carlo (about a minute)\n")
    train, test = curve(options.seed)
    torch.manual_seed(options.seed)
    net = train_network(train, options.epochs)
    posterior = with_error_bars(net, train)
    methods = predictors(net, posterior, sample(train, options.draws))
    found = {name: scores(predict, test) for name, predict in methods.items()}

    plt.rcParams["font.size"] = 9
    figure, axes = plt.subplots(1, 3, figsize=(6.4, 2.7), sharex=True, sharey=True, layout="constrained")
    for (name, predict), ax in zip(methods.items(), axes, strict=True):
        dvi.plots.regression_band(LINE, predict(LINE), data=train, ax=ax)
        ax.set(title=name, xlabel="", ylabel="", ylim=(-3, 3))
        ax.title.set_size(10)
        ax.get_legend().remove()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(picture, dpi=200)
    plt.close(figure)
    posterior.to_arviz(test).to_netcdf(file)

    print(f"{'':23} | {'NLL':>6} {'sd, data':>9} {'sd, gap':>8}")
    for name, row in found.items():
        print(f"{name:23} | {row['nll']:>6.3f} {row['sd data']:>9.3f} {row['sd gap']:>8.3f}")
    print("\nNLL: negative log-likelihood of test points; lower is better.")
    print("sd: standard deviation of the function, where there are data and in the gap.")
    print(f"\nFigure: {picture}\nPosterior for ArviZ: az.from_netcdf({str(file)!r})")
    return found


if __name__ == "__main__":
    main()
