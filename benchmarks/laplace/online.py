# SPDX-License-Identifier: Apache-2.0
"""Scales that are chosen by the evidence during training, beside those that are chosen after it, or not at all.

Tabular data of scikit-learn, one hidden layer of 30 tanh units, float64. All three train for the same number of epochs
from prior scales of 1 (and, for regression, a noise of 0.5 standard deviations of the labels).
"""

import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import pyro
import torch
from pyro.infer import SVI, Trace_ELBO
from sklearn import datasets
from torch import Tensor, nn

import pyro_dvi as dvi
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.tables import provenance, table
from pyro_dvi.laplace import (
    Dense,
    KroneckerFactored,
    LaplaceGuide,
    NoiseScale,
    OnlineEvidence,
    PriorPrecision,
)

EPOCHS, EVERY, HIDDEN = 1000, 50, 30
DATA = ("diabetes", "breast_cancer", "wine")
WRITTEN, AFTER, DURING = WAYS = ("as written", "tuned after training", "during training")


def data(name: str, seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return standardised training data and test data."""
    x, y = getattr(datasets, f"load_{name}")(return_X_y=True)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    inputs, labels = torch.tensor(x).double()[order], torch.tensor(y)[order]
    cut = len(x) * 2 // 3
    inputs = (inputs - inputs[:cut].mean(0)) / inputs[:cut].std(0)
    if name == "diabetes":
        labels = (labels - labels[:cut].mean()) / labels[:cut].std()
    return (inputs[:cut], labels[:cut]), (inputs[cut:], labels[cut:])


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Every way on every data set."""
    seeds = range(3 if budget == "small" else 20)
    return [{"data": name, "scales": way, "seed": seed} for name in DATA for way in WAYS for seed in seeds]


def run(settings: Settings, data_dir: str | None) -> Row:
    """Return log evidence, and the test NLL of mode and linearised predictions."""
    name, way = settings["data"], settings["scales"]
    train, test = data(name, settings["seed"])
    outputs = 1 if name == "diabetes" else int(train[1].max()) + 1
    net = nn.Sequential(nn.Linear(train[0].shape[1], HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs)).double()
    dvi.to_bayesian_(net, prior_scale=1.0)
    scales: list[Any] = [PriorPrecision("*0.*"), PriorPrecision("*2.*")]
    if name == "diabetes":
        model: Any = dvi.regressor(net, num_data=len(train[0]), noise_scale=0.5)
        scales.append(NoiseScale())
    else:
        model = dvi.classifier(net, num_data=len(train[0]))
    guide, batches = LaplaceGuide(model), [train]
    online = OnlineEvidence(guide, batches, scales, method=KroneckerFactored(), every=EVERY)
    rate = {"lr": 1e-2, "lrd": 0.05 ** (1 / EPOCHS)}
    svi = SVI(online.model, guide, pyro.optim.ClippedAdam(rate), Trace_ELBO())
    dvi.fit(svi, batches, EPOCHS, callbacks=[online] if way == DURING else [], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # distances to the minimum, values at an edge
        for scale in scales if way == AFTER else []:
            guide.tune(batches, scale, method=KroneckerFactored(), unconverged="accept", progress=False)
        guide.fit(batches, Dense(), unconverged="accept")
        evidence = guide.log_evidence(batches).value
        at_mode, linearised = (
            dvi.predict(model, guide, test[0], rule).metrics(test[1])["nll"]
            for rule in (dvi.AtMean(), dvi.Linearised())
        )
    return {"log_evidence": evidence, "nll_mode": at_mode, "nll_linearised": linearised}


def report(rows: list[Row], folder: Path) -> str:
    """Means over seeds."""
    lines = []
    for name in DATA:
        for way in WAYS:
            found = [row for row in rows if (row["data"], row["scales"]) == (name, way)]
            scores = ("log_evidence", "nll_mode", "nll_linearised")
            if found:
                lines.append([name, way, *(f"{mean(row[score] for row in found):.3f}" for score in scores)])
    return (
        f"# Scales tuned with the evidence during training\n\nOne hidden layer of {HIDDEN} tanh units, {EPOCHS} "
        "epochs, means over seeds. The prior of each layer, and the noise of the regression, are chosen to maximise "
        f"the evidence with Kronecker factors, every {EVERY} epochs or once after training. The log evidence in the "
        "table is computed with the dense Gauss-Newton matrix; NLLs are test scores. "
        f"{provenance('laplace_online', rows)} Float64.\n\n"
        + table(["data", "scales", "log evidence", "NLL, mode", "NLL, linearised"], lines)
    )


BENCHMARK = Benchmark(
    "laplace_online",
    "Does it help to choose prior and noise with the evidence during training?",
    plan,
    run,
    report,
)
