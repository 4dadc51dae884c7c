# SPDX-License-Identifier: Apache-2.0
"""How many runs of the model, and how long, do an export and predictions take? Beside ``pyro.infer.Predictive``.

All contestants draw the weights of a small network equally often: ``to_arviz`` keeps a draw of every observation for
each, with its log density; ``Predictive`` the draws of observations alone; ``predict`` averages. They take turns, and
medians over rounds are reported.

    python benchmarks/export_speed.py
    python benchmarks/export_speed.py --num-samples 20 --num-rows 50 --rounds 1      # whether it runs
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import pyro.distributions as dist
import torch
from pyro.infer import Predictive
from pyro.nn import PyroModule
from torch import Tensor, nn

from pyro_dvi import MeanFieldGuide, Samples, predict, to_arviz, to_bayesian_

RESULTS = Path(__file__).parent / "results"


class Model(PyroModule):
    """A network with a likelihood of its numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = to_bayesian_(nn.Sequential(nn.Linear(13, width), nn.ReLU(), nn.Linear(width, 1)))

    def forward(self, x: Tensor, y: Tensor | None = None) -> None:
        mean = self.net(x).squeeze(-1)
        with pyro.plate("data", len(x)):
            pyro.sample("obs", dist.Normal(mean, 0.5), obs=y)


def contestants(
    model: Callable[..., Any], guide: MeanFieldGuide, x: Tensor, y: Tensor, count: int
) -> dict[str, Callable[[], Any]]:
    rule = Samples(count)

    def looped() -> Any:
        return Predictive(model, guide=guide, num_samples=count, return_sites=["obs"])(x)

    return {
        "to_arviz": lambda: to_arviz(model, guide, (x, y), method=rule, seed=0),
        "to_arviz, prior=n": lambda: to_arviz(model, guide, (x, y), method=rule, prior=count, seed=0),
        "predict": lambda: predict(model, guide, (x, y), rule, seed=0),
        "predict, keep_draws=True": lambda: predict(model, guide, (x, y), rule, seed=0, keep_draws=True),
        "Predictive": looped,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--num-samples", type=int, default=500)
    parser.add_argument("--num-rows", type=int, default=2000)
    parser.add_argument("--width", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.manual_seed(0)
    x, y = torch.randn(options.num_rows, 13), torch.randn(options.num_rows)
    module = Model(options.width).eval()
    guide = MeanFieldGuide(module)
    guide(x, y)

    called: list[None] = []  # not kept in the module: a model that keeps something runs once for each draw

    def model(x: Tensor, y: Tensor | None = None) -> None:
        called.append(None)
        module(x, y)

    runs: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    for number in range(options.rounds + 1):  # the first loads what is loaded once
        for name, run in contestants(model, guide, x, y, options.num_samples).items():
            called.clear()
            start = time.perf_counter()
            with torch.no_grad():
                run()
            if number > 0 or options.rounds == 0:
                seconds.setdefault(name, []).append(time.perf_counter() - start)
            runs[name] = len(called)
    rows = [
        {"contestant": name, "runs": runs[name], "seconds": statistics.median(values)}
        for name, values in seconds.items()
    ]
    lines = ["| contestant | runs of the model | seconds |", "|---|---|---|"]
    lines += [f"| {row['contestant']} | {row['runs']} | {row['seconds']:.3f} |" for row in rows]
    lines += [
        "",
        f"{options.num_samples} draws, {options.num_rows} rows, medians of {options.rounds} rounds. torch "
        f"{torch.__version__}, {platform.machine()} CPU, {torch.get_num_threads()} threads.",
    ]
    print("\n".join(lines))
    options_used = {name: value for name, value in vars(options).items() if name != "output_dir"}
    record = {
        "rows": rows,
        "torch": torch.__version__,
        "machine": f"{platform.machine()} CPU",
        **options_used,
    }
    options.output_dir.mkdir(parents=True, exist_ok=True)
    (options.output_dir / "export_speed.json").write_text(json.dumps(record, default=str, indent=1) + "\n")
    (options.output_dir / "export_speed.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
