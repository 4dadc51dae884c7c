# SPDX-License-Identifier: Apache-2.0
"""Regression on seven UCI sets, 10-fold cross-validation: the paper's MNVI, our recipe for it, and peers.

Networks of 50 hidden units predict mean and noise. All folds, ensemble members and hyper-parameter candidates of a
method train as one batch of networks. Hyper-parameters are chosen for each fold by the log-likelihood of
validation rows inside its training part; test rows are scored once, by the networks that the tables report. Further
seeds of the small sets train again with what the first seed chose.
"""

import math
from itertools import product
from pathlib import Path

import pyro
import torch
from torch import Tensor

from benchmarks.moments.uci_methods import (
    MNVI,
    EmpiricalBayes,
    FixedWeight,
    FullCovarianceMoments,
    MeanFieldMoments,
    Method,
    SampledVI,
)
from benchmarks.moments.uci_paper import AUTHORS_PROTOCOL, Paper
from benchmarks.moments.uci_peers import MAP, Dropout
from benchmarks.moments.uci_tables import tables
from benchmarks.shared.benchmark import Benchmark, Budget, Row, Settings
from benchmarks.shared.regressions import SETS, Rows, TrainingSets, folds, hold_out, load

METHODS: tuple[type[Method], ...] = (
    MNVI,
    MeanFieldMoments,
    FullCovarianceMoments,
    EmpiricalBayes,
    FixedWeight,
    MAP,
    Dropout,
    SampledVI,
)
NAMES = (AUTHORS_PROTOCOL, *(method.name for method in METHODS))
SMALL = ("boston", "concrete", "energy", "wine-quality-red", "yacht")  # on which further seeds are cheap


def plan(rows: list[Row], budget: Budget) -> list[Settings]:
    """Ask for the first seed of everything, then for two more; with a large budget on all sets and of twenty."""
    wanted: list[Settings] = [{"set": s, "method": m, "seed": 0} for m, s in product(NAMES, SETS)]
    firsts = [row for row in rows if row["seed"] == 0 and (budget == "gpu" or row["set"] in SMALL)]
    for row, seed in product(firsts, range(1, 3 if budget == "small" else 20)):
        chosen = " ".join(str(fold["chosen"]) for fold in row["folds"] if "chosen" in fold)
        again = {"set": row["set"], "method": row["method"], "seed": seed}
        wanted.append({**again, "chosen": chosen} if chosen else again)
    return wanted


def run(settings: Settings, data_dir: str | None) -> Row:
    """Train and score one method on one set."""
    torch.set_flush_denormal(True)  # tails of Gaussians underflow, which slows the processor down a lot
    pyro.enable_validation(False)
    name, seed = settings["set"], settings["seed"]
    x, y = load(name, data_dir)
    parts = folds(len(y))
    if settings["method"] == AUTHORS_PROTOCOL:
        return {"folds": Paper(name, seed=seed + 1).run(x, y, parts)}
    (method,) = (m() for m in METHODS if m.name == settings["method"])
    if "chosen" in settings:
        chosen = [float(value) for value in settings["chosen"].split()]
        return {"folds": test(method, x, y, parts, chosen, seed)}
    if len(method.candidates) == 1:
        results = test(method, x, y, parts, [*method.candidates] * len(parts), seed)
        return {
            "members": method.members,
            "steps": method.recipe.steps,
            "batch_size": batch_size(y),
            "folds": results,
        }
    return tune_and_test(method, x, y, parts)


def tune_and_test(method: Method, x: Tensor, y: Tensor, parts: list[tuple[Rows, Rows]]) -> Row:
    """Choose the hyper-parameter of each fold by validation, train on the whole fold, and score the test rows."""
    size = batch_size(y)
    repeats = 3 if len(y) < 600 else 1  # validation splits
    trials = [
        (fold, value, *hold_out(train, 5, repeat))
        for fold, (train, _) in enumerate(parts)
        for value in method.candidates
        for repeat in range(repeats)
    ]
    data = TrainingSets(x, y, [train for _, _, train, _ in trials])
    values = torch.tensor([value for _, value, _, _ in trials])
    fitted = method.fit(data, size, values, seed=0)
    log_density, _, valid = fitted.score([held for _, _, _, held in trials], method.rule)
    scores = log_density.where(valid, torch.zeros_like(log_density)).sum(0) / valid.sum(0)
    table = scores.reshape(len(parts), len(method.candidates), repeats).mean(-1)
    chosen = [method.candidates[k] for k in table.argmax(-1).tolist()]

    results = test(method, x, y, parts, chosen, seed=0)
    for fold, row in enumerate(results):
        row["validation"] = dict(zip(map(str, method.candidates), table[fold].tolist(), strict=True))
    return {
        "tuned": method.tuned,
        "members": method.members,
        "steps": method.recipe.steps,
        "batch_size": size,
        "validation_splits": repeats,
        "folds": results,
    }


def test(
    method: Method, x: Tensor, y: Tensor, parts: list[tuple[Rows, Rows]], chosen: list[float], seed: int
) -> list[Row]:
    """Train on the whole training part of each fold with its hyper-parameter, and score the test rows."""
    rows = [train for train, _ in parts for _ in range(method.members)]
    data = TrainingSets(x, y, rows)
    values = torch.tensor([value for value in chosen for _ in range(method.members)])
    fitted = method.fit(data, batch_size(y), values, seed + 1)
    held = [test for _, test in parts for _ in range(method.members)]
    log_density, mean, _ = fitted.score(held, method.rule)
    results = []
    for fold, (_, rows_of_fold) in enumerate(parts):
        nets = slice(fold * method.members, (fold + 1) * method.members)
        here = slice(len(rows_of_fold)), nets
        results.append({"chosen": chosen[fold], **scored(log_density[here], mean[here], y[rows_of_fold])})
    return results


def batch_size(y: Tensor) -> int:
    """Rows in a minibatch."""
    return 64 if len(y) > 2000 else 32


def scored(log_density: Tensor, mean: Tensor, y: Tensor) -> Row:
    """Scores of single networks (averaged) and of their equal mixture, from ``[examples, networks]``."""
    count = mean.shape[1]
    single = {
        "log_likelihood": log_density.mean().item(),
        "rmse": (mean - y.unsqueeze(1)).square().mean(0).sqrt().mean().item(),
    }
    mixture = log_density.logsumexp(1) - math.log(count)
    together = {
        "log_likelihood": mixture.mean().item(),
        "rmse": (mean.mean(1) - y).square().mean().sqrt().item(),
    }
    return {"single": single} | ({"ensemble": together} if count > 1 else {})


def report(rows: list[Row], folder: Path) -> str:
    """All tables."""
    return tables(rows)


BENCHMARK = Benchmark(
    "uci",
    "Can MNVI's regression table be reproduced, and which method is best with equal tuning?",
    plan,
    run,
    report,
)
