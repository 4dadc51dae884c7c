# SPDX-License-Identifier: Apache-2.0
"""Regression on seven UCI sets, 10-fold cross-validation: the paper's MNVI, our recipe for it, and peers.

Networks of 50 hidden units predict mean and noise. All folds, ensemble members and hyper-parameter candidates of a
method train as one batch of networks. Hyper-parameters are chosen for each fold by the log-likelihood of
validation rows inside its training part; test rows are scored once, by the networks that the tables report.

    python benchmarks/uci.py --data-dir DIR           # everything, half an hour of processor time
    python benchmarks/uci.py --data-dir DIR --quick   # one set, two folds, a few steps: only to see that it runs
    python benchmarks/uci.py --report                 # only rewrite the tables from the results

Each finished set and method is a line of results/uci.jsonl; what is there already is not repeated.
"""

import argparse
import json
import math
import platform
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import pyro
import torch
from torch import Tensor
from tqdm import tqdm

from benchmarks.shared.regressions import SETS, Rows, TrainingSets, folds, hold_out, load
from benchmarks.uci_methods import MNVI, Method, Recipe, SampledVI
from benchmarks.uci_paper import AUTHORS_PROTOCOL, Paper
from benchmarks.uci_peers import MAP, Dropout
from benchmarks.uci_report import write_report

RESULTS = Path(__file__).parent / "results" / "uci.jsonl"
SEED = 0
METHODS: tuple[type[Method], ...] = (MNVI, MAP, Dropout, SampledVI)
NAMES = (AUTHORS_PROTOCOL, *(method.name for method in METHODS))


def run(name: str, method: str, data_dir: str | None, num_folds: int, steps: int | None) -> dict[str, Any]:
    """Train and score one method on one set."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # tails of Gaussians underflow, which slows the processor down a lot
    pyro.enable_validation(False)
    start, start_cpu = time.perf_counter(), time.process_time()
    x, y = load(name, data_dir)
    parts = folds(len(y))[:num_folds]
    if method == AUTHORS_PROTOCOL:
        row = {"folds": Paper(name, epochs=2 if steps else 200).run(x, y, parts)}
    else:
        (cls,) = (m for m in METHODS if m.name == method)
        row = tune_and_test(cls(Recipe(steps=steps) if steps else Recipe()), x, y, parts)
    return {
        "set": name,
        "method": method,
        "seconds": time.perf_counter() - start,
        "cpu_seconds": time.process_time() - start_cpu,
        **row,
    }


def tune_and_test(method: Method, x: Tensor, y: Tensor, parts: list[tuple[Rows, Rows]]) -> dict[str, Any]:
    """Choose the hyper-parameter of each fold by validation, train on the whole fold, and score the test rows."""
    size = 64 if len(y) > 2000 else 32
    repeats = 3 if len(y) < 600 else 1  # validation splits
    trials = [
        (fold, value, *hold_out(train, 5, repeat))
        for fold, (train, _) in enumerate(parts)
        for value in method.candidates
        for repeat in range(repeats)
    ]
    data = TrainingSets(x, y, [train for _, _, train, _ in trials])
    values = torch.tensor([value for _, value, _, _ in trials])
    fitted = method.fit(data, size, values, SEED)
    log_density, _, valid = fitted.score([held for _, _, _, held in trials], method.rule)
    scores = log_density.where(valid, torch.zeros_like(log_density)).sum(0) / valid.sum(0)
    table = scores.reshape(len(parts), len(method.candidates), repeats).mean(-1)
    chosen = [method.candidates[k] for k in table.argmax(-1).tolist()]

    rows = [train for train, _ in parts for _ in range(method.members)]
    data = TrainingSets(x, y, rows)
    values = torch.tensor([value for value in chosen for _ in range(method.members)])
    fitted = method.fit(data, size, values, SEED + 1)
    log_density, mean, _ = fitted.score(
        [test for _, test in parts for _ in range(method.members)], method.rule
    )
    results = []
    for fold, (_, test) in enumerate(parts):
        nets = slice(fold * method.members, (fold + 1) * method.members)
        results.append(
            {
                "chosen": chosen[fold],
                "validation": dict(zip(map(str, method.candidates), table[fold].tolist(), strict=True)),
                **scored(log_density[: len(test), nets], mean[: len(test), nets], y[test]),
            }
        )
    return {
        "tuned": method.tuned,
        "members": method.members,
        "steps": method.recipe.steps,
        "batch_size": size,
        "validation_splits": repeats,
        "folds": results,
    }


def scored(log_density: Tensor, mean: Tensor, y: Tensor) -> dict[str, Any]:
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


def machine() -> dict[str, Any]:
    """What the results were computed with."""
    model = platform.processor() or platform.machine()
    cpu = Path("/proc/cpuinfo")
    if cpu.exists():
        names = [
            line.split(":")[1].strip()
            for line in cpu.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0] if names else model
    return {"cpu": model, "threads": 1, "torch": torch.__version__, "seed": SEED}


def read_results(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", help="folder with uci/<set>.npz (else the variable PYRO_DVI_DATA)")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--methods", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--jobs", type=int, default=2, help="processes, one thread each")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--quick", action="store_true", help="yacht, two folds, 30 steps; writes no results")
    parser.add_argument("--report", action="store_true", help="only rewrite the tables")
    options = parser.parse_args(arguments)
    if options.quick:
        for method in options.methods:
            row = run("yacht", method, options.data_dir, num_folds=2, steps=30)
            print(f"{method}: {row['folds'][0]['single']}, {row['seconds']:.1f} s")
        return
    if not options.report:
        options.results.parent.mkdir(exist_ok=True)
        done = {(row["set"], row["method"]) for row in read_results(options.results)}
        todo = [(s, m) for m in options.methods for s in options.sets if (s, m) not in done]
        with ProcessPoolExecutor(options.jobs) as pool:
            futures = [pool.submit(run, s, m, options.data_dir, 10, None) for s, m in todo]
            for future in tqdm(as_completed(futures), total=len(futures), desc="runs"):
                with options.results.open("a") as file:
                    file.write(json.dumps({**future.result(), **machine()}) + "\n")
    write_report(read_results(options.results), options.results.with_suffix(".md"))


if __name__ == "__main__":
    main()
