# SPDX-License-Identifier: Apache-2.0
"""How close do propagated moments come to the truth? Standard deviations of logits against draws of the weights.

Every net is trained for a short time on scikit-learn's digits (ResNet-18 keeps its random start) and is given a
Gaussian posterior around its weights, the same standard deviation for all weights of a layer: a tenth of their root
mean square, or a twentieth. The truth is brute force: the net at many drawn weights, in float64. For each way of
propagation the table has

- the ratio of its standard deviation to the sampled one, averaged over examples and logits;
- the rank correlation of the two over examples, averaged over logits: does it know which inputs are uncertain?
- the error of the mean, |m - m_sampled| / sd, averaged, of which Monte-Carlo noise explains about 0.8 / sqrt(draws);
- its cost over a plain forward pass with moments, interleaved, for all logits and for one.
"""

import copy
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.func import functional_call

from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.networks import lenet, resnet18_cifar
from benchmarks.shared.tables import provenance, table
from pyro_dvi import MeanFieldGuide, classifier, to_bayesian_
from pyro_dvi.curvature.reverse_delta import ReverseDeltaRecorder
from pyro_dvi.moments.dispatch import observed_by
from pyro_dvi.predictive.engine.inputs import Batch
from pyro_dvi.predictive.engine.model_runs import evaluation_mode, respond
from pyro_dvi.predictive.engine.posterior_values import posterior_gaussians
from pyro_dvi.predictive.rules.analytic import Independent, Propagation, ReverseDelta
from pyro_dvi.runs.posterior_run import PosteriorMoments, median
from pyro_dvi.runs.uncertain import uncertain_likelihoods, uncertain_part

ROUNDS = 3  # at least; more for small nets


class Skip(nn.Module):
    """A layer and a skip connection: relu(h) + h."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return torch.relu(h) + h


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(h)))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))


def skip_mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), Skip(50), Skip(50), Skip(50), nn.Linear(50, 10))


def small_resnet(width: int = 8) -> nn.Module:
    stem = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
    blocks = (Block(width) for _ in range(3))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=128, num_classes=10
    )


# Name -> net, size of the images, epochs, deviation over weights, examples, share of the draws.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], int, float, int, float]] = {
    "MLP, one hidden layer": (mlp, (1, 8, 8), 10, 0.1, 100, 1.0),
    "MLP with skips, 5 layers": (skip_mlp, (1, 8, 8), 10, 0.1, 100, 1.0),
    "MLP with skips, 5 layers, half the noise": (skip_mlp, (1, 8, 8), 10, 0.05, 100, 1.0),
    "LeNet (softplus)": (lenet, (1, 28, 28), 5, 0.1, 50, 1.0),
    "LeNet (softplus), half the noise": (lenet, (1, 28, 28), 5, 0.05, 50, 1.0),
    "LeNet (ReLU)": (partial(lenet, activation=nn.ReLU), (1, 28, 28), 5, 0.1, 50, 1.0),
    "ResNet, 7 convolutions": (small_resnet, (1, 8, 8), 10, 0.1, 50, 1.0),
    "ResNet, 7 convolutions, half the noise": (small_resnet, (1, 8, 8), 10, 0.05, 50, 1.0),
    "torchvision ResNet-18 (CIFAR stem)": (resnet18_cifar, (3, 32, 32), 0, 0.05, 4, 0.03125),
    "torchvision ViT, 4 layers": (small_vit, (3, 32, 32), 3, 0.05, 20, 0.25),
}


def digits(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    data = load_digits()
    x = torch.tensor(data.images / 8 - 1, dtype=torch.float64)[:, None]
    x = nn.functional.interpolate(x, shape[1:], mode="bilinear")
    return x.expand(-1, shape[0], -1, -1).contiguous(), torch.tensor(data.target)


def train(net: nn.Module, x: Tensor, y: Tensor, epochs: int) -> None:
    if epochs == 0:  # only set the statistics of batch norms
        for module in net.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.momentum = None
        with torch.no_grad():
            net(x[:64])
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(x[rows]), y[rows]).backward()
            optimizer.step()


def sampled(net: nn.Module, scales: dict[str, Tensor], x: Tensor, draws: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of the logits over draws of the weights."""
    params = {name: p.detach() for name, p in net.named_parameters()}

    def once(noise: dict[str, Tensor]) -> Tensor:
        moved = {name: params[name] + noise[name] for name in scales}
        return functional_call(net, {**params, **moved}, (x,))

    mean = squares = torch.zeros(())
    for n in range(draws):
        with torch.no_grad():
            y = once({name: scale * torch.randn_like(params[name]) for name, scale in scales.items()})
        change = y - mean
        mean = mean + change / (n + 1)
        squares = squares + change * (y - mean)
    return mean, squares / (draws - 1)


class Propagated:
    """Logits of a model by one way of propagation after the other."""

    def __init__(self, model: Any, guide: Any, x: Tensor) -> None:
        self.batch = Batch((x,), None, len(x), 0)
        with evaluation_mode(model, guide):
            self.centre, self.marginals = posterior_gaussians(guide, (x,))
        self.model, self.guide = model, guide

    def logits(self, propagation: Propagation) -> Any:
        weights = PosteriorMoments(self.marginals, median)
        with evaluation_mode(self.model, self.guide), uncertain_likelihoods(), weights:
            run = partial(respond, self.model, self.batch, self.centre)
            part = uncertain_part(propagation.respond(weights.given, run).distribution)
        assert part is not None
        return part.parameters["logits"]

    def one_logit(self) -> Tensor:
        """The reverse delta method for the first logit only."""
        weights = PosteriorMoments(self.marginals, median)
        recorder = ReverseDeltaRecorder(weights.given)
        run = partial(respond, self.model, self.batch, self.centre)
        with evaluation_mode(self.model, self.guide), uncertain_likelihoods(), weights:
            with torch.enable_grad(), observed_by(recorder):
                part = uncertain_part(run().distribution)
                assert part is not None
                out = part.parameters["logits"][:, :1]
            return recorder.variance(out, 0)


def ranks(x: Tensor) -> Tensor:
    return x.argsort(0).argsort(0).double()


def rank_correlation(a: Tensor, b: Tensor) -> float:
    """Spearman's, over examples, averaged over logits."""
    a, b = (ranks(t) - ranks(t).mean(0) for t in (a, b))
    return ((a * b).sum(0) / (a.square().sum(0) * b.square().sum(0)).sqrt()).mean().item()


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for every network; more draws with a large budget."""
    return [{"case": case, "seed": 0, "draws": 4096 if budget == "small" else 65_536} for case in CASES]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Compare every way of propagation with draws, on one network."""
    torch.set_default_dtype(torch.float64)
    case = settings["case"]
    make, shape, epochs, noise, num_examples, share = CASES[case]
    draws = round(share * settings["draws"])
    x, y = digits(shape)
    net = make().double()
    train(net, x[:1000], y[:1000], epochs)
    net.eval()
    inputs = x[1000 : 1000 + num_examples]
    model = classifier(to_bayesian_(copy.deepcopy(net)), num_data=1000)
    guide = MeanFieldGuide(model)
    guide.initialize(inputs, y[:num_examples])
    scales = {}
    with torch.no_grad():
        sites = dict(guide.scales.named_parameters())
        for name, p in net.named_parameters():
            found = [site for site in sites if site.removesuffix("_unconstrained") == f"net.{name}"]
            if found:
                scales[name] = noise * p.detach().square().mean().sqrt()
                sites[found[0]].fill_(scales[name].log())
    truth_mean, truth_variance = sampled(net, scales, inputs, draws)
    sd = truth_variance.sqrt()
    propagated = Propagated(model, guide, inputs)
    ways: dict[str, Propagation] = {"independent": Independent(), "reverse delta": ReverseDelta()}
    times: dict[str, list[float]] = {name: [] for name in (*ways, "one")}
    began = time.perf_counter()
    for k in range(100 * ROUNDS):
        if k > ROUNDS and time.perf_counter() - began > 10 * ROUNDS:
            break
        for name in times:
            start = time.perf_counter()
            if name == "one":
                propagated.one_logit()
            else:
                propagated.logits(ways[name])
            if k > 0:
                times[name].append(time.perf_counter() - start)
    cost = {
        name: statistics.median([a / b for a, b in zip(values, times["independent"], strict=True)])
        for name, values in times.items()
    }
    rows = []
    for name, way in ways.items():
        logits = propagated.logits(way)
        ours = logits.variance.detach().sqrt()
        ratio = ours / sd
        rows.append(
            {
                "propagation": name,
                "sd_ratio": ratio.mean().item(),
                "sd_ratio_spread": ratio.std().item(),
                "rank_correlation": rank_correlation(ours, sd),
                "mean_error": ((logits.loc.detach() - truth_mean).abs() / sd).mean().item(),
                "cost": cost[name],
                "cost_of_one": cost["one"] if name == "reverse delta" else None,
            }
        )
    return {"drawn": draws, "examples": num_examples, "noise": noise, "ways": rows}


def report(rows: list[Row], folder: Path) -> str:
    """A table for each network."""
    text = [
        provenance("moments_deviations", rows),
        "Propagated standard deviations of the logits, compared with Monte Carlo estimates from sampled weights, in "
        "float64. Cost is relative to a plain pass with moments (in brackets: cost for a single logit).",
    ]
    header = [
        "propagation",
        "sd ratio",
        "spread of the ratio",
        "rank correlation",
        "error of the mean",
        "cost",
    ]
    for row in sorted(rows, key=lambda row: list(CASES).index(row["case"])):
        floor = math.sqrt(2 / math.pi / row["drawn"])
        text.append(
            f"**{row['case']}**: relative noise of the weights {row['noise']}, {row['examples']} examples, "
            f"{row['drawn']} weight samples; Monte Carlo error of the mean {floor:.3f}"
        )
        lines = []
        for way in row["ways"]:
            numbers = [way[key] for key in ("sd_ratio", "sd_ratio_spread", "rank_correlation", "mean_error")]
            one = f" ({way['cost_of_one']:.1f})" if way["cost_of_one"] else ""
            cells = [f"{number:.3f}" for number in numbers]
            lines.append([way["propagation"], *cells, f"{way['cost']:.1f}{one}"])
        text.append(table(header, lines).rstrip())
    return "\n\n".join(text)


BENCHMARK = Benchmark(
    "moments_deviations",
    "How close are propagated standard deviations to Monte Carlo estimates from sampled weights?",
    plan,
    run,
    report,
    timed=True,
)
