# SPDX-License-Identifier: Apache-2.0
"""LeNet on MNIST as Schmitt & Roth (2021) train it: MNVI, MFVI, MAP and MC dropout, at one size.

As printed there and in the authors' commands: 5 x 5 convolutions of 32 and 64 channels and 1,024 hidden units, Xavier
weights, priors of precision 1,000, Adam with AMSGrad and a step size of .001 that falls tenfold at half of the
training, gradients shortened to a largest entry of .1 (of the mean loss), minibatches of 64, variances of hidden units
of at least 1e-5, eight masks of dropout. Weights of the divergence are theirs, 2e-7 (MNVI) and 5e-7 (MFVI) beside the
mean loss of 55,000 images: .011 and .0275 beside a sum. In the short trainings of the small budget step sizes of
posterior scales are tenfold: MFVI starts at the prior, far from where its variances end.
"""

import math
from functools import partial
from pathlib import Path
from statistics import median
from time import process_time
from typing import Any

from pyro.infer import SVI
from pyro.infer.autoguide import AutoDelta
from torch import Tensor, nn
from torch.optim.lr_scheduler import MultiStepLR
from torch.utils.data import DataLoader, TensorDataset

import pyro_dvi as dvi
from benchmarks.moments import image_tables
from benchmarks.moments.images import scores
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.images import load_split
from benchmarks.shared.methods import with_dropout
from pyro_dvi.guides import PerWeight
from pyro_dvi.predictive import AtMean, Moments, Samples

PRIOR_SCALE = 1000**-0.5
FULL = 55_000  # training images of the paper, beside which the weights of the divergence are printed
DROPOUT, MASKS = 0.1, 8  # the rate is ours
KL_WEIGHTS = {"MNVI": 2e-7 * FULL, "MFVI": 5e-7 * FULL, "MAP": 2e-7 * FULL, "MC dropout": 2e-7 * FULL}
RULES = {"MNVI": Moments(), "MFVI": Moments(), "MAP": AtMean(), "MC dropout": Samples(MASKS)}
TIMED, REPEATS = 500, 5  # images of a timed prediction, and how often


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Every method with every seed."""
    small = {"num_train": 5_000, "num_test": 3_000, "epochs": 4, "scale_rate": 10.0, "seeds": 3}
    full = {"num_train": FULL, "num_test": 10_000, "epochs": 20, "scale_rate": 1.0, "seeds": 5}
    size = small if budget == "small" else full
    seeds = range(int(size.pop("seeds")))
    return [{"method": method, **size, "seed": seed} for seed in seeds for method in KL_WEIGHTS]


def network() -> nn.Sequential:
    """The LeNet of the authors' code, with its start."""
    net = nn.Sequential(
        nn.Conv2d(1, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(1024, 1024),
        nn.ReLU(),
        nn.Linear(1024, 10),
    )
    for name, parameter in net.named_parameters():
        nn.init.zeros_(parameter) if name.endswith("bias") else nn.init.xavier_normal_(parameter)
    return net


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train and test a method once."""
    method, epochs = settings["method"], settings["epochs"]
    data = load_split("MNIST", settings["num_train"], 0, settings["num_test"], settings["seed"], data_dir)
    model, guide = trained(method, data.train, epochs, settings["scale_rate"])
    found = scores(model, guide, data.test, RULES[method])
    parameters = sum(p.numel() for p in {*model.parameters(), *guide.parameters()})
    time = relative_time(model, guide, data.test[0][:TIMED], method)
    return {**found, "parameters": parameters, "relative_time": time}


def trained(method: str, train: tuple[Tensor, Tensor], epochs: int, scale_rate: float) -> tuple[Any, Any]:
    """Return a model and its trained guide."""
    net = network().to(train[0].device)
    net = with_dropout(net, DROPOUT) if method == "MC dropout" else net
    # Their MNVI has neither a prior nor a posterior of biases, their MFVI both.
    bayesian = dvi.to_bayesian_(net, PRIOR_SCALE, exclude=() if method == "MFVI" else "*bias")
    model = dvi.classifier(bayesian, num_data=len(train[0]))
    if method == "MNVI":
        guide: Any = dvi.MultiplicativeNoiseGuide(model, eps=1e-10)
    elif method == "MFVI":
        guide = dvi.MeanFieldGuide(model, scale=PerWeight(log_offset=0.0))  # starts at the prior, as theirs
    else:
        guide = AutoDelta(model, init_loc_fn=dvi.bayesian.init_to_module)
    if method in ("MNVI", "MFVI"):
        elbo: Any = dvi.MomentPropagationELBO(kl_weight=KL_WEIGHTS[method], variance_floor=1e-5)
    else:
        elbo = dvi.SampledELBO(kl_weight=KL_WEIGHTS[method])
    optimizer = dvi.optim.Adam(
        dvi.optim.learning_rates(1e-3, scale_rate, amsgrad=True),
        {"max_norm": 0.1 * len(train[0]), "norm_type": math.inf},
        scheduler=partial(MultiStepLR, milestones=[epochs // 2]),
    )
    loader = DataLoader(TensorDataset(*train), 64, shuffle=True)
    dvi.fit(SVI(model, guide, optimizer, loss=elbo), loader, epochs, progress=False)
    return model, guide


def relative_time(model: Any, guide: Any, x: Tensor, method: str) -> float:
    """Processor time of a prediction over that of one pass at the mean, taken in turn."""

    def seconds(rule: Any) -> float:
        begin = process_time()
        dvi.predict(model, guide, x, rule, seed=0)
        return process_time() - begin

    rules = (RULES[method], AtMean())
    [seconds(rule) for rule in rules]  # prepares
    ours, mean = zip(*[[seconds(rule) for rule in rules] for _ in range(REPEATS)], strict=True)
    return median(ours) / median(mean)


def report(rows: list[Row], folder: Path) -> str:
    """The largest size that there is."""
    largest = max(row["num_train"] for row in rows)
    return image_tables.lenet([row for row in rows if row["num_train"] == largest], DROPOUT)


BENCHMARK = Benchmark(
    "mnvi_lenet",
    "How good is LeNet trained with MNVI on MNIST, under the paper's settings?",
    plan,
    run,
    report,
)
