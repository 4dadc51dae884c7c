# SPDX-License-Identifier: Apache-2.0
"""Scales that are chosen by the evidence during training, beside those that are chosen after it, or not at all.

Tabular data of scikit-learn, one hidden layer of 30 tanh units, float64. All three train for the same number of epochs
from prior scales of 1 (and, for regression, a noise of 0.5 standard deviations of the labels).

    python benchmarks/laplace_online.py

writes results/laplace_online.md.
"""

import platform
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
from pyro_dvi.laplace import (
    Accept,
    Dense,
    KroneckerFactored,
    LaplaceGuide,
    NoiseScale,
    OnlineEvidence,
    PriorPrecision,
)

RESULTS = Path(__file__).parent / "results" / "laplace_online.md"
SEEDS, EPOCHS, EVERY, HIDDEN = (0, 1, 2), 1000, 50, 30
WAYS = ("as written", "tuned after training", "during training")


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


def run(name: str, way: str, seed: int) -> tuple[float, float, float]:
    """Return log evidence, and the test NLL of mode and linearised predictions."""
    train, test = data(name, seed)
    pyro.clear_param_store()
    torch.manual_seed(seed)
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
    dvi.fit(svi, batches, EPOCHS, callbacks=[online] if way == WAYS[2] else [], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # distances to the minimum, values at an edge
        for scale in scales if way == WAYS[1] else []:
            guide.tune(batches, scale, method=KroneckerFactored(), unconverged=Accept(), progress=False)
        guide.fit(batches, Dense(), unconverged=Accept())
        evidence = guide.log_evidence(batches).value
        found = [dvi.predict(model, guide, test[0], rule) for rule in (dvi.AtMean(), dvi.Linearised())]
    row = evidence, *(p.metrics(test[1])["nll"] for p in found)
    print(name, way, seed, [round(v, 3) for v in row], guide.scale_factors, flush=True)
    return row  # type: ignore[return-value]


def main() -> None:
    """Run all and write the table."""
    torch.set_num_threads(1)
    rows = []
    for name in ("diabetes", "breast_cancer", "wine"):
        for way in WAYS:
            found = [run(name, way, seed) for seed in SEEDS]
            values = (mean(row[k] for row in found) for k in range(3))
            rows.append(f"| {name} | {way} | " + " | ".join(f"{v:.3f}" for v in values) + " |")
    text = [
        "# Scales by the evidence, during training",
        "",
        f"One hidden layer of {HIDDEN} tanh units, {EPOCHS} epochs, means of {len(SEEDS)} seeds. The prior of each",
        "layer, and the noise of the regression, are chosen by the evidence with Kronecker factors:",
        f"every {EVERY} epochs, or once after training. Log evidence is that of the",
        "dense Gauss-Newton matrix; NLL is of test data.",
        f"torch {torch.__version__}, {platform.machine()}, float64.",
        "",
        "| data | scales | log evidence | NLL, mode | NLL, linearised |",
        "|---|---|---|---|---|",
        *rows,
        "",
    ]
    RESULTS.write_text("\n".join(text))


if __name__ == "__main__":
    main()
